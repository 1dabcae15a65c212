"""The functions of the grammar with their arguments and actions, and the names of keys.

Source: bytedance/UI-TARS (582f3a7), prompt.py and action_parser.py; other names that its models
write are aliases.
"""

import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from rayloop.envs.grammar import actions
from rayloop.envs.grammar.actions import Action, Point

Kind = Literal["point", "text", "key", "keys", "direction", "seconds", "ignored"]
"""How an argument's text is read."""
DIRECTIONS = ("up", "down", "left", "right")
MOST_KEYS = 4
"""Keys of a combination; the prompts of UI-TARS ask for three at most."""

START = ("start_box", "point", "start_point")
"""Names of the same argument: in UI-TARS 1.0 and 1.5, and in the ``point`` spelling."""
END = ("end_box", "end_point")

ALIASES = {
    "control": "ctrl",
    "ctl": "ctrl",
    "cmd": "meta",
    "command": "meta",
    "win": "meta",
    "super": "meta",
    "option": "alt",
    "return": "enter",
    "escape": "esc",
    "del": "delete",
    "ins": "insert",
    "spacebar": "space",
    "bksp": "backspace",
    "arrowup": "up",
    "arrowdown": "down",
    "arrowleft": "left",
    "arrowright": "right",
    "page_up": "pageup",
    "page_down": "pagedown",
    "pgup": "pageup",
    "pgdn": "pagedown",
    "plus": "+",
    "minus": "-",
}
"""A name that a model may write -> the name of the key."""
NAMED = (
    "ctrl",
    "shift",
    "alt",
    "meta",
    "enter",
    "tab",
    "space",
    "backspace",
    "delete",
    "insert",
    "esc",
    "up",
    "down",
    "left",
    "right",
    "home",
    "end",
    "pageup",
    "pagedown",
    *(f"f{n}" for n in range(1, 13)),
)
KEYS = frozenset((*NAMED, *string.ascii_lowercase, *string.digits, *string.punctuation))
"""All names: ``NAMED``, and the characters of a plain keyboard, letters in lower case."""


def key(written: str) -> str | None:
    """Return the key's name; None when there is no such key."""
    name = ALIASES.get(written.lower(), written.lower())
    return name if name in KEYS else None


def keys(written: str) -> tuple[str, ...] | None:
    """Return the keys of ``ctrl c``, ``ctrl+c`` or ``ctrl +``.

    None when one is unknown or the text has no key.
    """
    names: list[str] = []
    for word in written.split():
        for part in [word] if key(word) else word.split("+"):
            name = key(part)
            if name is None:
                return None
            names.append(name)
    return tuple(names) or None


@dataclass(frozen=True)
class Argument:
    """An argument of a call: ``names``: any of them; ``field``: the action's name for it."""

    names: tuple[str, ...]
    kind: Kind
    field: str
    required: bool = True


@dataclass(frozen=True)
class CallSignature:
    """A call's arguments; ``make`` gets them by their ``field``, and returns its actions."""

    arguments: tuple[Argument, ...]
    make: Callable[..., Action | tuple[Action, ...]]

    def argument(self, name: str) -> Argument | None:
        """Return the argument of that name; None when the call has no such argument."""
        return next((argument for argument in self.arguments if name in argument.names), None)


_AT = Argument(START, "point", "at")
_START = Argument(START, "point", "start")
_END = Argument(END, "point", "end")
_TIME = Argument(("time",), "ignored", "time", required=False)
_SECONDS = Argument(("time",), "seconds", "seconds", required=False)


def _with(action: Callable[..., Action], **fixed: Any) -> Callable[..., Action]:
    return lambda **arguments: action(**fixed, **arguments)


def _text(field: str) -> tuple[Argument, ...]:
    return (Argument(("content",), "text", field, required=False),)


def _optional(argument: Argument) -> Argument:
    return replace(argument, required=False)


def _select(start: Point, end: Point | None = None) -> Action:
    """``select`` with only a start opens a list or takes an item of it.

    Source: UI-TARS, data/training_example.json.
    """
    return actions.Click(start) if end is None else actions.Drag(start, end)


def _type(text: str, at: Point | None = None) -> tuple[Action, ...]:
    """``type`` with a place clicks it first (UI-TARS, data/training_example.json)."""
    focus = () if at is None else (actions.Click(at),)
    return (*focus, actions.Type(text))


def _scroll(
    at: Point | None = None, direction: actions.Direction | None = None, end: Point | None = None
) -> Action:
    """``scroll`` from a place to another is the swipe of a phone (UI-TARS, README_v1.md).

    Raises ValueError without either.
    """
    if direction is not None:
        return actions.Scroll(direction, at)
    if at is not None and end is not None:
        return actions.Drag(at, end)
    raise ValueError("scroll needs the argument 'direction', or 'start_box' and 'end_box'")


_KEY = (Argument(("key", "press"), "key", "key"),)
_FIRST = (_AT,)

FUNCTIONS: Mapping[str, CallSignature] = {
    "click": CallSignature(_FIRST, actions.Click),
    "left_single": CallSignature(_FIRST, actions.Click),
    "left_double": CallSignature(_FIRST, _with(actions.Click, times=2)),
    "right_single": CallSignature(_FIRST, _with(actions.Click, button="right")),
    "hover": CallSignature(_FIRST, actions.Hover),
    "drag": CallSignature((_START, _END), actions.Drag),
    "select": CallSignature((_START, _optional(_END)), _select),
    "hotkey": CallSignature((Argument(("key", "hotkey"), "keys", "keys"),), actions.Hotkey),
    "press": CallSignature(_KEY, lambda key: actions.Hotkey((key,))),
    "keydown": CallSignature(_KEY, actions.HoldKey),
    "keyup": CallSignature(_KEY, _with(actions.HoldKey, down=False)),
    "release": CallSignature(_KEY, _with(actions.HoldKey, down=False)),
    "type": CallSignature((Argument(("content",), "text", "text"), _optional(_AT)), _type),
    "scroll": CallSignature(
        (
            _optional(_AT),
            Argument(("direction",), "direction", "direction", required=False),
            _optional(_END),
        ),
        _scroll,
    ),
    "wait": CallSignature((_TIME,), lambda time="": actions.Sleep()),
    "finished": CallSignature(_text("answer"), actions.Finish),
    "call_user": CallSignature(_text("reason"), actions.CallUser),
    "error_env": CallSignature(_text("reason"), actions.CallUser),
    "long_press": CallSignature((_AT, _SECONDS), actions.LongPress),
    "open_app": CallSignature((Argument(("app_name",), "text", "name"),), actions.OpenApp),
    "press_home": CallSignature((), _with(actions.PhoneButton, name="home")),
    "press_back": CallSignature((), _with(actions.PhoneButton, name="back")),
}
"""The name in the text -> its call."""
