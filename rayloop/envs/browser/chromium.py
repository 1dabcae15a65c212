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
"""Flags of the browser.

Wheel turns take effect at once; equal pages have equal pixels; a page's script that fills half a
GiB gets an error.
"""
MIB = 1 << 20
NO_FOLDER = "/proc/self/fdinfo"
"""For downloads and traces, which are refused: a folder that exists and takes no file."""
CLOSE_TIMEOUT_S = 5.0
"""Seconds for an orderly end; then the processes are killed."""
MEMORY_BLAME_S = 5.0
"""Seconds within which a page's end is put down to a process that was ended for its memory."""


class Chromium:
    """A running browser, which ``launch`` makes.

    ``open`` counts its pages, ``episodes`` all that it ever had.
    """

    def __init__(
        self, browser: Any, pid: int | None, program: Program, settings: BrowserSettings
    ) -> None:
        self.browser = browser
        self.pid = pid
        self.open = 0
        self.episodes = 0
        self._program = program
        self._settings = settings
        self.retired = False
        self._renderers: dict[int, bool] = {}
        self._ended_for_memory = 0.0

    @property
    def has_room(self) -> bool:
        """Return whether it may take one more page."""
        return not self.retired and self.alive and self.open < self._settings.pages

    @property
    def alive(self) -> bool:
        """Return whether Playwright is connected to it."""
        return bool(self.browser.is_connected())

    @property
    def memory_spent(self) -> bool:
        """Return whether one of its pages was just ended for its memory."""
        return time.monotonic() - self._ended_for_memory < MEMORY_BLAME_S

    def took_one(self, again: bool = False) -> None:
        """Count an episode, in a page that it had before if ``again``.

        Retires the browser after the last one that it may have.
        """
        self.open += not again
        self.episodes += 1
        self.retired = self.retired or self.episodes >= self._settings.recycle_episodes

    def watch(self, look_again: bool) -> None:
        """End pages that fill too much memory, and retire a browser that is too large.

        ``look_again`` finds new processes.
        """
        if self.pid is None:
            return
        if look_again or not self._renderers:
            self._renderers = {pid: processes.renders(pid) for pid in processes.tree(self.pid)}
        page_limit = self._settings.page_memory * MIB
        for pid, renders in self._renderers.items():
            # The list may be seconds old and a process id taken again: look before the kill.
            if renders and beyond(page_limit, [pid]) and processes.renders(pid):
                self._ended_for_memory = time.monotonic()
                _kill(pid)
        browser_limit = self._settings.browser_memory * MIB
        self.retired = self.retired or bool(beyond(browser_limit, list(self._renderers)))

    async def answers(self, seconds: float) -> bool:
        """Return whether its main process answers, whatever its pages do."""
        with suppress(Exception):
            async with asyncio.timeout(seconds):
                session = await self.browser.new_browser_cdp_session()
                await session.send("Browser.getVersion")
                await session.detach()
                return True
        return False

    async def close(self) -> None:
        """Close it, orderly if it answers, and then by force."""
        self.retired = True
        with suppress(Exception):
            async with asyncio.timeout(CLOSE_TIMEOUT_S if self.alive else 0.5):
                await self.browser.close()
        self.kill()
        # After the kill: this waits until the browser's processes have ended, and other pages must
        # not wait for that.
        await in_thread(self._program.close, timeout=CLOSE_TIMEOUT_S)

    def kill(self) -> None:
        """Kill all its processes.

        They share a process-id namespace, or descend from the process that was started.
        """
        self.retired = True
        for pid in reversed(processes.tree(self.pid) if self.pid else []):
            _kill(pid)


async def launch(playwright: Any, settings: BrowserSettings, held: Confinement) -> Chromium:
    """Start a browser.

    Raises EnvironmentFailed, with the browser's words, after ``launch_timeout``.
    """
    program = Program(settings, held)
    mark = f"--rayloop-browser={uuid.uuid4().hex}"
    try:
        # Playwright's own deadline comes first, since its error has what the browser said.
        async with asyncio.timeout(settings.launch_timeout + 1):
            browser = await playwright.chromium.launch(
                executable_path=program.path,
                args=[mark, *FLAGS],
                chromium_sandbox=held.own,
                timeout=settings.launch_timeout * 1000,
                artifacts_dir=NO_FOLDER,
                # The run decides what a signal ends; Playwright would close the browser at once.
                handle_sigint=False,
                handle_sigterm=False,
                handle_sighup=False,
            )
    except Exception as error:
        # Playwright may have started it before it gave up; only the mark finds its process.
        pid = processes.marked(os.getpid(), mark)
        if pid is not None:
            _kill(pid)
        await in_thread(program.close, timeout=CLOSE_TIMEOUT_S)
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise EnvironmentFailed(f"{settings.program} did not start ({held}): {reason}") from error
    pid = processes.marked(os.getpid(), mark)
    if pid is not None and held.level == "namespaces":
        _remove_profile_folder(pid)
    return Chromium(browser, pid, program, settings)


def _remove_profile_folder(pid: int) -> None:
    """Remove Playwright's folder for a profile: the real profile is in the browser's memory."""
    option = "--user-data-dir="
    for word in processes.command_line(pid):
        if word.startswith(option):
            with suppress(OSError):
                os.rmdir(word.removeprefix(option))


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
