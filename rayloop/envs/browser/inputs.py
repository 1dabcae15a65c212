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
    MouseButton,
    Point,
    Scroll,
    SelectOption,
    Sleep,
    Type,
)
from rayloop.envs.grammar.basic import CHARACTER_TIMEOUT_S, NOTCH_PIXELS, notches

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
_WHEEL = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
_SELECT = """([x, y, value]) => {
    const list = document.elementFromPoint(x, y)?.closest("select")
    const option = [...(list?.options ?? [])].find(one => one.text.trim() === value.trim())
    if (!option) return false
    list.value = option.value
    for (const kind of ["input", "change"]) list.dispatchEvent(new Event(kind, {bubbles: true}))
    return true
}"""
"""Whether the list at a place has such an item, which is then chosen.

The items of an open list are not part of a page's screenshot.
"""


class NotHere(ValueError):
    """An action that a browser's page does not have, such as a phone's buttons."""


def pause(action: Action) -> float:
    """Return the seconds that the action waits on purpose."""
    match action:
        case Sleep(seconds):
            return WAIT_S if seconds is None else seconds
        case LongPress(_, seconds):
            return LONG_PRESS_S if seconds is None else seconds
    return 0.0


def extra_time(action: Action) -> float:
    """Return the seconds that an action may take beyond ``browser.action_timeout``.

    It waits on purpose, or it types. The policy chooses how much, so a long time does not mean
    that the browser failed.
    """
    if isinstance(action, Type):
        return len(action.text) * CHARACTER_TIMEOUT_S
    return pause(action)


class Inputs:
    """Playwright's mouse and keyboard of one page."""

    def __init__(self, page: Any, width: int, height: int) -> None:
        self._page = page
        self._mouse = page.mouse
        self._keyboard = page.keyboard
        self._width = width
        self._height = height
        self._at = Point(0, 0)
        self._button_down = False

    async def perform(self, action: Action) -> None:
        """Carry out a basic action; returns when the page has handled it. Raises NotHere."""
        match action:
            case Click(Point() as at, "left" | "right" | "middle" as button, times):
                self._at = at
                await self._mouse.click(at.x, at.y, button=button, click_count=times)
            case Hover(Point() as at):
                await self.move(at)
            case LongPress(Point() as at):
                self._at = at
                await self._mouse.click(at.x, at.y, delay=1000 * pause(action))
            case Drag(Point() as start, end):
                await self._drag(start, end)
            case Scroll(direction, at):
                if isinstance(at, Point) and at != self._at:
                    await self.move(at)
                pixels = NOTCH_PIXELS * notches(action, self._width, self._height)
                right, down = _WHEEL[direction]
                await self._mouse.wheel(right * pixels, down * pixels)
            case MouseButton(down):
                self._button_down = down
                press_or_release = self._mouse.down if down else self._mouse.up
                await press_or_release()
            case SelectOption(Point(x, y), value):
                if not await self._page.evaluate(_SELECT, [x, y, value]):
                    raise NotHere(f"no list with {value!r} at this place")
            case Hotkey(keys):
                for key in keys:
                    await self._keyboard.down(_name(key))
                for key in reversed(keys):
                    await self._keyboard.up(_name(key))
            case HoldKey(key, down):
                press_or_release_key = self._keyboard.down if down else self._keyboard.up
                await press_or_release_key(_name(key))
            case Type(text):
                await self._keyboard.type(text)
            case Sleep():
                await asyncio.sleep(pause(action))
            case _:
                raise NotHere(f"there is no {type(action).__name__} in a browser")

    async def move(self, at: Point) -> None:
        """Put the pointer at a place; in several moves while the button is down."""
        self._at = at
        steps = DRAG_STEPS if self._button_down else 1
        await self._mouse.move(at.x, at.y, steps=steps)

    async def _drag(self, start: Point, end: Point) -> None:
        await self.move(start)
        await self._mouse.down()
        await self._mouse.move(end.x, end.y, steps=DRAG_STEPS)
        await self._mouse.up()
        self._at = end


def _name(key: str) -> str:
    return KEYS.get(key, key)
