"""One page in its browser context: loaded, acted upon, looked at, each within a deadline.

Errors say what failed.
"""

import asyncio
import base64
import functools
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

from rayloop.core.failures import Cause, EnvironmentFailed
from rayloop.envs.browser.chromium import CLOSE_TIMEOUT_S, Chromium
from rayloop.envs.browser.containment import BrowserSettings
from rayloop.envs.browser.inputs import Inputs, NotHere, extra_time
from rayloop.envs.browser.sites import Sites
from rayloop.envs.browser.touch import PHONE_AGENT, TouchInputs
from rayloop.envs.grammar.actions import Action, GoBack, OpenUrl, Point

CACHED_FILES = 512
"""Files kept in memory, the last ones used."""
MAX_FILE_BYTES = 32 << 20
"""Bytes of a file; a larger one counts as missing."""


@dataclass(frozen=True)
class Files:
    """What a page may load.

    ``hosts``: host name -> folder, of which nothing outside is reachable; ``sites``: real hosts,
    with their ports if any.
    """

    hosts: Mapping[str, str]
    sites: frozenset[str] = frozenset()

    def passes(self, url: str) -> bool:
        """Return whether the address is on one of ``sites``."""
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and parts.netloc in self.sites

    def serves(self, url: str) -> bool:
        """Return whether the address is on one of ``hosts``.

        A missing file is a mistake of the page there, and not refused.
        """
        parts = urlsplit(url)
        return parts.scheme == "http" and parts.netloc in self.hosts

    def find(self, url: str) -> tuple[bytes, str] | None:
        """Return content and media type of an address of ``hosts``; None for a missing file.

        A folder stands for its index.html.
        """
        parts = urlsplit(url)
        root = os.path.realpath(self.hosts[parts.netloc])
        path = os.path.realpath(os.path.join(root, unquote(parts.path).lstrip("/")))
        if os.path.isdir(path):
            path = os.path.join(path, "index.html")
        is_below = Path(path).is_relative_to(root)
        if not is_below or not os.path.isfile(path) or os.path.getsize(path) > MAX_FILE_BYTES:
            return None
        # The time of the last change is part of the cache's key: an edited file is read again.
        content = _content(path, os.stat(path).st_mtime_ns)
        media_type, _ = mimetypes.guess_type(path)
        return content, media_type or "text/plain"


@functools.lru_cache(CACHED_FILES)
def _content(path: str, _changed: int) -> bytes:
    return Path(path).read_bytes()


Result = TypeVar("Result")

ANSWER_TIMEOUT_S = 2.0
"""Seconds in which a page or a browser that does not hang answers a question that costs nothing."""
NAVIGATION_ERRORS = (
    "Unable to capture screenshot",
    "Not attached to an active page",
    "Inspected target navigated",
    "Cannot find context",
)
"""Chromium's words when a page has drawn nothing yet, or is about to become another one."""
RETRY_AFTER_S = 0.05
"""Seconds until it is asked again."""
MAX_LOOKS = 8
"""Screenshots at most until no file of ``Files.hosts`` is on its way.

A dialog that has just opened may load an icon, for instance.
"""
NO_FILE = "Not allowed to load local resource: file:"
"""Chromium's words on the console."""
_REFERENCE = re.compile(r" \[(ref=\w+|cursor=pointer)\]")
"""The parts of an accessibility tree that are only for programs."""


class PageHangs(Exception):
    """The page does not answer, while its browser does."""


class PageTooLarge(Exception):
    """The page was ended for the memory that it filled."""


@dataclass(frozen=True)
class Screen:
    """What a page shows.

    ``png`` is the whole screen, ``value`` the value of the expression that was asked for.
    """

    png: bytes
    value: Any


@dataclass(frozen=True)
class Size:
    """The size of screen and view in pixels of the page.

    The screen is the upper left of the view, which may be larger, so that dialogs do not scroll it.
    """

    width: int
    height: int
    view_width: int
    view_height: int
    scale: float = 1.0
    """Pixels of the screenshot for each pixel of the page."""
    touch: bool = False
    """Whether it is the screen of a phone."""


class Tab:
    """A page. ``open_tab`` makes it; all its methods run on the host's event loop.

    ``address`` is the address that was loaded last.
    """

    def __init__(
        self,
        chromium: Chromium,
        context: Any,
        page: Any,
        cdp: Any,
        settings: BrowserSettings,
        size: Size,
        sites: Sites,
    ):
        self.chromium = chromium
        self.sites = sites
        self.size = size
        self.refused: Counter[str] = Counter()
        self.address = ""
        self._context = context
        self.page = page
        self._cdp = cdp
        self._settings = settings
        self._requests = 0
        self._answers = 0
        self._crashed = asyncio.Event()
        self._inputs = Inputs(page, size.width, size.height)
        if size.touch:
            self._inputs = TouchInputs(page, cdp, self._evaluate, size.scale)
        self._tasks: set[asyncio.Task[None]] = set()
        self._questions: set[asyncio.Future[Any]] = set()

    async def load(self, url: str) -> None:
        """Load a page. Raises EnvironmentFailed when it cannot be loaded in time."""
        loading = self.page.goto(url, wait_until="load")
        try:
            await self._in_time(self._settings.load_timeout, loading, f"loading {url}")
        except (EnvironmentFailed, PageHangs) as error:
            has_ended = getattr(error, "cause", Cause.RAISED) is not Cause.RAISED
            if has_ended or self._files.serves(url):
                raise
            site = urljoin(url, "/")
            raise EnvironmentFailed(str(error), cause=Cause.UNREACHABLE, server=site) from error
        self.address = url

    async def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, a promise awaited.

        Raises as ``act``, and ValueError for what it throws.
        """
        return await self._in_time(
            self._settings.load_timeout, self._evaluate(expression), "an expression"
        )

    async def act(
        self, actions: Sequence[Action], expression: str, over: str, settle: float = 0.0
    ) -> Screen:
        """Carry out actions (points in pixels), until ``over`` is true after one.

        Then waits ``settle`` seconds and looks. Raises NotHere for a page that a recording lacks,
        PageHangs and PageTooLarge, which the actions caused, and EnvironmentFailed.
        """

        async def run() -> Screen:
            for index, action in enumerate(actions):
                await self._perform(action)
                if index + 1 < len(actions) and await self._evaluate(over):
                    break
            if settle:
                await asyncio.sleep(settle)
                await self.page.wait_for_load_state("load")
            screen = await self._look(expression)
            # A link has led out of the recording, and the page has stayed. That is the policy's
            # choice: as a failure of the environment it would leave the episode out.
            if self.sites.lost:
                lost = self.sites.lost
                self.sites.lost = ""
                raise NotHere(lost)
            return screen

        pauses = settle + sum(map(extra_time, actions))
        return await self._in_time(self._settings.action_timeout + pauses, run(), "the actions")

    async def _perform(self, action: Action) -> None:
        match action:
            case OpenUrl(url):
                address = urljoin(self.page.url, url if "://" in url else f"http://{url}")
                has_file = self._files.serves(address) and self._files.find(address) is not None
                on_site = self._files.passes(address) and self.sites.has(address)
                if not has_file and not on_site:
                    raise NotHere(f"{url} cannot be opened here")
                await self.page.goto(address, wait_until="load")
            case GoBack() if not self.size.touch:
                await self.page.go_back(wait_until="load")
                if self.page.url == "about:blank":
                    await self.page.go_forward(wait_until="load")
                    raise NotHere("there is no page to go back to")
            case _:
                await self._inputs.perform(action)

    async def look(self, expression: str) -> Screen:
        """Return the screen and the expression's value. Raises as ``act`` does."""
        return await self._in_time(
            self._settings.action_timeout, self._look(expression), "a screenshot"
        )

    async def tree(self, selector: str) -> str:
        """Return the accessibility tree of the one element that the selector names.

        It is YAML with boxes (x, y, width, height in pixels). Raises as ``act``.
        """
        snapshot = self.page.locator(selector).aria_snapshot(mode="ai", boxes=True)
        timeout = self._settings.action_timeout
        tree = await self._in_time(timeout, snapshot, "the accessibility tree")
        return _REFERENCE.sub("", str(tree))

    async def rest_pointer(self) -> None:
        """Move the pointer away from the screen, so that nothing is drawn as hovered."""
        moving = self._inputs.move(Point(self.size.view_width - 5, self.size.view_height - 5))
        await self._in_time(self._settings.action_timeout, moving, "the pointer")

    async def close(self) -> None:
        """Close the page, whatever it does.

        A browser in which it cannot be closed takes no more pages.
        """
        self.chromium.open -= 1
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._context.close()
        except Exception:
            self.chromium.retired = True

    def listen(self, files: Files) -> None:
        """Count and refuse what a page must not do; called once."""

        def refuse(kind: str, work: Awaitable[Any]) -> None:
            async def run() -> None:
                with suppress(Exception):
                    await work

            self.refused[kind] += 1
            task = asyncio.ensure_future(run())
            # asyncio itself holds a task by a weak reference only.
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        def count_file(message: Any) -> None:
            if message.text.startswith(NO_FILE):
                self.refused["file"] += 1

        self.page.on("crash", lambda *_: self._crashed.set())
        self.page.on("framenavigated", self._navigated)
        self.page.on("dialog", lambda dialog: refuse("dialog", dialog.dismiss()))
        self.page.on("download", lambda download: refuse("download", download.cancel()))
        self._context.on("page", lambda page: refuse("window", page.close()))
        self.page.on("console", count_file)
        self._files = files

    async def route(self, route: Any) -> None:
        """Answer a request of the page from the files; refuse and count all others."""
        url = route.request.url
        is_file = self._files.serves(url)
        is_here = is_file or self.sites.replays
        # Counted before the answer and after it: while they differ, a file is on its way.
        self._requests += is_here
        # It raises when the page was closed, or is on its way to another one.
        with suppress(Exception):
            if is_file:
                await self._fulfill(route, self._files.find(url))
            else:
                refusal = "file" if url.startswith("file:") else "network"
                if self._files.passes(url):
                    refusal = await self.sites.relay(route, self._files.passes)
                if refusal:
                    self.refused[refusal] += 1
                    await route.abort("blockedbyclient")
        self._answers += is_here

    async def _fulfill(self, route: Any, file: tuple[bytes, str] | None) -> None:
        if file is None:
            await route.fulfill(status=404, body="")
        else:
            content, media_type = file
            await route.fulfill(body=content, content_type=media_type)

    async def _look(self, expression: str) -> Screen:
        clip = {"x": 0, "y": 0, "width": self.size.width, "height": self.size.height, "scale": 1}
        shot = {"format": "png", "optimizeForSpeed": True, "clip": clip}
        for _ in range(MAX_LOOKS):
            answers = self._answers
            capture, value = await asyncio.gather(
                self._ask("Page.captureScreenshot", shot), self._evaluate(expression)
            )
            # No file was on its way when the screenshot began, and none came while it was taken.
            if answers == self._answers == self._requests:
                break
            await asyncio.sleep(RETRY_AFTER_S)
        return Screen(base64.b64decode(capture["data"]), value)

    async def _evaluate(self, expression: str) -> Any:
        answer = await self._ask(
            "Runtime.evaluate",
            {"expression": expression, "returnByValue": True, "awaitPromise": True},
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            message = details.get("exception", {}).get("description") or details.get("text", "")
            first_line = message.splitlines()[0] if message else "it throws"
            raise ValueError(f"{expression[:80]!r}: {first_line}")
        return answer["result"].get("value")

    async def _ask(self, method: str, parameters: Mapping[str, Any]) -> Any:
        """Ask the page, again when it became another one, or was about to.

        Chromium may then give an error, or no answer at all.
        """
        while True:
            question = asyncio.ensure_future(self._cdp.send(method, parameters))
            self._questions.add(question)
            try:
                return await question
            except asyncio.CancelledError:
                # Still in the set: ``_navigated`` did not cancel it, so this task is cancelled.
                if question in self._questions:
                    question.cancel()
                    raise
            except Exception as error:
                navigates = any(words in str(error) for words in NAVIGATION_ERRORS)
                if self._crashed.is_set() or not navigates:
                    raise
            finally:
                self._questions.discard(question)
            await asyncio.sleep(RETRY_AFTER_S)
            await self.page.wait_for_load_state("load")

    def _navigated(self, frame: Any) -> None:
        """Cancel what the page before was asked: ``_ask`` asks the new page again."""
        if frame.parent_frame is None:
            questions = self._questions
            self._questions = set()
            for question in questions:
                question.cancel()

    async def _in_time(self, seconds: float, work: Awaitable[Result], event: str) -> Result:
        """Return what ``work`` gives within ``seconds``.

        Otherwise raises an error that says whose fault it is.
        """
        task = asyncio.ensure_future(work)
        crashed = asyncio.ensure_future(self._crashed.wait())
        try:
            await asyncio.wait(
                {task, crashed}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if task.done():
                error = task.exception()
                if error is None or isinstance(error, ValueError):
                    return task.result()
            elif not self._crashed.is_set():
                raise await self._hanging(seconds, event)
            # The event of a crash comes before or after the error of the call that it broke.
            await asyncio.sleep(0)
            raise self._broken(task.exception() if task.done() else None, event)
        finally:
            crashed.cancel()
            task.cancel()
            # The page is not free before the cancelled work has unwound.
            await asyncio.wait({task})

    def _broken(self, error: BaseException | None, event: str) -> Exception:
        if self._crashed.is_set() and self.chromium.memory_spent:
            return PageTooLarge(
                f"the page filled more than {self._settings.page_memory} MiB (browser.page_memory)"
            )
        if self._crashed.is_set():
            return EnvironmentFailed("the page's process ended", cause=Cause.LOST)
        if not self.chromium.alive:
            return EnvironmentFailed("the browser ended", cause=Cause.LOST)
        reason = self.sites.lost or type(error).__name__
        if str(error) and not self.sites.lost:
            reason = str(error).splitlines()[0]
        return EnvironmentFailed(f"{event} failed: {reason}")

    async def _hanging(self, seconds: float, event: str) -> Exception:
        if not await self.chromium.answers(ANSWER_TIMEOUT_S):
            self.chromium.kill()
            return EnvironmentFailed(
                f"the browser did not answer within {seconds:g} s, and was ended", cause=Cause.HUNG
            )
        with suppress(Exception):
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await self._cdp.send("Runtime.evaluate", {"expression": "1"})
                return EnvironmentFailed(
                    f"{event} took more than {seconds:g} s, and the page answers"
                )
        return PageHangs(f"the page does not answer, {seconds:g} s after {event}")


async def open_tab(chromium: Chromium, settings: BrowserSettings, size: Size, files: Files) -> Tab:
    """Open a context with an empty page, after ``chromium.took_one``.

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
                device_scale_factor=size.scale,
                is_mobile=size.touch,
                has_touch=size.touch,
                user_agent=PHONE_AGENT if size.touch else None,
            )
            page = await context.new_page()
            cdp = await context.new_cdp_session(page)
            # A screenshot of this session would end what Playwright's session emulates.
            metrics: dict[str, Any] = {"width": size.view_width, "height": size.view_height}
            metrics |= {"deviceScaleFactor": size.scale, "mobile": size.touch}
            await cdp.send("Emulation.setDeviceMetricsOverride", metrics)
            sites = Sites(context, settings)
            if sites.script:
                await context.add_init_script(sites.script)
            tab = Tab(chromium, context, page, cdp, settings, size, sites)
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
        reason = f"no answer within {settings.launch_timeout:g} s"
        if str(error):
            reason = str(error).splitlines()[0]
        raise EnvironmentFailed(f"a page could not be opened: {reason}") from error
