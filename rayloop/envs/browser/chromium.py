"""One running Chromium: its start, the pages in it, the memory that they fill, and its end."""

import asyncio
import os
import signal
import time
import uuid
from contextlib import suppress
from typing import Any

from rayloop.core.failures import EnvironmentFailed
from rayloop.core.threads import in_thread
from rayloop.envs.browser import processes
from rayloop.envs.browser.containment import BrowserSettings, Confinement, Program
from rayloop.sandbox.memory import beyond

FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--disable-smooth-scrolling",
    "--disable-partial-raster",
    "--js-flags=--max-old-space-size=512",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
)
"""Wheel turns take effect at once; equal pages have equal pixels; a page's script ends at half a
GiB by an error of its own.
"""
MIB = 1 << 20
NOWHERE = "/proc/self/fdinfo"
"""For downloads and traces, which are refused: a folder that exists and takes no file."""
CLOSING = 5.0
"""Seconds for an orderly end; then the processes are killed."""
BLAMED = 5.0
"""Seconds within which a page's end is put down to a process that was ended for its memory."""


class Chromium:
    """``open``: its pages, ``episodes``: all that it ever had. Made by ``launch``."""

    def __init__(
        self, browser: Any, pid: int | None, program: Program, settings: BrowserSettings
    ) -> None:
        self.browser, self.pid, self._program, self._settings = browser, pid, program, settings
        self.open = self.episodes = 0
        self.retired = False
        self._renderers: dict[int, bool] = {}
        self._ended_for_memory = 0.0

    @property
    def has_room(self) -> bool:
        """Whether it may take one more page."""
        return not self.retired and self.alive and self.open < self._settings.pages

    @property
    def alive(self) -> bool:
        """Whether Playwright is connected to it."""
        return bool(self.browser.is_connected())

    @property
    def memory_spent(self) -> bool:
        """Whether one of its pages was just ended for its memory."""
        return time.monotonic() - self._ended_for_memory < BLAMED

    def took_one(self, again: bool = False) -> None:
        """Count an episode, in a page it had before if ``again``; retire after the last one that it
        may have.
        """
        self.open += not again
        self.episodes += 1
        self.retired = self.retired or self.episodes >= self._settings.recycle_episodes

    def watch(self, look_again: bool) -> None:
        """End pages that fill too much memory, and retire a browser that is too large;
        ``look_again`` finds new processes.
        """
        if self.pid is None:
            return
        if look_again or not self._renderers:
            self._renderers = {pid: processes.renders(pid) for pid in processes.tree(self.pid)}
        for pid, renders in self._renderers.items():
            # The list may be seconds old and a process id taken again: look before the kill.
            if (
                renders
                and beyond(self._settings.page_memory * MIB, [pid])
                and processes.renders(pid)
            ):
                self._ended_for_memory = time.monotonic()
                _kill(pid)
        self.retired = self.retired or bool(
            beyond(self._settings.browser_memory * MIB, list(self._renderers))
        )

    async def answers(self, seconds: float) -> bool:
        """Whether its main process does, whatever its pages do."""
        with suppress(Exception):
            async with asyncio.timeout(seconds):
                session = await self.browser.new_browser_cdp_session()
                await session.send("Browser.getVersion")
                await session.detach()
                return True
        return False

    async def close(self) -> None:
        """Orderly if it answers, and by force."""
        self.retired = True
        with suppress(Exception):
            async with asyncio.timeout(CLOSING if self.alive else 0.5):
                await self.browser.close()
        self.kill()
        # After the kill: this waits until the browser's processes have ended, and other pages must
        # not wait for that.
        await in_thread(self._program.close, timeout=CLOSING)

    def kill(self) -> None:
        """All its processes: they share a process-id namespace, or descend from the one that was
        started.
        """
        self.retired = True
        for pid in reversed(processes.tree(self.pid) if self.pid else []):
            _kill(pid)


async def launch(playwright: Any, settings: BrowserSettings, held: Confinement) -> Chromium:
    """Raises EnvironmentFailed when it is not there within ``launch_timeout``, with what it said."""
    program, mark = Program(settings, held), f"--rayloop-browser={uuid.uuid4().hex}"
    try:
        # Playwright's own deadline comes first, since its error has what the browser said.
        async with asyncio.timeout(settings.launch_timeout + 1):
            browser = await playwright.chromium.launch(
                executable_path=program.path,
                args=[mark, *FLAGS],
                chromium_sandbox=held.own,
                timeout=settings.launch_timeout * 1000,
                artifacts_dir=NOWHERE,
                # The run decides what a signal ends; Playwright would close the browser at once.
                handle_sigint=False,
                handle_sigterm=False,
                handle_sighup=False,
            )
    except Exception as error:
        # Playwright may have started it before it gave up; only the mark finds its process.
        if (pid := processes.marked(os.getpid(), mark)) is not None:
            _kill(pid)
        await in_thread(program.close, timeout=CLOSING)
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise EnvironmentFailed(f"{settings.program} did not start ({held}): {first}") from error
    pid = processes.marked(os.getpid(), mark)
    if pid is not None and held.level == "namespaces":
        for word in processes.command_line(pid):
            if word.startswith(
                "--user-data-dir="
            ):  # Playwright's folder for a profile: the real one lies in the browser's memory
                with suppress(OSError):
                    os.rmdir(word.partition("=")[2])
    return Chromium(browser, pid, program, settings)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
