"""The functions of the grammar: their names, the arguments that each takes, and the action that each becomes.

Source: bytedance/UI-TARS (582f3a7), prompt.py and action_parser.py, for computer and phone; names that its models write
without being told are aliases here. One table for reading and writing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rayloop.envs.grammar.actions import (
    Action,
    CallUser,
    Click,
    Drag,
    Finished,
    HoldKey,
    Hotkey,
    Hover,
    LongPress,
    OpenApp,
    PhoneButton,
    Scroll,
    Type,
    Wait,
)

Kind = Literal["point", "text", "key", "keys", "direction", "ignored"]
"""What an argument's text is read as."""
DIRECTIONS = ("up", "down", "left", "right")
MOST_KEYS = 4
"""In a combination; the prompts of UI-TARS ask for three at most."""

START = ("start_box", "point", "start_point")
"""Names of the same argument: those of UI-TARS 1.0 and 1.5, and of the ``point`` spelling."""
END = ("end_box", "end_point")


@dataclass(frozen=True, slots=True)
class Argument:
    """``names``: any of them; ``field``: what the action calls it."""

    names: tuple[str, ...]
    kind: Kind
    field: str
    required: bool = True


@dataclass(frozen=True, slots=True)
class Function:
    """``make`` gets the arguments by their ``field``."""

    arguments: tuple[Argument, ...]
    make: Callable[..., Action]

    def argument(self, name: str) -> Argument | None:
        return next((argument for argument in self.arguments if name in argument.names), None)


_AT = Argument(START, "point", "at")
_SPAN = (Argument(START, "point", "start"), Argument(END, "point", "end"))


def _made(action: Callable[..., Action], **fixed: Any) -> Callable[..., Action]:
    return lambda **arguments: action(**fixed, **arguments)


def _text(field: str) -> tuple[Argument, ...]:
    return (Argument(("content",), "text", field, required=False),)


_KEY = (Argument(("key",), "key", "key"),)
_FIRST = (_AT,)

FUNCTIONS: Mapping[str, Function] = {
    "click": Function(_FIRST, Click),
    "left_single": Function(_FIRST, Click),
    "left_double": Function(_FIRST, _made(Click, times=2)),
    "right_single": Function(_FIRST, _made(Click, button="right")),
    "hover": Function(_FIRST, Hover),
    "drag": Function(_SPAN, Drag),
    "select": Function(_SPAN, Drag),
    "hotkey": Function((Argument(("key",), "keys", "keys"),), Hotkey),
    "press": Function(_KEY, lambda key: Hotkey((key,))),
    "keydown": Function(_KEY, HoldKey),
    "keyup": Function(_KEY, _made(HoldKey, down=False)),
    "release": Function(_KEY, _made(HoldKey, down=False)),
    "type": Function((Argument(("content",), "text", "text"),), Type),
    "scroll": Function(
        (Argument(START, "point", "at", required=False), Argument(("direction",), "direction", "direction")), Scroll
    ),
    "wait": Function((Argument(("time",), "ignored", "time", required=False),), lambda time="": Wait()),
    "finished": Function(_text("answer"), Finished),
    "call_user": Function(_text("reason"), CallUser),
    "error_env": Function(_text("reason"), CallUser),
    "long_press": Function(_FIRST, LongPress),
    "open_app": Function((Argument(("app_name",), "text", "name"),), OpenApp),
    "press_home": Function((), _made(PhoneButton, name="home")),
    "press_back": Function((), _made(PhoneButton, name="back")),
}
"""By the name in the text."""
