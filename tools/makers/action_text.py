"""Writes actions in the canonical spelling, for demonstrations: what ``read`` makes of the text is
what was written.
"""

from __future__ import annotations

from typing import Literal

from rayloop.envs.grammar import actions
from rayloop.envs.grammar.actions import Action
from rayloop.envs.grammar.scanner import ESCAPES, MARK, THOUGHT

Spelling = Literal["box", "box_tokens", "point"]
"""``box``: ``start_box='(12,34)'`` (UI-TARS 1.0); ``box_tokens``: with ``<|box_start|>`` (1.5's
history); ``point``: 1.5's newer prompts.
"""
_ESCAPED = {meant: "\\" + letter for letter, meant in ESCAPES.items() if letter != '"'}
_POINTS = {
    "box": "({},{})",
    "box_tokens": "<|box_start|>({},{})<|box_end|>",
    "point": "<point>{} {}</point>",
}


def write(turn: actions.Actions, spelling: Spelling = "box") -> str:
    """The turn's text; a thought that is empty is left out.

    Raises ValueError for a click that the grammar has no name for.
    """
    thought = f"{THOUGHT} {turn.thought}\n" if turn.thought else ""
    return f"{thought}{MARK} " + "\n\n".join(written(action, spelling) for action in turn.actions)


def written(action: Action, spelling: Spelling = "box") -> str:
    """One call. Raises as ``write`` does."""
    name, arguments = _call(action, spelling)
    return f"{name}({', '.join(f'{key}={_quoted(value)}' for key, value in arguments.items())})"


def _call(action: Action, spelling: Spelling) -> tuple[str, dict[str, str]]:
    """The function's name and its arguments, as texts."""

    def at(point: actions.Point, first: bool = True, alone: bool = True) -> dict[str, str]:
        names = (
            ("point" if alone else "start_point", "end_point")
            if spelling == "point"
            else ("start_box", "end_box")
        )
        return {names[not first]: _POINTS[spelling].format(_number(point.x), _number(point.y))}

    match action:
        case actions.Click(point):
            return _CLICKS[_known(action)], at(point)
        case actions.Hover(point):
            return "hover", at(point)
        case actions.LongPress(point):
            return "long_press", at(point)
        case actions.Drag(start, end):
            return "drag", at(start, alone=False) | at(end, first=False)
        case actions.Scroll(direction, point):
            return "scroll", ({} if point is None else at(point)) | {"direction": direction}
        case actions.Hotkey(keys):
            return "hotkey", {"key": " ".join(keys)}
        case actions.HoldKey(key, down):
            return "keydown" if down else "keyup", {"key": key}
        case actions.Type(text):
            return "type", {"content": text}
        case actions.Sleep():
            return "wait", {}
        case actions.Finish(answer):
            return "finished", {"content": answer}
        case actions.CallUser(reason):
            return "call_user", {"content": reason} if reason else {}
        case actions.OpenApp(app):
            return "open_app", {"app_name": app}
        case actions.PhoneButton(button):
            return f"press_{button}", {}


_CLICKS = {("left", 1): "click", ("left", 2): "left_double", ("right", 1): "right_single"}


def _known(click: actions.Click) -> tuple[str, int]:
    kind = (click.button, click.times)
    if kind not in _CLICKS:
        raise ValueError(
            f"the grammar has no name for {click.times} clicks of the {click.button} button"
        )
    return kind


def _number(value: float) -> str:
    return str(round(value)) if value == round(value) else f"{value:.2f}"


def _quoted(text: str) -> str:
    return "'" + "".join(_ESCAPED.get(letter, letter) for letter in text) + "'"
