"""How ARPO itself reads a turn (dvlab-research/ARPO at 7489ae3), mistakes included.

``variant: original`` uses it. The code that ARPO makes for an action is never run: ``acts`` reads
it as data.
"""

import ast
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

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

SCREEN_WIDTH_PIXELS = 1920
"""Pixels of ARPO's screens from left to right, whatever the real width is."""
SCREEN_HEIGHT_PIXELS = 1080
"""Pixels of ARPO's screens from top to bottom, whatever the real height is."""
_ARROWS = {f"arrow{way}": way for way in ("left", "right", "up", "down")}
_ENDS = ("finished", "wait", "error_env", "call_user")
"""Names at which ARPO's worker stops, before it makes code of the calls.

Only the name of such a call has a meaning then (verl/trainer/gui_agent.py, ``EnvWorker.step``,
lines 788 to 804).
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
"""The first word of a turn -> the marks before its thought; else ``Thought: ``."""
_BOX = re.compile(r"(start_box|end_box)='\((\d+),(\d+)\)'")


class Broken(Exception):
    """ARPO's parser raises here; the message is the name of its error."""


@dataclass(frozen=True)
class Parsed:
    """One call: its name, its inputs, and the code that ARPO would run for it.

    Boxes among the inputs are lists of fractions, as text.
    """

    name: str | None
    inputs: Mapping[str, str]
    code: str


def resized(height: int, width: int) -> tuple[int, int]:
    """Return height and width of the picture that the model's pixels refer to."""
    return smart_resize(height, width, 28, 3136, 2_116_800)


@dataclass(frozen=True)
class ScreenSize:
    """Width and height of the picture that the model's pixels refer to, and of the screen.

    The defaults are ARPO's. ``unit`` is the picture's size.
    """

    unit: tuple[int, int] = resized(SCREEN_HEIGHT_PIXELS, SCREEN_WIDTH_PIXELS)[::-1]
    pixels: tuple[int, int] = (SCREEN_WIDTH_PIXELS, SCREEN_HEIGHT_PIXELS)


ARPO = ScreenSize()


def parsed(text: str, screen: ScreenSize = ARPO) -> list[Parsed]:
    """Return the calls behind the last ``Action:``, up to the first of ``_ENDS``.

    Blank lines separate them. Raises Broken.
    """
    text = text.strip()
    _, mark, actions = text.rpartition("Action:")
    if not mark:
        raise Broken("AssertionError")
    # All calls are read before the inputs of the first: the first error decides, which is ARPO's
    # rule.
    names_and_arguments = [
        _call(repaired(action).replace("\n", "\\n").lstrip()) for action in actions.split("\n\n")
    ]
    names_and_inputs = [
        (name, _inputs(arguments, screen)) for name, arguments in names_and_arguments
    ]
    start = (
        f"import pyautogui\nimport time\n'''\nObservation:\n\n\nThought:\n{_thought(text)}\n'''\n"
    )
    results = []
    for name, inputs in names_and_inputs:
        results.append(Parsed(name, inputs, _code(start, name, inputs, screen)))
        if name in _ENDS:
            break
    return results


def _thought(text: str) -> str | None:
    """Return what stands between the marks and the action; None without a mark.

    The time is linear in the text's length.
    """
    start = 0
    for mark in _MARKS.get(text.partition(":")[0], ("Thought: ",)):
        # There is at least one character between two marks.
        position = text.find(mark, start + (start > 0))
        if position < 0:
            return None
        start = position + len(mark)
    if start == len(text):
        return None
    end = text.find("Action:", start + 1)
    return text[start : end if end >= 0 else len(text)].strip()


def add_box_token(text: str) -> str:
    """Put the box tokens around ``(x,y)`` again, which decoding took away.

    Only boxes without blanks get them.
    """
    if "Action: " not in text or "start_box=" not in text:
        return text
    head, *actions = text.split("Action: ")
    box = r"\1='<|box_start|>(\2,\3)<|box_end|>'"
    return f"{head}Action: " + "\n\n".join(_BOX.sub(box, action.strip()) for action in actions)


def repaired(call: str) -> str:
    """Return the call with its quotes escaped; text around it becomes part of its argument.

    The time is linear in the text's length.
    """
    name = next((name for name in ("type", "finished") if f"{name}(content" in call), None)
    if name is None:
        return call
    bare = "\n".join(_unwrapped(line, name) for line in call.split("\n"))
    return f"{name}(content='{_escaped(bare)}')"


def _unwrapped(line: str, name: str) -> str:
    """Return the line with the arguments in place of its calls.

    Only the text up to the last end of a call is searched.
    """
    searched, end, rest = line.rpartition("')")
    call = re.compile(rf"{name}\(content='(.*?)'\)")
    return call.sub(lambda match: match[1], searched + end) + rest


def _escaped(text: str) -> str:
    return re.sub(r"(?<!\\)'", r"\\'", text)


def _call(text: str) -> tuple[str | None, dict[str, object]]:
    """Return name and keyword arguments of a call in Python's syntax; others are ignored."""
    try:
        call = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Broken("ValueError") from error
    if not isinstance(call, ast.Call):
        raise Broken("ValueError")
    name = getattr(call.func, "id", getattr(call.func, "attr", None))
    arguments: dict[str, object] = {}
    for keyword in call.keywords:
        value = keyword.value
        arguments[str(keyword.arg)] = value.value if isinstance(value, ast.Constant) else None
    return name, arguments


def _inputs(arguments: Mapping[str, object], screen: ScreenSize) -> dict[str, str]:
    return {name: _input(name, value, screen) for name, value in arguments.items() if value != ""}


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
    """Return the middle of a box in pixels of the screen.

    ``short``: the error unless there are four numbers.
    """
    numbers = [float(part) for part in box.strip("[]").split(",")]
    # ARPO evaluates the text, and nan and inf are not names in Python.
    if not all(map(math.isfinite, numbers)):
        raise Broken("NameError")
    if len(numbers) != 4:
        raise Broken(short)
    x1, y1, x2, y2 = numbers
    width, height = screen.pixels
    return round((x1 + x2) / 2 * width, 3), round((y1 + y2) / 2 * height, 3)


def _code(start: str, name: str | None, inputs: Mapping[str, str], screen: ScreenSize) -> str:
    box = inputs.get("start_box")
    end_box = inputs.get("end_box")
    if name is not None and name in _ENDS:
        return name
    if name == "press":
        # ARPO reads the key's variable, which only another branch assigns.
        raise Broken("UnboundLocalError")
    if name in _POINTED:
        if box is None:
            raise Broken("TypeError")
        x, y = _point(box, screen, "UnboundLocalError")
        return f"{start}\npyautogui.{_POINTED[name].format(x=x, y=y)}"
    if name in ("drag", "select"):
        if not box or not end_box:
            return start
        x, y = _point(box, screen)
        to_x, to_y = _point(end_box, screen)
        drag = f"pyautogui.dragTo({to_x}, {to_y}, duration=1.0)\n"
        return f"{start}\npyautogui.moveTo({x}, {y})\n\n{drag}"
    if name == "scroll":
        return start + _scroll_code(box, inputs.get("direction", "").lower(), screen)
    if name == "hotkey":
        return start + _hotkey_code(inputs.get("key", inputs.get("hotkey", "")))
    if name in ("keydown", "keyup"):
        function = "keyDown" if name == "keydown" else "keyUp"
        return f"{start}\npyautogui.{function}({inputs.get('key', '')!r})"
    if name == "type":
        return start + _typing_code(_escaped(inputs.get("content", "")))
    return f"{start}\n# Unrecognized action type: {name}"


def _hotkey_code(key: str) -> str:
    if not key:
        return ""
    names = _ARROWS.get(key, key).split()
    arguments = ", ".join(repr(" " if name == "space" else name) for name in names)
    return f"\npyautogui.hotkey({arguments})"


def _scroll_code(box: str | None, direction: str, screen: ScreenSize) -> str:
    """Left and right do nothing."""
    place = ", x={}, y={}".format(*_point(box, screen)) if box else ""
    if "up" in direction:
        return f"\npyautogui.scroll(5{place})"
    return f"\npyautogui.scroll(-5{place})" if "down" in direction else ""


def _typing_code(content: str) -> str:
    """A new line at the end is the Enter key."""
    if not content:
        return ""
    submits = content.endswith(("\n", "\\n"))
    line = content.rstrip("\\n").rstrip("\n") if submits else content
    code = f"\npyautogui.write('{line}', interval=0.1)\ntime.sleep(0.5)\n"
    return f"{code}\npyautogui.press('enter')" if submits else code


_ENDINGS: Mapping[str, Action] = {
    "finished": Finish(),
    "wait": Sleep(),
    "error_env": CallUser(),
    "call_user": CallUser(),
}
"""The one action of a turn that has one of these names, whatever stands before it."""
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
    """Return what each action does, in pixels; nothing where its code does nothing.

    Raises Broken, where the original ends the episode.
    """
    calls = parsed(text, screen)
    last_name = calls[-1].name
    if last_name in _ENDINGS:
        return [(_ENDINGS[str(last_name)],)]
    return [_actions(call.code, screen) for call in calls]


def _actions(code: str, screen: ScreenSize) -> tuple[Action, ...]:
    """Return an action's code as data, nothing where a thought or a text made other code of it."""
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


@dataclass(frozen=True)
class _Line:
    """A call of pyautogui or time in the code."""

    function: str
    arguments: list[Any]
    keywords: dict[str | None, Any]


def _calls(code: str, screen: ScreenSize) -> Iterator[Action]:
    """Yield what the calls of pyautogui in the code do, with pixels cut to whole numbers.

    Raises whatever other code leads to.
    """
    body = ast.parse(code).body
    lines: list[_Line] = []
    for statement in body:
        value = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(value, ast.Call) and _is_of_pyautogui(value.func):
            lines.append(_line(value))
        elif not isinstance(value, ast.Constant) and not isinstance(statement, ast.Import):
            return

    drags = any(line.function == "dragTo" for line in lines)
    position: Point | None = None
    for line in lines:
        if line.function == "moveTo":
            position = _pixel(screen, *line.arguments)
            if drags:
                continue
        action = _action(line, position, screen)
        if action is not None:
            yield action


def _action(line: _Line, position: Point | None, screen: ScreenSize) -> Action | None:
    """Return the action of a call, None for one that does nothing.

    ``position``: where the pointer was moved to before.
    """
    name = line.function
    arguments = line.arguments
    keywords = line.keywords
    match name:
        case "click" | "doubleClick":
            at = _pixel(screen, *arguments)
            button: Literal["left", "right"] = "left"
            if keywords.get("button") == "right":
                button = "right"
            return Click(at, button, 2 if name == "doubleClick" else 1)
        case "moveTo" if position is not None:
            return Hover(position)
        case "dragTo" if position is not None:
            return Drag(position, _pixel(screen, *arguments))
        case "scroll":
            direction: Literal["up", "down"] = "up" if arguments[0] > 0 else "down"
            at_pointer = "x" not in keywords
            return Scroll(
                direction, None if at_pointer else _pixel(screen, keywords["x"], keywords["y"])
            )
        case "hotkey" | "press":
            keys = tuple(filter(None, map(_key, arguments)))
            return Hotkey(keys) if keys else None
        case "keyDown" | "keyUp":
            key = _key(arguments[0])
            return HoldKey(key, name == "keyDown") if key else None
        case "write":
            # pyautogui drops what a plain keyboard lacks.
            text = arguments[0].encode("ascii", "ignore").decode()
            return Type(text) if text else None
    return None


def _pixel(screen: ScreenSize, x: float, y: float) -> Point:
    width, height = screen.pixels
    return Point(min(max(int(x), 0), width - 1), min(max(int(y), 0), height - 1))


def _is_of_pyautogui(function: ast.expr) -> bool:
    """Return whether it is a function of pyautogui or time."""
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id in ("pyautogui", "time")
    )


def _line(call: ast.Call) -> _Line:
    """Read a call. Raises ValueError for arguments that are not constants."""
    assert isinstance(call.func, ast.Attribute)
    return _Line(
        call.func.attr,
        [ast.literal_eval(argument) for argument in call.args],
        {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords},
    )


def _key(name: str) -> str | None:
    if name == " ":
        return "space"
    return None if name.lower() in _UNKNOWN else calls.key(name)
