"""Actions as the Python that OSWorld's machines run. What the policy wrote is in it only as a quoted text or as a number."""

from __future__ import annotations

from rayloop.envs.grammar.actions import Action, Click, Drag, HoldKey, Hotkey, Hover, Scroll, Type, Wait

TICKS = 5
_KEYS = {"meta": "win"}
"""Names of pyautogui that differ from the grammar's (rayloop/envs/grammar/keys.py)."""


def code(action: Action) -> str:
    """For an action in pixels of the screen. Raises ValueError for one that a desktop does not have."""
    match action:
        case Click(at, button, times):
            return _calls(f"click({int(at.x)}, {int(at.y)}, clicks={int(times)}, interval=0.05, button={button!r})")
        case Hover(at):
            return _calls(f"moveTo({int(at.x)}, {int(at.y)})")
        case Drag(start, end):
            return _calls(f"moveTo({int(start.x)}, {int(start.y)})", f"dragTo({int(end.x)}, {int(end.y)}, duration=1.0)")
        case Scroll(direction, at):
            moved = [] if at is None else [f"moveTo({int(at.x)}, {int(at.y)})"]
            wheel = "scroll" if direction in ("up", "down") else "hscroll"
            return _calls(*moved, f"{wheel}({TICKS if direction in ('up', 'right') else -TICKS})")
        case Hotkey(keys):
            return _calls(f"hotkey({', '.join(repr(_KEYS.get(key, key)) for key in keys)})")
        case HoldKey(key, down):
            return _calls(f"{'keyDown' if down else 'keyUp'}({_KEYS.get(key, key)!r})")
        case Type(text):
            return _typed(text)
        case Wait():
            return "WAIT"
    raise ValueError(f"a desktop has no {type(action).__name__}: it is an action of touch screens")


def _typed(text: str) -> str:
    """pyautogui writes only what a plain keyboard has and drops the rest silently: such text goes through the clipboard."""
    if not text:
        raise ValueError("there is nothing to type")
    if text.isascii():
        return _calls(f"write({text!a}, interval=0.02)")
    return f"import pyautogui, pyperclip; pyperclip.copy({text!a}); pyautogui.hotkey('ctrl', 'v')"


def _calls(*calls: str) -> str:
    return "import pyautogui; " + "; ".join(f"pyautogui.{call}" for call in calls)
