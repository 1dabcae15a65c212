"""Makes actions of a call's arguments, by the rule of the call."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rayloop.envs.grammar import actions
from rayloop.envs.grammar.actions import Action, Click, Hotkey, Mark, Point, Scroll
from rayloop.envs.grammar.bodies import QUOTED_CHARACTERS, Stop, WrittenCall
from rayloop.envs.grammar.calls import DIRECTIONS, MOST_KEYS, key
from rayloop.envs.grammar.rules import BUTTONS, SIGNED, WHOLE_SCREEN, Extent, Rule, Specification
from rayloop.envs.grammar.scanner import point

MAX_REPEATS = 20
"""Times that one call may press a key, and places of a drag."""
MAX_NUMBER = 1e9
"""Larger numbers are refused."""
MAX_INTEGER_TEXT = 10**18
"""Larger numbers are not taken for a text."""


@dataclass(frozen=True)
class ArgumentReader:
    """Reads the arguments of a call.

    ``texts``: whether points are texts. ``keys``: the language's names of keys, in lower case ->
    the grammar's.
    """

    call: WrittenCall
    screen: Extent
    texts: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)

    def actions(self, rule: Rule, arguments: Mapping[str, Any]) -> tuple[Action, ...]:
        """Return what a rule makes of a call. Raises Stop."""
        values = dict(rule.fixed)
        for name, specification in rule.specifications.items():
            given = self.value(name, specification, arguments)
            if given is not None:
                values[name] = given
        return _made(rule, values)

    def value(self, name: str, specification: Specification, arguments: Mapping[str, Any]) -> Any:
        """Return a field's value; None where its arguments are missing. Raises Stop."""
        names = specification.names
        if any(argument not in arguments for argument in names):
            return None
        values = [arguments[argument] for argument in names]
        if specification.is_mark:
            mark = self._text(names[0], values[0])
            return None if mark == WHOLE_SCREEN else Mark(mark)
        if len(names) == 2:
            return self._point(" ".join(names), values)
        reader = _READERS.get(name, _READERS["text"])
        return reader(self, names[0], values[0])

    def _stop(self, name: str, expected: str, value: Any) -> Stop:
        shown = repr(value)[:QUOTED_CHARACTERS] if _is_flat(value) else type(value).__name__
        return Stop(f"{name} must be {expected}, not {shown}", self.call.position)

    def _text(self, name: str, value: Any) -> str:
        """Return a text, or the texts of a message's parts."""
        if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
            texts = [part.get("text") for part in value]
            value = "".join(text for text in texts if isinstance(text, str))
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value) if abs(value) < MAX_INTEGER_TEXT else value
        if not isinstance(value, str):
            raise self._stop(name, "a text", value)
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise self._stop(name, "a text without lone surrogates", "...") from error
        return value

    def _number(self, name: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not -MAX_NUMBER < value < MAX_NUMBER:
            raise self._stop(name, "a number", value)
        return float(value)

    def _count(self, name: str, value: Any) -> int:
        count = self._number(name, value)
        if count != int(count) or not 1 <= count <= MAX_REPEATS:
            raise self._stop(name, f"a whole number from 1 to {MAX_REPEATS}", value)
        return int(count)

    def _flag(self, name: str, value: Any) -> bool:
        if value not in (True, False):
            raise self._stop(name, "true or false", value)
        return bool(value)

    def _point(self, name: str, value: Any) -> Point:
        """Return a point of two numbers, or the middle of a box of four."""
        expected = f"a point in 0..{self.screen.columns:g} x 0..{self.screen.rows:g}"
        place: Point | None = None
        if isinstance(value, str) and self.texts:
            place = point(value)
        elif isinstance(value, dict) and set(value) == {"x", "y"}:
            value = [value["x"], value["y"]]
        if isinstance(value, list | tuple) and len(value) == 1:
            [value] = value
        if isinstance(value, list | tuple) and len(value) in (2, 4):
            numbers = [self._number(name, number) for number in value]
            place = Point((numbers[0] + numbers[-2]) / 2, (numbers[1] + numbers[-1]) / 2)
        if place is None:
            raise self._stop(name, expected, value)
        if not (0 <= place.x <= self.screen.columns and 0 <= place.y <= self.screen.rows):
            raise self._stop(name, expected, (place.x, place.y))
        return place

    def _place(self, name: str, value: Any) -> Point | Mark | None:
        """Return a point, or what the text in a line's brackets names."""
        if isinstance(value, str) and self.texts and point(value) is None:
            return None if value == WHOLE_SCREEN else Mark(value[:QUOTED_CHARACTERS])
        return self._point(name, value)

    def _places(self, name: str, value: Any) -> list[Point]:
        if not isinstance(value, list) or not 2 <= len(value) <= MAX_REPEATS:
            raise self._stop(name, f"a list of 2 to {MAX_REPEATS} points", value)
        return [self._point(name, one) for one in value]

    def _keys(self, name: str, value: Any) -> tuple[str, ...]:
        """Return the keys of a list, or of a text such as ``ctrl+c``."""
        words = _words(value) if isinstance(value, str) else value
        if not isinstance(words, list | tuple) or not 1 <= len(words) <= MOST_KEYS:
            raise self._stop(name, f"1 to {MOST_KEYS} keys", value)
        return tuple(self._key(name, word) for word in words)

    def _key(self, name: str, value: Any) -> str:
        written = value if isinstance(value, str) else ""
        if written == " ":
            return "space"
        # Qwen3.5 writes a list in a list now and then.
        pure = written.strip("[]'\" ") or written
        known = self.keys.get(pure.lower()) or key(pure)
        if known is None:
            raise self._stop(name, "the name of a key", value)
        return known

    def _direction(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or value.lower() not in DIRECTIONS:
            raise self._stop(name, f"one of {', '.join(DIRECTIONS)}", value)
        return value.lower()

    def _button(self, name: str, value: Any) -> str:
        if value not in BUTTONS:
            raise self._stop(name, "left, right or middle", value)
        return str(value)


_READERS: Mapping[str, Callable[[ArgumentReader, str, Any], Any]] = {
    "at": ArgumentReader._place,
    "focus": ArgumentReader._place,
    "start": ArgumentReader._point,
    "end": ArgumentReader._point,
    "places": ArgumentReader._places,
    "keys": ArgumentReader._keys,
    "each": ArgumentReader._keys,
    "key": ArgumentReader._key,
    "seconds": ArgumentReader._number,
    "amount": ArgumentReader._number,
    **dict.fromkeys(SIGNED, ArgumentReader._number),
    "times": ArgumentReader._count,
    "presses": ArgumentReader._count,
    "clear": ArgumentReader._flag,
    "enter": ArgumentReader._flag,
    "direction": ArgumentReader._direction,
    "button": ArgumentReader._button,
    "text": ArgumentReader._text,
}
"""How a field is read; all others are texts."""


def _is_flat(value: Any) -> bool:
    """Return whether showing a value takes little time."""
    if isinstance(value, list | tuple):
        return len(value) <= 8 and not any(isinstance(one, list | dict | tuple) for one in value)
    return not isinstance(value, dict) and not (isinstance(value, str) and len(value) > 1000)


def _words(text: str) -> list[str]:
    """Return the keys of ``ctrl+c`` or ``ctrl c``; ``+`` is a key, too."""
    if len(text) > 100 or text in ("+", " "):
        return [text]
    return text.replace("++", " plus").replace("+", " ").split()


def _made(rule: Rule, values: dict[str, Any]) -> tuple[Action, ...]:
    """Return the actions that values stand for, by the fields of the rule's action and more."""
    if rule.act == "Scroll" and SIGNED.keys() & values.keys():
        return _scrolls(values)
    if "each" in values:
        presses = values.get("presses", 1)
        return tuple(Hotkey((name,)) for name in values["each"] for _ in range(presses))
    first: list[Action] = []
    if rule.act == "Type":
        if "focus" in values:
            first.append(Click(values.pop("focus")))
        enter = "\n" if values.pop("enter", False) else ""
        values["text"] = values.get("text", "") + rule.append + enter
    if "places" in values:
        start, *path, end = values.pop("places")
        values |= {"start": start, "path": tuple(path), "end": end}
    if rule.act == "Drag":
        values.setdefault("start", None)
    repeats = values.pop("presses", 1)
    action: Action = getattr(actions, rule.act)(**values)
    return (*first, *[action] * repeats)


def _scrolls(values: dict[str, Any]) -> tuple[Action, ...]:
    """Return a scroll for each signed amount that is not 0; at least one."""
    amounts = {name: values.pop(name) for name in list(values) if name in SIGNED}
    scrolls = []
    for positive, amount in amounts.items():
        direction = positive if amount >= 0 else SIGNED[positive]
        scroll = Scroll(direction=direction, amount=abs(amount), **values)  # type: ignore[arg-type]
        scrolls.append(scroll)
    moving = [scroll for scroll in scrolls if scroll.amount]
    return tuple(moving or scrolls[:1])
