"""Carries out actions on a phone's page, by a finger, the keyboard and a phone's buttons."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

from rayloop.envs.browser.inputs import Inputs, NotHere, pause
from rayloop.envs.grammar.actions import (
    Action,
    Click,
    Drag,
    GoBack,
    LongPress,
    MouseButton,
    OpenApp,
    PhoneButton,
    Point,
    SelectOption,
    Swipe,
)

PHONE_AGENT = (
    "Mozilla/5.0 (Linux; Android 10; K) AppleWebKit/537.36 (KHTML, like Gecko)"
    " Chrome/150.0.0.0 Mobile Safari/537.36"
)
"""What Chrome calls itself on an Android phone."""
SWIPE_MOVES = 5
"""Moves of the finger between the ends of its way."""
MOVE_EVERY_S = 0.05
"""Seconds between two moves, by the clock of the events."""
REST_S = 0.3
"""Seconds that the finger rests before it leaves, so that the content does not move on."""
BETWEEN_S = 0.5
"""Seconds between two touches by the clock of the events: nearer taps are a double tap."""
DOUBLE_TAP_S = 0.1
"""Seconds between the taps of a double tap."""
MENU_AFTER_S = 0.5
"""Seconds after which a finger that stays down is a long press, as on Android."""
_DRAWN = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""Until a move is drawn: Chromium makes one of several moves in a frame, each time of others."""
_OPEN_MENU = """([x, y]) => {
    const options = {bubbles: true, cancelable: true, clientX: x, clientY: y, button: 2}
    const place = document.elementFromPoint(x, y) ?? document.body
    place.dispatchEvent(new MouseEvent("contextmenu", options))
}"""
"""What a phone's browser does at a long press, and Chromium on a computer does not."""
_NO_CLICK = f"""(addEventListener("touchend", event => event.preventDefault(),
    {{once: true, capture: true, passive: false}}), {_DRAWN})"""
"""For the end of a long press, which is not a click; drawn, as touches look for listeners then."""
_BUTTONS = (Path(__file__).parent / "buttons.js").read_text(encoding="utf-8")


class TouchInputs(Inputs):
    """A finger on a page, its keyboard and a phone's buttons.

    Points are pixels of the screenshot, of which ``scale`` are a pixel of the page.
    """

    def __init__(self, page: Any, cdp: Any, evaluate: Any, scale: float) -> None:
        super().__init__(page, 0, 0)
        self._cdp = cdp
        self._evaluate = evaluate
        self._scale = scale
        self._time = 0.0

    async def perform(self, action: Action) -> None:
        """Carry out a basic action. Raises NotHere."""
        match action:
            case Click(Point() as at, "left", times):
                for number in range(times):
                    await self._down(at, DOUBLE_TAP_S if number else BETWEEN_S)
                    await self._up()
            case Click(_, button):
                raise NotHere(f"a phone has no {button} mouse button")
            case LongPress(Point() as at):
                await self._hold(at, pause(action))
            case Swipe(Point() as start, Point() as end) | Drag(Point() as start, end):
                await self._down(start)
                await self.move(end)
                await self._up()
            case MouseButton(down):
                await (self._down(self._at) if down else self._up())
            case SelectOption(Point() as at, value):
                await super().perform(SelectOption(Point(*self._on_page(at)), value))
            case OpenApp(name):
                await self._press("open", name)
            case PhoneButton(name):
                await self._press(name)
            case GoBack():
                await self._press("back")
            case _:
                await super().perform(action)

    async def move(self, at: Point) -> None:
        """Move the finger, which only a page with the finger on it notices."""
        start = self._at
        self._at = at
        if not self._button_down:
            return
        for number in range(1, SWIPE_MOVES + 1):
            part = number / SWIPE_MOVES
            self._time += MOVE_EVERY_S
            x = start.x + part * (at.x - start.x)
            await self._send("touchMove", Point(x, start.y + part * (at.y - start.y)))
            await self._evaluate(_DRAWN)
        self._time += REST_S

    def _on_page(self, at: Point) -> tuple[float, float]:
        return at.x / self._scale, at.y / self._scale

    async def _down(self, at: Point, after: float = BETWEEN_S) -> None:
        # A policy may have left the finger on the page.
        await self._up()
        self._at = at
        self._button_down = True
        self._time = max(time.time(), self._time + after)
        await self._send("touchStart", at)

    async def _up(self) -> None:
        if self._button_down:
            self._button_down = False
            await self._send("touchEnd")

    async def _hold(self, at: Point, seconds: float) -> None:
        is_long = seconds >= MENU_AFTER_S
        if is_long:
            await self._evaluate(_NO_CLICK)
        await self._down(at)
        await asyncio.sleep(min(seconds, MENU_AFTER_S))
        if is_long:
            await self._evaluate(f"({_OPEN_MENU})({list(self._on_page(at))})")
            await asyncio.sleep(seconds - MENU_AFTER_S)
        await self._up()

    async def _send(self, kind: str, *places: Point) -> None:
        # The times follow a finger's; to wait for them would take a second for each swipe.
        points = [dict(zip("xy", self._on_page(place), strict=True)) for place in places]
        event = {"type": kind, "touchPoints": points, "timestamp": self._time}
        await self._cdp.send("Input.dispatchTouchEvent", event)

    async def _press(self, name: str, value: str = "") -> None:
        answer = await self._evaluate(f"({_BUTTONS})({json.dumps([name, value])})")
        if "error" in answer:
            raise NotHere(answer["error"])
        if "back" in answer:
            await self._page.go_back()
        if "url" in answer:
            await self._page.goto(answer["url"])
        if "again" in answer:
            await self._press(name, value)
