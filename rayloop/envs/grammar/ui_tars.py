"""UI-TARS's lines as an action format: the scanner of ``rayloop/envs/grammar``, and its writer."""

from typing import Literal

from rayloop.envs.grammar import actions, scanner
from rayloop.envs.grammar.actions import Action, Actions, Mistake, Point
from rayloop.envs.grammar.family import LanguageFile
from rayloop.envs.grammar.rules import Extent

Spelling = Literal["box", "box_tokens", "point"]
"""``box``: ``start_box='(12,34)'`` (UI-TARS 1.0); ``box_tokens``: with ``<|box_start|>`` (1.5's
history); ``point``: 1.5's newer prompts.
"""
_ESCAPED = {meant: "\\" + letter for letter, meant in scanner.ESCAPES.items() if letter != '"'}
_POINTS = {
    "box": "({},{})",
    "box_tokens": "<|box_start|>({},{})<|box_end|>",
    "point": "<point>{} {}</point>",
}
_CLICKS = {("left", 1): "click", ("left", 2): "left_double", ("right", 1): "right_single"}


class UiTars(LanguageFile):
    """The format of UI-TARS. Points outside of the screen are read, and are clamped later."""

    def read(self, text: str, screen: Extent) -> Actions | Mistake:
        """See ``ActionFormat``."""
        return scanner.read(text)

    def write(self, actions: Actions, screen: Extent) -> str:
        """See ``ActionFormat``."""
        return write(actions)


def write(turn: Actions, spelling: Spelling = "box") -> str:
    """Return the turn's text; a thought that is empty is left out.

    Raises ValueError for what the grammar has no name for.
    """
    thought = f"{scanner.THOUGHT} {turn.thought}\n" if turn.thought else ""
    calls = "\n\n".join(written(action, spelling) for action in turn.actions)
    return f"{thought}{scanner.MARK} {calls}"


def written(action: Action, spelling: Spelling = "box") -> str:
    """Return one call. Raises as ``write`` does."""
    name, arguments = _call(action, spelling)
    parts = [f"{key}={_quoted(value)}" for key, value in arguments.items()]
    return f"{name}({', '.join(parts)})"


def _call(action: Action, spelling: Spelling) -> tuple[str, dict[str, str]]:
    """Return the function's name and its arguments, as texts."""
    start_name, end_name = ("start_box", "end_box")
    if spelling == "point":
        start_name, end_name = ("start_point", "end_point")
    at_name = "point" if spelling == "point" else start_name

    def place(point: Point) -> str:
        return _POINTS[spelling].format(_number(point.x), _number(point.y))

    match action:
        case actions.Click(Point() as point, button, times, ()) if (button, times) in _CLICKS:
            return _CLICKS[button, times], {at_name: place(point)}
        case actions.Hover(Point() as point, ()):
            return "hover", {at_name: place(point)}
        case actions.LongPress(Point() as point, seconds):
            time = {} if seconds is None else {"time": f"{seconds:g}"}
            return "long_press", {at_name: place(point), **time}
        case actions.Drag(Point() as start, end, (), ()):
            return "drag", {start_name: place(start), end_name: place(end)}
        case actions.Scroll(direction, point, None, _, ()) if not isinstance(point, actions.Mark):
            box = {} if point is None else {at_name: place(point)}
            return "scroll", {**box, "direction": direction}
        case actions.Hotkey(keys):
            return "hotkey", {"key": " ".join(keys)}
        case actions.HoldKey(key, down, None):
            return "keydown" if down else "keyup", {"key": key}
        case actions.Type(text, False):
            return "type", {"content": text}
        case actions.Sleep(None):
            return "wait", {}
        case actions.Finish(answer, True):
            return "finished", {"content": answer}
        case actions.CallUser(reason):
            return "call_user", {"content": reason} if reason else {}
        case actions.OpenApp(app):
            return "open_app", {"app_name": app}
        case actions.PhoneButton("home" | "back" as button):
            return f"press_{button}", {}
    raise ValueError(f"the grammar has no name for {action}")


def _number(value: float) -> str:
    return str(round(value)) if value == round(value) else f"{value:.2f}"


def _quoted(text: str) -> str:
    return "'" + "".join(_ESCAPED.get(letter, letter) for letter in text) + "'"
