"""The browsers of a process: one for all its environments, more when it is full.

A browser that has ended is replaced.
"""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, TypeVar

from rayloop.core.failures import EnvironmentFailed
from rayloop.envs.browser.chromium import CLOSE_TIMEOUT_S, Chromium, launch
from rayloop.envs.browser.containment import BrowserSettings, check
from rayloop.envs.browser.tab import Files, Size, Tab, open_tab

Result = TypeVar("Result")

MEMORY_CHECK_EVERY_S = 0.5
"""Seconds between two looks at the browsers' memory."""
ANSWER_MARGIN_S = 15.0
"""Seconds that the answer of the loop may be late.

The coroutines that it waits for have their deadlines, which come first.
"""

_hosts: dict[str, "Host"] = {}
_lock = threading.Lock()


def host_of(settings: BrowserSettings) -> "Host":
    """Return the host of this process for these settings, made at the first request.

    Raises EnvironmentFailed (``check``).
    """
    with _lock:
        key = settings.model_dump_json()
        if key not in _hosts:
            _hosts[key] = Host(settings)
        return _hosts[key]


class Host:
    """The browsers for one set of settings, on an event loop in a thread.

    The machine is checked for ``settings.containment`` when a host is made.
    """

    def __init__(self, settings: BrowserSettings) -> None:
        self.settings = settings
        self.held = check(settings)
        self.browsers: list[Chromium] = []
        self._parked: list[Tab] = []
        self._loop = asyncio.new_event_loop()
        self._driver: Any = None
        self._one_at_a_time = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        thread = threading.Thread(
            target=self._loop.run_forever, daemon=True, name="rayloop-browsers"
        )
        thread.start()

    def run(self, work: Coroutine[Any, Any, Result], seconds: float) -> Result:
        """Return what ``work`` gives, in another thread.

        Raises what it raises, and EnvironmentFailed after ``seconds``.
        """
        answer = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return answer.result(seconds + ANSWER_MARGIN_S)
        except (TimeoutError, CancelledError) as error:
            # The coroutine would continue in the other thread, and hold its page.
            answer.cancel()
            raise EnvironmentFailed(
                f"the browser gave no answer within {seconds + ANSWER_MARGIN_S:g} s"
            ) from error

    def end(self) -> None:
        """End all browsers and the driver, for tests and measurements."""
        with _lock:
            for key in [key for key, host in _hosts.items() if host is self]:
                del _hosts[key]
        self.run(self._end(), 3 * CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def open(self, size: Size, files: Files) -> Tab:
        """Open an empty page, in a browser with room or a new one. Raises EnvironmentFailed."""
        # Episodes that begin together would each find no room, and each launch a browser.
        async with self._one_at_a_time:
            if not self._has_room() and self._parked:
                await self.close_tab(self._parked.pop(0))
            browser = next((browser for browser in self.browsers if browser.has_room), None)
            if browser is None:
                browser = await self._launch()
            browser.took_one()
        # Outside the lock: the place is taken, and pages may be opened at the same time.
        return await open_tab(browser, self.settings, size, files)

    def _has_room(self) -> bool:
        return any(browser.has_room for browser in self.browsers)

    async def park(self, tab: Tab) -> None:
        """Keep a page for the next episode at its address, until its place is needed."""
        if tab.chromium.retired or not tab.chromium.alive:
            await self.close_tab(tab)
        else:
            self._parked.append(tab)

    async def parked(self, address: str, size: Size) -> Tab | None:
        """Return a page that ``park`` left at this address, or None.

        When there is no room for another page, it may be any page of this size.
        """
        page = next((tab for tab in self._parked if tab.address == address), None)
        if page is None and self._parked and not self._has_room():
            page = next((tab for tab in self._parked if tab.size == size), None)
        if page is not None:
            # Nothing was awaited since the search, so no other episode can have taken this page.
            self._parked.remove(page)
            if page.chromium.retired or not page.chromium.alive:
                await self.close_tab(page)
                return None
            page.chromium.took_one(again=True)
        return page

    async def _launch(self) -> Chromium:
        """Launch a browser with the running driver; with a new one when that is broken."""
        await self._sweep()
        for new_driver in (False, True):
            try:
                if new_driver or self._driver is None:
                    await self._start_driver()
                browser = await launch(self._driver, self.settings, self.held)
                break
            except EnvironmentFailed:
                if new_driver:
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
        driver = self._driver
        self._driver = None
        if driver is not None:
            with suppress(Exception):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await driver.stop()

    async def close_tab(self, tab: Tab) -> None:
        """Close a page. Never raises for what the page does."""
        await tab.close()
        await self._sweep()

    async def _sweep(self) -> None:
        """End browsers that have ended, or that take no more episodes and have none."""
        lost = [tab for tab in self._parked if tab.chromium.retired or not tab.chromium.alive]
        # Out of the list before the first await: another sweep must not close the same pages.
        self._parked = [tab for tab in self._parked if tab not in lost]
        for tab in lost:
            await tab.close()
        finished = [
            browser
            for browser in self.browsers
            if not browser.alive or (browser.retired and not browser.open)
        ]
        self.browsers = [browser for browser in self.browsers if browser not in finished]
        for browser in finished:
            await browser.close()

    async def _watch(self) -> None:
        round_number = 0
        while True:
            for browser in self.browsers:
                # The walk reads a file of every thread, so it is not taken in every round.
                browser.watch(look_again=round_number % 4 == 0)
            round_number += 1
            await asyncio.sleep(MEMORY_CHECK_EVERY_S)

    async def _end(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        browsers = self.browsers
        self.browsers = []
        for browser in browsers:
            await browser.close()
        await self._stop_driver()
