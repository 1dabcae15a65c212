"""Typed actions as what a mouse and a keyboard do to a page."""

from __future__ import annotations

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
    Type,
    Wait,
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
    "ctrl": "Control", "shift": "Shift", "alt": "Alt", "meta": "Meta", "enter": "Enter", "tab": "Tab", "space": " ",
    "backspace": "Backspace", "delete": "Delete", "insert": "Insert", "esc": "Escape", "up": "ArrowUp",
    "down": "ArrowDown", "left": "ArrowLeft", "right": "ArrowRight", "home": "Home", "end": "End", "pageup": "PageUp",
    "pagedown": "PageDown", **{f"f{n}": f"F{n}" for n in range(1, 13)},
}  # fmt: skip
"""The grammar's names of keys (``rayloop/envs/grammar/keys.py``) -> Playwright's; a character is its own name."""
MASKS = {"alt": 1, "ctrl": 2, "meta": 4, "shift": 8}
"""Bits of held keys in a mouse event (Chrome DevTools Protocol, ``Input.dispatchMouseEvent``)."""
_SCROLLED = {"up": (0, -NOTCH), "down": (0, NOTCH), "left": (-NOTCH, 0), "right": (NOTCH, 0)}


class NotHere(ValueError):
    """An action that a browser's page does not know, such as a phone's buttons."""


def pause(action: Action) -> float:
    """Seconds that the action takes because it shall."""
    return {Wait: WAIT, LongPress: LONG}.get(type(action), 0.0)


class Inputs:
    """Mouse and keyboard of one page."""

    def __init__(self, page: Any, cdp: Any) -> None:
        self._page, self._cdp = page, cdp
        self._at = Point(0, 0)
        self._held: set[str] = set()

    async def perform(self, action: Action) -> None:
        """Returns when the page has dealt with it. Raises NotHere."""
        match action:
            case Click(at, button, times):
                self._at = at
                await self._click(at, button, times)
            case Hover(at):
                await self.move(at.x, at.y)
            case LongPress(at):
                await self.move(at.x, at.y)
                await self._mouse("mousePressed", at, button="left", clickCount=1)
                await asyncio.sleep(LONG)
                await self._mouse("mouseReleased", at, button="left", clickCount=1)
            case Drag(start, end):
                await self._drag(start, end)
            case Scroll(direction, at):
                self._at = at or self._at
                right, down = _SCROLLED[direction]
                await self._mouse("mouseWheel", self._at, deltaX=right, deltaY=down)
            case Hotkey(keys):
                for key in keys:
                    await self._page.keyboard.down(_name(key))
                for key in reversed(keys):
                    await self._page.keyboard.up(_name(key))
            case HoldKey(key, down):
                await (self._page.keyboard.down if down else self._page.keyboard.up)(_name(key))
                (self._held.add if down else self._held.discard)(key)
            case Type(text):
                await self._page.keyboard.type(text)
            case Wait():
                await asyncio.sleep(WAIT)
            case _:
                raise NotHere(f"there is no {type(action).__name__} in a browser")

    async def move(self, x: float, y: float) -> None:
        self._at = Point(x, y)
        await self._mouse("mouseMoved", self._at)

    async def _click(self, at: Point, button: str, times: int) -> None:
        """All events are sent at once: the browser keeps their order."""
        sent = [self._mouse("mouseMoved", at)]
        for count in range(1, times + 1):
            sent.append(self._mouse("mousePressed", at, button=button, clickCount=count))
            sent.append(self._mouse("mouseReleased", at, button=button, clickCount=count))
        await asyncio.gather(*sent)

    async def _drag(self, start: Point, end: Point) -> None:
        """By Playwright's mouse, which also carries what a page drags as data."""
        mouse = self._page.mouse
        await mouse.move(start.x, start.y)
        await mouse.down()
        await mouse.move(end.x, end.y, steps=STEPS)
        await mouse.up()
        self._at = end

    async def _mouse(self, kind: str, at: Point, **more: Any) -> None:
        held = sum(MASKS.get(key, 0) for key in self._held)
        await self._cdp.send(
            "Input.dispatchMouseEvent", {"type": kind, "x": at.x, "y": at.y, "modifiers": held, **more}
        )


def _name(key: str) -> str:
    return KEYS.get(key, key)
