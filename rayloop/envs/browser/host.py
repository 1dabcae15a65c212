"""The browsers of a process: one for all its environments, more when it is full, a new one when it
ends.
"""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, TypeVar

from rayloop.core.failures import EnvironmentFailed
from rayloop.envs.browser.chromium import CLOSING, Chromium, launch
from rayloop.envs.browser.containment import BrowserSettings, check
from rayloop.envs.browser.tab import Files, Size, Tab, open_tab

Result = TypeVar("Result")

WATCH = 0.5
"""Seconds between two looks at the browsers' memory."""
MARGIN = 15.0
"""Seconds that the answer of the loop may be late: what it waits for has deadlines of its own,
which come first.
"""

_hosts: dict[str, "Host"] = {}
_lock = threading.Lock()


def host_of(settings: BrowserSettings) -> "Host":
    """The host of this process for these settings, made at the first request.

    Raises EnvironmentFailed (``check``).
    """
    with _lock:
        key = settings.model_dump_json()
        if key not in _hosts:
            _hosts[key] = Host(settings)
        return _hosts[key]


class Host:
    """``settings.containment`` is looked at when it is made."""

    def __init__(self, settings: BrowserSettings) -> None:
        self.settings, self.held = settings, check(settings)
        self.browsers: list[Chromium] = []
        self._parked: list[Tab] = []
        self._loop = asyncio.new_event_loop()
        self._driver: Any = None
        self._one_at_a_time = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        threading.Thread(
            target=self._loop.run_forever, daemon=True, name="rayloop-browsers"
        ).start()

    def run(self, work: Coroutine[Any, Any, Result], seconds: float) -> Result:
        """What ``work`` gives, for another thread.

        Raises what it raises, and EnvironmentFailed after ``seconds``.
        """
        asked = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return asked.result(seconds + MARGIN)
        except (TimeoutError, CancelledError) as error:
            # The coroutine would go on in the other thread, and hold its page.
            asked.cancel()
            raise EnvironmentFailed(
                f"the browser gave no answer within {seconds + MARGIN:g} s"
            ) from error

    def end(self) -> None:
        """End all browsers and the driver, for tests and measurements."""
        with _lock:
            for key in [key for key, host in _hosts.items() if host is self]:
                del _hosts[key]
        self.run(self._end(), 3 * CLOSING)
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def open(self, size: Size, files: Files) -> Tab:
        """An empty page, in the browser that has room, or a new one. Raises EnvironmentFailed."""
        # Episodes that begin together would each find no room, and each launch a browser.
        # Episodes that begin together would each find no room, and each launch a browser.
        async with self._one_at_a_time:
            if not any(browser.has_room for browser in self.browsers) and self._parked:
                await self.close_tab(self._parked.pop(0))
            found = (
                next((browser for browser in self.browsers if browser.has_room), None)
                or await self._launch()
            )
            found.took_one()
        # Outside the lock: the place is taken, and pages may be opened at the same time.
        return await open_tab(found, self.settings, size, files)

    async def park(self, tab: Tab) -> None:
        """Keep the page for the next episode at its address, as long as there is room."""
        if tab.chromium.retired or not tab.chromium.alive:
            await self.close_tab(tab)
        else:
            self._parked.append(tab)

    async def parked(self, address: str, size: Size) -> Tab | None:
        """A page that ``park`` left at this address, any of this size when there is no room for
        another one, or None.
        """
        found = next((tab for tab in self._parked if tab.address == address), None)
        if (
            found is None
            and self._parked
            and not any(browser.has_room for browser in self.browsers)
        ):
            found = next((tab for tab in self._parked if tab.size == size), None)
        if found is not None:
            # Nothing was awaited since the search, so no other episode can have taken this page.
            self._parked.remove(found)
            if found.chromium.retired or not found.chromium.alive:
                await self.close_tab(found)
                return None
            found.chromium.took_one(again=True)
        return found

    async def _launch(self) -> Chromium:
        """With the driver that is there; when that one is broken, with a new one."""
        await self._sweep()
        for fresh in (False, True):
            try:
                if fresh or self._driver is None:
                    await self._start_driver()
                browser = await launch(self._driver, self.settings, self.held)
                break
            except EnvironmentFailed:
                if fresh:
                    raise
        self.browsers.append(browser)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.ensure_future(self._watch())
        return browser

    async def _start_driver(self) -> None:
        from playwright.async_api import async_playwright

        await self._stop_driver()
        try:
            async with asyncio.timeout(self.settings.launch_timeout):
                self._driver = await async_playwright().start()
        except Exception as error:
            raise EnvironmentFailed(
                f"Playwright's driver did not start: {type(error).__name__}: {error}"
            ) from error

    async def _stop_driver(self) -> None:
        # Before the await, so that nobody else stops or uses this driver.
        driver, self._driver = self._driver, None
        if driver is not None:
            with suppress(Exception):
                async with asyncio.timeout(CLOSING):
                    await driver.stop()

    async def close_tab(self, tab: Tab) -> None:
        """Never raises for what the page does."""
        await tab.close()
        await self._sweep()

    async def _sweep(self) -> None:
        """End browsers that take no more episodes, and have none, or are gone."""
        left = [tab for tab in self._parked if tab.chromium.retired or not tab.chromium.alive]
        # Out of the list before the first await: another sweep must not close the same pages.
        self._parked = [tab for tab in self._parked if tab not in left]
        for tab in left:
            await tab.close()
        over = [
            browser
            for browser in self.browsers
            if not browser.alive or (browser.retired and not browser.open)
        ]
        self.browsers = [browser for browser in self.browsers if browser not in over]
        for browser in over:
            await browser.close()

    async def _watch(self) -> None:
        turn = 0
        while True:
            for browser in self.browsers:
                # The walk reads a file of every thread, so it is not taken in every round.
                browser.watch(look_again=turn % 4 == 0)
            turn += 1
            await asyncio.sleep(WATCH)

    async def _end(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        browsers, self.browsers = self.browsers, []
        for browser in browsers:
            await browser.close()
        await self._stop_driver()
