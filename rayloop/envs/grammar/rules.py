"""What a language's calls mean: each rule leads from a call to an action, and back."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from rayloop.config.settings import SettingsModel
from rayloop.envs.grammar import actions
from rayloop.envs.grammar.actions import (
    Action,
    Click,
    Drag,
    Hotkey,
    Mark,
    Point,
    Scroll,
    Type,
    Unsupported,
)
from rayloop.envs.grammar.bodies import QUOTED_CHARACTERS, Stop, WrittenCall
from rayloop.envs.grammar.calls import DIRECTIONS, MOST_KEYS, key
from rayloop.envs.grammar.scanner import point

MAX_REPEATS = 20
"""Times that one call may press a key, and places of a drag."""
WHOLE_SCREEN = "WINDOW"
"""The mark that stands for no element."""
USUAL_AMOUNTS = {"notches": 5.0, "pixels": 500.0, "fraction": 0.5}
"""How far a scroll is written where the action does not say it, by unit."""
SIGNED = {"up": "down", "down": "up", "left": "right", "right": "left"}
"""Fields of a rule for a scroll with a signed number -> the direction of a negative one."""
_COORDINATE_DIGITS = 4


@dataclass(frozen=True)
class Extent:
    """The largest coordinates of a screen, in the unit in which a model writes them."""

    columns: float
    rows: float


class Rule(SettingsModel):
    """A call and the action that it means."""

    call: str
    """The call's name; several rules may have the same."""
    act: str
    """The name of the action's class."""
    when: dict[str, Any] = {}
    """Arguments with exactly these values."""
    fields: dict[str, str] = {}
    """Field of the action -> the argument's name, with ``?`` behind it when it may be missing.

    ``x y`` are two numbers of a point, ``#index`` is an element's mark. More fields: ``focus`` is
    clicked before a text is typed; ``up`` and ``right`` (or ``down``, ``left``) are signed amounts
    of a scroll; ``places`` are the points of a drag; ``presses`` says how often keys are pressed;
    ``each`` are keys that are pressed one after the other; ``enter`` ends a text with a new line.
    """
    set: dict[str, Any] = {}
    """Fields of the action with fixed values, or with one where the argument is missing."""
    append: str = ""
    """What typing adds to the text."""
    bare: bool = False
    """Whether the call is written without the object around others."""

    @property
    def arguments(self) -> list[str]:
        """The names of the arguments, in their order."""
        return " ".join(self.fields.values()).replace("?", "").replace("#", "").split()

    @property
    def needed(self) -> list[str]:
        """The names of the arguments that must be given."""
        specs = [spec for spec in self.fields.values() if not spec.endswith("?")]
        return " ".join(specs).replace("#", "").split()

    def fits(self, arguments: Mapping[str, Any]) -> bool:
        """Return whether the call has the values of ``when``."""
        return all(arguments.get(name) == value for name, value in self.when.items())

    def refusal(self, arguments: Mapping[str, Any], ignored: Sequence[str]) -> str | None:
        """Return what is wrong with the names of a call's arguments."""
        known = {*self.arguments, *self.when, *ignored}
        takes = ", ".join([*self.when, *self.arguments]) or "no arguments"
        for name in arguments:
            if name not in known:
                return f"{self.call} takes {takes}, not {name[:QUOTED_CHARACTERS]!r}"
        for name in self.needed:
            if name not in arguments:
                return f"{self.call} needs {name!r} (it takes {takes})"
        return None


class Rules(SettingsModel):
    """The calls of one function, or of a language without functions."""

    function: str = ""
    """The function whose argument names the call, such as computer_use."""
    calls: tuple[Rule, ...] = Field(min_length=1)


@dataclass(frozen=True)
class ArgumentReader:
    """Reads the arguments of a call. ``texts``: whether points are texts."""

    call: WrittenCall
    screen: Extent
    texts: bool = False

    def actions(self, rule: Rule, arguments: Mapping[str, Any]) -> tuple[Action, ...]:
        """Return what a rule makes of a call. Raises Stop."""
        values: dict[str, Any] = {}
        for field, spec in rule.fields.items():
            given = self.value(field, spec.removesuffix("?"), arguments)
            if given is not None:
                values[field] = given
        return _made(rule, values)

    def value(self, field: str, spec: str, arguments: Mapping[str, Any]) -> Any:
        """Return a field's value; None where its arguments are missing. Raises Stop."""
        names = spec.removeprefix("#").split()
        if any(name not in arguments for name in names):
            return None
        given = [arguments[name] for name in names]
        if spec.startswith("#"):
            mark = self._text(names[0], given[0])
            return None if mark == WHOLE_SCREEN else Mark(mark)
        if len(names) == 2:
            return self._point(spec, given)
        reader = _READERS.get(field, _READERS["text"])
        return reader(self, names[0], given[0])

    def _stop(self, name: str, expected: str, value: Any) -> Stop:
        shown = repr(value)[:QUOTED_CHARACTERS] if _is_flat(value) else type(value).__name__
        return Stop(f"{name} must be {expected}, not {shown}", self.call.position)

    def _text(self, name: str, value: Any) -> str:
        """Return a text, or the texts of a message's parts."""
        if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
            texts = [part.get("text") for part in value]
            value = "".join(text for text in texts if isinstance(text, str))
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value) if abs(value) < 10**18 else value
        if not isinstance(value, str):
            raise self._stop(name, "a text", value)
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise self._stop(name, "a text without lone surrogates", "...") from error
        return value

    def _number(self, name: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not -1e9 < value < 1e9:
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
        # Qwen3.5 writes a list in a list now and then.
        pure = written.strip("[]'\" ") or written
        known = key(pure) or key(_OTHER_KEYS.get(pure.lower(), ""))
        if pure == " ":
            known = "space"
        if known is None:
            raise self._stop(name, "the name of a key", value)
        return known

    def _direction(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or value.lower() not in DIRECTIONS:
            raise self._stop(name, f"one of {', '.join(DIRECTIONS)}", value)
        return value.lower()

    def _button(self, name: str, value: Any) -> str:
        if value not in ("left", "right", "middle"):
            raise self._stop(name, "left, right or middle", value)
        return str(value)


_OTHER_KEYS = {
    "lcontrol": "ctrl",
    "rcontrol": "ctrl",
    "control_l": "ctrl",
    "lshift": "shift",
    "shift_l": "shift",
    "lmenu": "alt",
    "alt_l": "alt",
    "super_l": "meta",
    "ctrlleft": "ctrl",
    "shiftleft": "shift",
    "altleft": "alt",
    "winleft": "meta",
    "prior": "pageup",
    "next": "pagedown",
    "kp_enter": "enter",
}
"""Names of keys by xdotool, pyautogui and CogAgent -> the grammar's."""
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
    """Return the actions that values stand for, with the rule's fixed ones."""
    fixed = {
        name: tuple(value) if isinstance(value, list) else value for name, value in rule.set.items()
    }
    values = fixed | values
    if rule.act == "Scroll" and SIGNED.keys() & values.keys():
        return _scrolls(values)
    before: list[Action] = []
    if rule.act == "Type":
        if "focus" in values:
            before.append(Click(values.pop("focus")))
        enter = "\n" if values.pop("enter", False) else ""
        values["text"] = values.get("text", "") + rule.append + enter
    if "places" in values:
        start, *path, end = values.pop("places")
        values |= {"start": start, "path": tuple(path), "end": end}
    if rule.act == "Drag":
        values.setdefault("start", None)
    if "each" in values:
        return tuple(
            Hotkey((name,)) for name in values["each"] for _ in range(values.get("presses", 1))
        )
    repeats = values.pop("presses", 1)
    action: Action = getattr(actions, rule.act)(**values)
    return (*before, *[action] * repeats)


def _scrolls(values: dict[str, Any]) -> tuple[Action, ...]:
    """Return a scroll for each signed amount that is not 0; at least one."""
    amounts = {name: values.pop(name) for name in list(values) if name in SIGNED}
    results = []
    for direction, amount in amounts.items():
        way = direction if amount >= 0 else SIGNED[direction]
        results.append(Scroll(direction=way, amount=abs(amount), **values))  # type: ignore[arg-type]
    return tuple(scroll for scroll in results if scroll.amount) or tuple(results[:1])


PointStyle = Literal["pair", "text", "box", "dict"]


@dataclass(frozen=True)
class ActionWriter:
    """Writes actions as calls. ``points`` is how a place is written."""

    points: PointStyle = "pair"

    def call(self, rule: Rule, action: Action, focus: Any = None) -> WrittenCall | None:
        """Return the call; None where the rule does not say all that the action does.

        ``focus``: what is clicked before a text is typed, which the rule must have a field for.
        """
        if type(action).__name__ != rule.act:
            return None
        if isinstance(action, Unsupported):
            has_name = action.name == rule.call
            return WrittenCall(rule.call, dict(action.arguments)) if has_name else None
        values = {field.name: getattr(action, field.name) for field in dataclasses.fields(action)}
        defaults = {
            field.name: field.default
            for field in dataclasses.fields(action)
            if field.default is not dataclasses.MISSING
        }
        if not self._prepared(rule, action, values, focus):
            return None
        arguments = dict(rule.when)
        for field, fixed in rule.set.items():
            expected = tuple(fixed) if isinstance(fixed, list) else fixed
            if field not in rule.fields and values.pop(field, None) != expected:
                return None
        for field, spec in rule.fields.items():
            value = values.pop(field, None)
            is_needed = not spec.endswith("?")
            if value is None or (not is_needed and value == defaults.get(field)):
                if is_needed:
                    return None
                continue
            if not self._write(arguments, spec.removesuffix("?"), value):
                return None
        is_complete = all(value == defaults.get(field) for field, value in values.items())
        return WrittenCall(rule.call, arguments) if is_complete else None

    def _prepared(self, rule: Rule, action: Action, values: dict[str, Any], focus: Any) -> bool:
        """Put the values of the rule's own fields in place; False where that cannot be."""
        if (focus is not None) and "focus" not in rule.fields:
            return False
        values["focus"] = focus
        match action:
            case Type(text):
                if not text.endswith(rule.append):
                    return False
                values["text"] = text.removesuffix(rule.append)
            case Scroll(direction, _, amount, unit):
                unit = rule.set.get("unit", unit)
                is_needed = not rule.fields.get("amount", "?").endswith("?")
                if amount is None and (is_needed or SIGNED.keys() & rule.fields.keys()):
                    values |= {"amount": USUAL_AMOUNTS[unit], "unit": unit}
                for name in SIGNED.keys() & rule.fields.keys():
                    if direction in (name, SIGNED[name]):
                        size = values.pop("amount")
                        values[name] = size if direction == name else -size
                        del values["direction"]
                        break
            case Drag(start, end, path) if "places" in rule.fields and start is not None:
                values["places"] = [start, *path, end]
                del values["start"], values["path"], values["end"]
            case Hotkey(names) if "each" in rule.fields:
                values["each"] = list(values.pop("keys"))
                return len(names) == 1
        if values["focus"] is None:
            del values["focus"]
        return True

    def _write(self, arguments: dict[str, Any], spec: str, value: Any) -> bool:
        """Add an argument; False where the value is of another kind than the language has."""
        names = spec.removeprefix("#").split()
        # A line's brackets hold a mark or a point.
        holds_marks = spec.startswith("#") or self.points == "text"
        if isinstance(value, Mark) and not holds_marks:
            return False
        if spec.startswith("#") and not isinstance(value, Mark):
            return False
        if len(names) == 2:
            if not isinstance(value, Point):
                return False
            arguments |= dict(zip(names, (_number(value.x), _number(value.y)), strict=True))
            return True
        arguments[names[0]] = self._written(value)
        return True

    def _written(self, value: Any) -> Any:
        match value:
            case Point(x, y):
                pair = [_number(x), _number(y)]
                styles = {"pair": pair, "text": str(pair).replace(" ", ""), "box": [pair * 2]}
                return styles.get(self.points, {"x": pair[0], "y": pair[1]})
            case Mark(name):
                return int(name) if name.isdecimal() and self.points != "text" else name
            case tuple() | list():
                return [self._written(one) for one in value]
            case float():
                return _number(value)
        return value


def _number(value: float) -> int | float:
    return int(value) if value == math.floor(value) else round(value, _COORDINATE_DIGITS)
