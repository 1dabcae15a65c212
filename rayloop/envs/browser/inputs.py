"""Carries out actions on a page, by its mouse and keyboard."""

import asyncio
from typing import Any

from rayloop.envs.grammar.actions import (
    Action,
    Click,
    Drag,
    HoldKey,
    Hotkey,
    Hover,
    LongPress,
    Point,
    Scroll,
    Sleep,
    Type,
)

NOTCH = 100
"""Pixels of a ``scroll``."""
WAIT = 1.0
"""Seconds of a ``wait``."""
LONG = 0.8
"""Seconds of a ``long_press``."""
STEPS = 5
"""Moves of the pointer between the ends of a drag: pages that follow it need some."""
KEYS = {
    "ctrl": "Control",
    "shift": "Shift",
    "alt": "Alt",
    "meta": "Meta",
    "enter": "Enter",
    "tab": "Tab",
    "space": " ",
    "backspace": "Backspace",
    "delete": "Delete",
    "insert": "Insert",
    "esc": "Escape",
    "up": "ArrowUp",
    "down": "ArrowDown",
    "left": "ArrowLeft",
    "right": "ArrowRight",
    "home": "Home",
    "end": "End",
    "pageup": "PageUp",
    "pagedown": "PageDown",
    **{f"f{n}": f"F{n}" for n in range(1, 13)},
}
"""The grammar's names of keys (``rayloop/envs/grammar/calls.py``) -> Playwright's; a character is
its own name.
"""
_SCROLLED = {"up": (0, -NOTCH), "down": (0, NOTCH), "left": (-NOTCH, 0), "right": (NOTCH, 0)}


class NotHere(ValueError):
    """An action that a browser's page does not know, such as a phone's buttons."""


def pause(action: Action) -> float:
    """Seconds that the action waits on purpose."""
    return {Sleep: WAIT, LongPress: LONG}.get(type(action), 0.0)


class Inputs:
    """Playwright's mouse and keyboard of one page."""

    def __init__(self, page: Any) -> None:
        self._mouse, self._keyboard = page.mouse, page.keyboard
        self._at = Point(0, 0)

    async def perform(self, action: Action) -> None:
        """Returns when the page has handled it. Raises NotHere."""
        match action:
            case Click(at, button, times):
                self._at = at
                await self._mouse.click(at.x, at.y, button=button, click_count=times)
            case Hover(at):
                await self.move(at)
            case LongPress(at):
                self._at = at
                await self._mouse.click(at.x, at.y, delay=1000 * LONG)
            case Drag(start, end):
                await self._drag(start, end)
            case Scroll(direction, at):
                if at is not None and at != self._at:
                    await self.move(at)
                await self._mouse.wheel(*_SCROLLED[direction])
            case Hotkey(keys):
                for key in keys:
                    await self._keyboard.down(_name(key))
                for key in reversed(keys):
                    await self._keyboard.up(_name(key))
            case HoldKey(key, down):
                await (self._keyboard.down if down else self._keyboard.up)(_name(key))
            case Type(text):
                await self._keyboard.type(text)
            case Sleep():
                await asyncio.sleep(WAIT)
            case _:
                raise NotHere(f"there is no {type(action).__name__} in a browser")

    async def move(self, at: Point) -> None:
        """Put the pointer there."""
        self._at = at
        await self._mouse.move(at.x, at.y)

    async def _drag(self, start: Point, end: Point) -> None:
        await self.move(start)
        await self._mouse.down()
        await self._mouse.move(end.x, end.y, steps=STEPS)
        await self._mouse.up()
        self._at = end


def _name(key: str) -> str:
    return KEYS.get(key, key)
