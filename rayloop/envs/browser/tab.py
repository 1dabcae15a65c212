"""One page in a browser context of its own: loaded, acted upon, looked at, each within a deadline.

Errors say what failed.
"""

import asyncio
import base64
import functools
import json
import mimetypes
import os
import re
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urljoin, urlsplit

from rayloop.core.failures import EnvironmentFailed
from rayloop.envs.browser.chromium import CLOSING, Chromium
from rayloop.envs.browser.containment import BrowserSettings
from rayloop.envs.browser.inputs import Inputs, pause
from rayloop.envs.grammar.actions import Action, Point

KEPT = 512
"""Files kept in memory, the last ones used."""
LARGEST = 32 << 20
"""Bytes of a file; larger ones are not there."""


@dataclass(frozen=True)
class Files:
    """``hosts``: host name -> folder, of which nothing outside is reachable; ``sites``: real hosts,
    with their ports if any.
    """

    hosts: Mapping[str, str]
    sites: frozenset[str] = frozenset()

    def passes(self, url: str) -> bool:
        """Whether the address is on one of ``sites``."""
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and parts.netloc in self.sites

    def serves(self, url: str) -> bool:
        """Whether the address is one of the hosts, where a missing file is a mistake of the page,
        no refusal.
        """
        parts = urlsplit(url)
        return parts.scheme == "http" and parts.netloc in self.hosts

    def find(self, url: str) -> tuple[bytes, str] | None:
        """Content and media type of an address of ``hosts``; None when there is no such file.

        A folder is its index.html.
        """
        parts = urlsplit(url)
        root = os.path.realpath(self.hosts[parts.netloc])
        path = os.path.realpath(os.path.join(root, unquote(parts.path).lstrip("/")))
        if os.path.isdir(path):
            path = os.path.join(path, "index.html")
        if (
            not Path(path).is_relative_to(root)
            or not os.path.isfile(path)
            or os.path.getsize(path) > LARGEST
        ):
            return None
        # The time of the last change is part of the cache's key: an edited file is read again.
        return (
            _content(path, os.stat(path).st_mtime_ns),
            mimetypes.guess_type(path)[0] or "text/plain",
        )


@functools.lru_cache(KEPT)
def _content(path: str, _changed: int) -> bytes:
    return Path(path).read_bytes()


Result = TypeVar("Result")

ALIVE = 2.0
"""Seconds in which a page or a browser that does not hang answers a question that costs nothing."""


BETWEEN = (
    "Unable to capture screenshot",
    "Not attached to an active page",
    "Inspected target navigated",
    "Cannot find context",
)
"""Chromium's words when a page has drawn nothing yet, or is about to become another one."""
BLINK = 0.05
"""Seconds until it is asked again."""
LOOKS = 8
"""Screenshots at most until no file of ``Files.hosts`` is on its way, such as an icon of a dialog
that has just opened.
"""
NO_FILE = "Not allowed to load local resource: file:"
"""Chromium's words on the console."""
REDIRECTIONS = 5
"""From one address to the next, at most."""
_REFERENCE = re.compile(r" \[(ref=\w+|cursor=pointer)\]")
"""What the tree says for programs only."""


class PageHangs(Exception):
    """The page does not answer, while its browser does."""


class PageTooLarge(Exception):
    """The page was ended for the memory that it filled."""


@dataclass(frozen=True, slots=True)
class Screen:
    """What a page shows: PNG bytes of the whole screen, and the value of the expression that was
    asked for.
    """

    png: bytes
    value: Any


@dataclass(frozen=True, slots=True)
class Size:
    """In pixels.

    The screen is the upper left of the view, which may be larger, so that dialogs do not scroll it.
    """

    width: int
    height: int
    view_width: int
    view_height: int


class Tab:
    """Made by ``open_tab``; all its methods run on the host's event loop.

    ``address`` was loaded last.
    """

    def __init__(
        self,
        chromium: Chromium,
        context: Any,
        page: Any,
        cdp: Any,
        settings: BrowserSettings,
        size: Size,
    ):
        self.chromium, self._context, self._page, self._cdp = chromium, context, page, cdp
        self._settings, self.size = settings, size
        self.refused: Counter[str] = Counter()
        self.address = ""
        self._requests = self._answers = 0
        self._crashed = asyncio.Event()
        self._inputs = Inputs(page)
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked: set[asyncio.Future[Any]] = set()

    async def load(self, url: str) -> None:
        """Raises EnvironmentFailed when the page cannot be loaded in time."""
        await self._in_time(
            self._settings.load_timeout, self._page.goto(url, wait_until="load"), f"loading {url}"
        )
        self.address = url

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, a promise awaited.

        Raises as ``act``, and ValueError for what it throws.
        """
        return await self._in_time(
            self._settings.load_timeout, self._evaluate(expression), "an expression"
        )

    async def act(
        self, actions: Sequence[Action], expression: str, over: str, settle: float = 0.0
    ) -> Screen:
        """Carry out actions (points in pixels), until ``over`` is true after one; then wait
        ``settle`` seconds and look. Raises PageHangs and PageTooLarge, which the actions caused,
        and EnvironmentFailed.
        """

        async def run() -> Screen:
            for index, action in enumerate(actions):
                await self._inputs.perform(action)
                if index + 1 < len(actions) and await self._evaluate(over):
                    break
            if settle:
                await asyncio.sleep(settle)
                await self._page.wait_for_load_state("load")
            return await self._look(expression)

        pauses = settle + sum(map(pause, actions))
        return await self._in_time(self._settings.action_timeout + pauses, run(), "the actions")

    async def look(self, expression: str) -> Screen:
        """What is seen. Raises as ``act`` does."""
        return await self._in_time(
            self._settings.action_timeout, self._look(expression), "a screenshot"
        )

    async def tree(self, selector: str) -> str:
        """Of the one element: its accessibility tree, as YAML with boxes (x, y, width, height in
        pixels). Raises as ``act``.
        """
        asked = self._page.locator(selector).aria_snapshot(mode="ai", boxes=True)
        return _REFERENCE.sub(
            "",
            str(
                await self._in_time(self._settings.action_timeout, asked, "the accessibility tree")
            ),
        )

    async def rest_pointer(self) -> None:
        """Away from the screen, so that nothing is drawn as hovered."""
        moving = self._inputs.move(Point(self.size.view_width - 5, self.size.view_height - 5))
        await self._in_time(self._settings.action_timeout, moving, "the pointer")

    async def close(self) -> None:
        """Whatever the page does. A browser in which it cannot be closed takes no more pages."""
        self.chromium.open -= 1
        try:
            async with asyncio.timeout(CLOSING):
                await self._context.close()
        except Exception:
            self.chromium.retired = True

    def listen(self, files: Files) -> None:
        """Count and refuse what a page must not do; called once."""

        def soon(counted: str, work: Awaitable[Any]) -> None:
            async def run() -> None:
                with suppress(Exception):
                    await work

            self.refused[counted] += 1
            task = asyncio.ensure_future(run())
            # asyncio itself holds a task by a weak reference only.
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._page.on("crash", lambda *_: self._crashed.set())
        self._page.on("framenavigated", self._left)
        self._page.on("dialog", lambda dialog: soon("dialog", dialog.dismiss()))
        self._page.on("download", lambda download: soon("download", download.cancel()))
        self._context.on("page", lambda page: soon("window", page.close()))
        self._page.on(
            "console",
            lambda said: self.refused.update(["file"] if said.text.startswith(NO_FILE) else []),
        )
        self._files = files

    async def route(self, route: Any) -> None:
        """Answer a request of the page from the files; refuse and count all others."""
        url, served = route.request.url, self._files.serves(route.request.url)
        # Counted before the answer and after it: while they differ, a file is on its way.
        self._requests += served
        with suppress(Exception):  # the page is gone, or on its way to another one
            if self._files.passes(url):
                await self._relay(route)
            elif not served:
                self.refused["file" if url.startswith("file:") else "network"] += 1
                await route.abort("blockedbyclient")
            elif found := self._files.find(url):
                await route.fulfill(body=found[0], content_type=found[1])
            else:
                await route.fulfill(status=404, body="")
        self._answers += served

    async def _relay(self, route: Any) -> None:
        """Answer with a site's answer to Playwright's driver, which has a network.

        Redirections stay on the sites.
        """
        url: str = route.request.url
        options: dict[str, str] = {}
        for _ in range(REDIRECTIONS):
            answer = await route.fetch(
                max_redirects=0, timeout=self._settings.load_timeout * 1000, **options
            )
            onward = answer.headers.get("location") if 300 <= answer.status < 400 else None
            if onward is None:
                return await route.fulfill(response=answer)
            url = urljoin(url, onward)
            if not self._files.passes(url):
                break
            if route.request.resource_type == "document":  # so that the page knows its own address
                # An address with "</script>" would end the script that it is written into.
                to = json.dumps(url).replace("<", "\\u003c")
                return await route.fulfill(
                    content_type="text/html", body=f"<script>location.replace({to})</script>"
                )
            options = {"url": url, "method": "GET"}
        self.refused["network"] += 1
        await route.abort("blockedbyclient")

    async def _look(self, expression: str) -> Screen:
        clip = {"x": 0, "y": 0, "width": self.size.width, "height": self.size.height, "scale": 1}
        shot = {"format": "png", "optimizeForSpeed": True, "clip": clip}
        for _ in range(LOOKS):
            answers = self._answers
            taken, value = await asyncio.gather(
                self._ask("Page.captureScreenshot", shot), self._evaluate(expression)
            )
            # No file was on its way when the screenshot began, and none came while it was taken.
            if answers == self._answers == self._requests:
                break
            await asyncio.sleep(BLINK)
        return Screen(base64.b64decode(taken["data"]), value)

    async def _evaluate(self, expression: str) -> Any:
        answer = await self._ask(
            "Runtime.evaluate",
            {"expression": expression, "returnByValue": True, "awaitPromise": True},
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            thrown = details.get("exception", {}).get("description") or details.get("text", "")
            raise ValueError(
                f"{expression[:80]!r}: {thrown.splitlines()[0] if thrown else 'it throws'}"
            )
        return answer["result"].get("value")

    async def _ask(self, method: str, parameters: Mapping[str, Any]) -> Any:
        """Again when the page became another one, or was about to: then it may give an error, or no
        answer at all.
        """
        while True:
            asked = asyncio.ensure_future(self._cdp.send(method, parameters))
            self._asked.add(asked)
            try:
                return await asked
            except asyncio.CancelledError:
                if asked in self._asked:  # it is we who are cancelled
                    asked.cancel()
                    raise
            except Exception as error:
                if self._crashed.is_set() or not any(words in str(error) for words in BETWEEN):
                    raise
            finally:
                self._asked.discard(asked)
            await asyncio.sleep(BLINK)
            await self._page.wait_for_load_state("load")

    def _left(self, frame: Any) -> None:
        """The page is another one: what it was asked before is asked again."""
        if frame.parent_frame is None:
            asked, self._asked = self._asked, set()
            for one in asked:
                one.cancel()

    async def _in_time(self, seconds: float, work: Awaitable[Result], what: str) -> Result:
        """What ``work`` gives within ``seconds``. Else whose fault it is that it gives nothing."""
        task = asyncio.ensure_future(work)
        crashed = asyncio.ensure_future(self._crashed.wait())
        try:
            await asyncio.wait(
                {task, crashed}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if task.done() and (
                task.exception() is None or isinstance(task.exception(), ValueError)
            ):
                return task.result()
            if not task.done() and not self._crashed.is_set():
                raise await self._hanging(seconds, what)
            await asyncio.sleep(
                0
            )  # the event of a crash comes before or after the error of the call that it broke
            raise self._broken(task.exception() if task.done() else None, what)
        finally:
            crashed.cancel()
            task.cancel()
            # The page is not free before the cancelled work has unwound.
            await asyncio.wait({task})

    def _broken(self, error: BaseException | None, what: str) -> Exception:
        if self._crashed.is_set() and self.chromium.memory_spent:
            return PageTooLarge(
                f"the page filled more than {self._settings.page_memory} MiB (browser.page_memory)"
            )
        if self._crashed.is_set():
            return EnvironmentFailed("the page's process ended")
        if not self.chromium.alive:
            return EnvironmentFailed("the browser ended")
        return EnvironmentFailed(
            f"{what} failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        )

    async def _hanging(self, seconds: float, what: str) -> Exception:
        if not await self.chromium.answers(ALIVE):
            self.chromium.kill()
            return EnvironmentFailed(
                f"the browser did not answer within {seconds:g} s, and was ended"
            )
        with suppress(Exception):
            async with asyncio.timeout(ALIVE):
                await self._cdp.send("Runtime.evaluate", {"expression": "1"})
                return EnvironmentFailed(
                    f"{what} took more than {seconds:g} s, and the page answers"
                )
        return PageHangs(f"the page does not answer, {seconds:g} s after {what}")


async def open_tab(chromium: Chromium, settings: BrowserSettings, size: Size, files: Files) -> Tab:
    """A context with an empty page, after ``chromium.took_one``.

    Raises EnvironmentFailed beyond ``launch_timeout``.
    """
    context: Any = None
    try:
        async with asyncio.timeout(settings.launch_timeout):
            context = await chromium.browser.new_context(
                viewport={"width": size.view_width, "height": size.view_height},
                accept_downloads=False,
                service_workers="block",
                locale="en-US",
                timezone_id="UTC",
            )
            page = await context.new_page()
            tab = Tab(chromium, context, page, await context.new_cdp_session(page), settings, size)
            # Before any page is loaded: its dialogs and windows would get through otherwise.
            tab.listen(files)
            await context.route("**/*", tab.route)
            return tab
    except Exception as error:
        chromium.open -= 1
        chromium.retired = True
        if context is not None:
            with suppress(Exception):
                async with asyncio.timeout(1):
                    await context.close()
        why = (
            str(error).splitlines()[0]
            if str(error)
            else f"no answer within {settings.launch_timeout:g} s"
        )
        raise EnvironmentFailed(f"a page could not be opened: {why}") from error
