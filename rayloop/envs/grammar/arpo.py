"""How ARPO itself reads a turn (dvlab-research/ARPO at 7489ae3), mistakes included, for ``variant:
original``. The code that it makes for an action is never run: ``acts`` reads it as data.
"""

import ast
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rayloop.data.resizing import smart_resize
from rayloop.envs.grammar import calls
from rayloop.envs.grammar.actions import (
    Action,
    CallUser,
    Click,
    Drag,
    Finish,
    HoldKey,
    Hotkey,
    Hover,
    Point,
    Scroll,
    Sleep,
    Type,
)

WIDTH, HEIGHT = 1920, 1080
"""Pixels of its screens, whatever the real one is."""
_ARROWS = {f"arrow{way}": way for way in ("left", "right", "up", "down")}
_ENDS = ("finished", "wait", "error_env", "call_user")
"""Its worker stops at these names before any code is made of them (verl/trainer/gui_agent.py,
``EnvWorker.step``, lines 788 to 804): what is left of the call is its name.
"""
_POINTED = {
    "click": "click({x}, {y}, button='left')",
    "left_single": "click({x}, {y}, button='left')",
    "left_double": "doubleClick({x}, {y}, button='left')",
    "right_single": "click({x}, {y}, button='right')",
    "hover": "moveTo({x}, {y})",
}
_MARKS = {
    "Reflection": ("Reflection: ", "Action_Summary: "),
    "Action_Summary": ("Action_Summary: ",),
}
"""What a turn begins with -> the marks before its thought; else ``Thought: ``."""
_BOX = re.compile(r"(start_box|end_box)='\((\d+),(\d+)\)'")


class Broken(Exception):
    """The original raises here; the message is the name of its error."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """One call: its name, its inputs (boxes as a list of fractions, written out), and the code that
    it would run.
    """

    name: str | None
    inputs: Mapping[str, str]
    code: str


def resized(height: int, width: int) -> tuple[int, int]:
    """Height and width of the picture that the model's pixels refer to."""
    return smart_resize(height, width, 28, 3136, 2_116_800)


@dataclass(frozen=True, slots=True)
class ScreenSize:
    """Width and height of the picture that the model's pixels refer to (``unit``), and of the
    screen; those of ARPO.
    """

    unit: tuple[int, int] = resized(HEIGHT, WIDTH)[::-1]
    pixels: tuple[int, int] = (WIDTH, HEIGHT)


ARPO = ScreenSize()


def parsed(text: str, screen: ScreenSize = ARPO) -> list[Parsed]:
    """The calls behind the last ``Action:``, blank lines between them, up to the first of
    ``_ENDS``. Raises Broken.
    """
    text = text.strip()
    _, mark, written = text.rpartition("Action:")
    if not mark:
        raise Broken("AssertionError")
    calls = [_call(repaired(one).replace("\n", "\\n").lstrip()) for one in written.split("\n\n")]
    found = [
        (name, {key: _input(key, value, screen) for key, value in given.items() if value != ""})
        for name, given in calls
    ]
    start = (
        f"import pyautogui\nimport time\n'''\nObservation:\n\n\nThought:\n{_thought(text)}\n'''\n"
    )
    made = []
    for name, inputs in found:
        made.append(Parsed(name, inputs, _code(start, name, inputs, screen)))
        if name in _ENDS:
            break
    return made


def _thought(text: str) -> str | None:
    """What stands between the marks and the action, in time that grows with the text; None without
    a mark.
    """
    start = 0
    for mark in _MARKS.get(text.partition(":")[0], ("Thought: ",)):
        found = text.find(mark, start + (start > 0))  # there is a character between two marks
        if found < 0:
            return None
        start = found + len(mark)
    if start == len(text):
        return None
    end = text.find("Action:", start + 1)
    return text[start : end if end >= 0 else len(text)].strip()


def add_box_token(text: str) -> str:
    """Puts the box tokens back that decoding took away: around ``(x,y)`` without a blank, and
    nowhere else.
    """
    if "Action: " not in text or "start_box=" not in text:
        return text
    before, *actions = text.split("Action: ")
    put = [_BOX.sub(r"\1='<|box_start|>(\2,\3)<|box_end|>'", action.strip()) for action in actions]
    return f"{before}Action: " + "\n\n".join(put)


def repaired(call: str) -> str:
    """The call with its quotes escaped; text around the call becomes part of its argument.

    In time that grows with the text.
    """
    name = next((name for name in ("type", "finished") if f"{name}(content" in call), None)
    if name is None:
        return call
    bare = "\n".join(_unwrapped(line, name) for line in call.split("\n"))
    return f"{name}(content='{_escaped(bare)}')"


def _unwrapped(line: str, name: str) -> str:
    """The line with the arguments in place of its calls.

    Behind the last end of a call there is none to search for.
    """
    before, end, rest = line.rpartition("')")
    return re.sub(rf"{name}\(content='(.*?)'\)", lambda found: found[1], before + end) + rest


def _escaped(text: str) -> str:
    return re.sub(r"(?<!\\)'", r"\\'", text)


def _call(text: str) -> tuple[str | None, dict[str, object]]:
    """Name and keyword arguments of a call in Python's syntax; positional ones are not looked at."""
    try:
        call = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Broken("ValueError") from error
    if not isinstance(call, ast.Call):
        raise Broken("ValueError")
    name = getattr(call.func, "id", getattr(call.func, "attr", None))
    return name, {
        str(one.arg): one.value.value if isinstance(one.value, ast.Constant) else None
        for one in call.keywords
    }


def _input(name: str, value: object, screen: ScreenSize) -> str:
    if not isinstance(value, str):
        raise Broken("AttributeError")
    value = value.lstrip()
    if "start_box" not in name and "end_box" not in name:
        return value
    try:
        numbers = [float(part) for part in value.replace("(", "").replace(")", "").split(",")]
    except ValueError as error:
        raise Broken("ValueError") from error
    shares = [number / screen.unit[i % 2] for i, number in enumerate(numbers)]
    return str(shares * 2 if len(shares) == 2 else shares)


def _point(box: str, screen: ScreenSize, short: str = "ValueError") -> tuple[float, float]:
    """The middle of a box in pixels of the screen.

    ``short``: the error unless there are four numbers.
    """
    numbers = [float(part) for part in box.strip("[]").split(",")]
    if not all(map(math.isfinite, numbers)):
        raise Broken("NameError")  # it evaluates the text, and nan and inf are no names
    if len(numbers) != 4:
        raise Broken(short)
    x1, y1, x2, y2 = numbers
    wide, high = screen.pixels
    return round((x1 + x2) / 2 * wide, 3), round((y1 + y2) / 2 * high, 3)


def _code(start: str, name: str | None, inputs: Mapping[str, str], screen: ScreenSize) -> str:
    box, end = inputs.get("start_box"), inputs.get("end_box")
    if name is not None and name in _ENDS:
        return name
    if name == "press":
        raise Broken("UnboundLocalError")  # it looks at the key of another branch
    if name in _POINTED:
        if box is None:
            raise Broken("TypeError")
        x, y = _point(box, screen, "UnboundLocalError")
        return f"{start}\npyautogui.{_POINTED[name].format(x=x, y=y)}"
    if name in ("drag", "select"):
        if not box or not end:
            return start
        (x, y), (to_x, to_y) = _point(box, screen), _point(end, screen)
        return (
            f"{start}\npyautogui.moveTo({x}, {y})\n\npyautogui.dragTo({to_x}, {to_y},"
            " duration=1.0)\n"
        )
    if name == "scroll":
        return start + _scrolled(box, inputs.get("direction", "").lower(), screen)
    if name == "hotkey":
        keys = _ARROWS.get(key := inputs.get("key", inputs.get("hotkey", "")), key).split()
        pressed = ", ".join(repr(" " if one == "space" else one) for one in keys)
        return f"{start}\npyautogui.hotkey({pressed})" if key else start
    if name in ("keydown", "keyup"):
        return f"{start}\npyautogui.{'keyDown' if name == 'keydown' else 'keyUp'}({inputs.get('key', '')!r})"
    return (
        start + _typed(_escaped(inputs.get("content", "")))
        if name == "type"
        else f"{start}\n# Unrecognized action type: {name}"
    )


def _scrolled(box: str | None, direction: str, screen: ScreenSize) -> str:
    """Left and right do nothing."""
    place = ", x={}, y={}".format(*_point(box, screen)) if box else ""
    amount = 5 if "up" in direction else -5 if "down" in direction else None
    return "" if amount is None else f"\npyautogui.scroll({amount}{place})"


def _typed(content: str) -> str:
    """A new line at the end is the Enter key."""
    if not content:
        return ""
    submits = content.endswith(("\n", "\\n"))
    shown = content.rstrip("\\n").rstrip("\n") if submits else content
    code = f"\npyautogui.write('{shown}', interval=0.1)\ntime.sleep(0.5)\n"
    return f"{code}\npyautogui.press('enter')" if submits else code


_ENDINGS: Mapping[str, Action] = {
    "finished": Finish(),
    "wait": Sleep(),
    "error_env": CallUser(),
    "call_user": CallUser(),
}
"""What is left of a turn that has one of these names, whatever stands before it."""
_UNKNOWN = frozenset(calls.ALIASES) - {
    "command",
    "win",
    "option",
    "return",
    "escape",
    "del",
    "pgup",
    "pgdn",
}
"""Names of keys that the grammar knows and pyautogui ignores."""


def acts(text: str, screen: ScreenSize = ARPO) -> list[tuple[Action, ...]]:
    """What each action does, in pixels; nothing where its code does nothing.

    Raises Broken, where the original ends the episode.
    """
    found = parsed(text, screen)
    if (name := found[-1].name) in _ENDINGS:
        return [(_ENDINGS[str(name)],)]
    return [_done(one.code, screen) for one in found]


def _done(code: str, screen: ScreenSize) -> tuple[Action, ...]:
    """Nothing where a thought or a text made other code of it."""
    try:
        return tuple(_calls(code, screen))
    except (
        SyntaxError,
        ValueError,
        TypeError,
        AttributeError,
        ArithmeticError,
        LookupError,
        RecursionError,
        MemoryError,
    ):
        return ()


def _calls(code: str, screen: ScreenSize) -> Iterator[Action]:
    """What the calls of pyautogui in the code do, which cuts pixels to whole ones.

    Raises whatever other code leads to.
    """
    body = ast.parse(code).body
    lines = [(line.value.func.attr, *_values(line.value)) for line in body if _is_call(line)]  # type: ignore[attr-defined]
    texts = [
        line for line in body if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)
    ]
    if len(lines) + len(texts) + sum(isinstance(line, ast.Import) for line in body) < len(body):
        return

    def place(x: float, y: float) -> Point:
        wide, high = screen.pixels
        return Point(min(max(int(x), 0), wide - 1), min(max(int(y), 0), high - 1))

    at: Point | None = None
    for name, given, named in lines:
        match name:
            case "click" | "doubleClick":
                yield Click(
                    place(*given),
                    "right" if named.get("button") == "right" else "left",
                    2 if name == "doubleClick" else 1,
                )
            case "moveTo":
                at = place(*given)
                if not any(other == "dragTo" for other, *_ in lines):
                    yield Hover(at)
            case "dragTo" if at is not None:
                yield Drag(at, place(*given))
            case "scroll":
                yield Scroll(
                    "up" if given[0] > 0 else "down",
                    place(named["x"], named["y"]) if "x" in named else None,
                )
            case "hotkey" | "press":
                if keys := tuple(filter(None, map(_key, given))):
                    yield Hotkey(keys)
            case "keyDown" | "keyUp":
                if key := _key(given[0]):
                    yield HoldKey(key, name == "keyDown")
            case "write":
                if (
                    typed := given[0].encode("ascii", "ignore").decode()
                ):  # it drops what a plain keyboard lacks
                    yield Type(typed)


def _is_call(line: ast.stmt) -> bool:
    """Of pyautogui or time."""
    call = (
        line.value.func if isinstance(line, ast.Expr) and isinstance(line.value, ast.Call) else None
    )
    return (
        isinstance(call, ast.Attribute)
        and isinstance(call.value, ast.Name)
        and call.value.id in ("pyautogui", "time")
    )


def _values(call: ast.Call) -> tuple[list[Any], dict[str | None, Any]]:
    """Raises ValueError for what is no constant."""
    return [ast.literal_eval(one) for one in call.args], {
        one.arg: ast.literal_eval(one.value) for one in call.keywords
    }


def _key(name: str) -> str | None:
    return "space" if name == " " else None if name.lower() in _UNKNOWN else calls.key(name)
