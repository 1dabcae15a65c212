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

SCROLL_PIXELS = 100
"""Pixels of a ``scroll``."""
WAIT_S = 1.0
"""Seconds of a ``wait``."""
LONG_PRESS_S = 0.8
"""Seconds of a ``long_press``."""
DRAG_STEPS = 5
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
"""The grammar's names of keys (``rayloop/envs/grammar/calls.py``) -> Playwright's.

A character is its own name.
"""
_WHEEL = {
    "up": (0, -SCROLL_PIXELS),
    "down": (0, SCROLL_PIXELS),
    "left": (-SCROLL_PIXELS, 0),
    "right": (SCROLL_PIXELS, 0),
}


class NotHere(ValueError):
    """An action that a browser's page does not have, such as a phone's buttons."""


def pause(action: Action) -> float:
    """Return the seconds that the action waits on purpose."""
    return {Sleep: WAIT_S, LongPress: LONG_PRESS_S}.get(type(action), 0.0)


class Inputs:
    """Playwright's mouse and keyboard of one page."""

    def __init__(self, page: Any) -> None:
        self._mouse = page.mouse
        self._keyboard = page.keyboard
        self._at = Point(0, 0)

    async def perform(self, action: Action) -> None:
        """Carry out an action; returns when the page has handled it. Raises NotHere."""
        match action:
            case Click(at, button, times):
                self._at = at
                await self._mouse.click(at.x, at.y, button=button, click_count=times)
            case Hover(at):
                await self.move(at)
            case LongPress(at):
                self._at = at
                await self._mouse.click(at.x, at.y, delay=1000 * LONG_PRESS_S)
            case Drag(start, end):
                await self._drag(start, end)
            case Scroll(direction, at):
                if at is not None and at != self._at:
                    await self.move(at)
                await self._mouse.wheel(*_WHEEL[direction])
            case Hotkey(keys):
                for key in keys:
                    await self._keyboard.down(_name(key))
                for key in reversed(keys):
                    await self._keyboard.up(_name(key))
            case HoldKey(key, down):
                press_or_release = self._keyboard.down if down else self._keyboard.up
                await press_or_release(_name(key))
            case Type(text):
                await self._keyboard.type(text)
            case Sleep():
                await asyncio.sleep(WAIT_S)
            case _:
                raise NotHere(f"there is no {type(action).__name__} in a browser")

    async def move(self, at: Point) -> None:
        """Put the pointer at a place."""
        self._at = at
        await self._mouse.move(at.x, at.y)

    async def _drag(self, start: Point, end: Point) -> None:
        await self.move(start)
        await self._mouse.down()
        await self._mouse.move(end.x, end.y, steps=DRAG_STEPS)
        await self._mouse.up()
        self._at = end


def _name(key: str) -> str:
    return KEYS.get(key, key)
