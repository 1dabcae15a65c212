"""What real sites answer to a page: by the network, recorded on the way, or from a recording.

Only Playwright's driver reaches the network; with ``browser.replay`` nothing does.
"""

import functools
import json
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

from rayloop.config.settings import local_path
from rayloop.envs.browser.containment import BrowserSettings
from rayloop.envs.browser.recording import Key, Recording, SiteAnswer

logger = logging.getLogger(__name__)

MAX_REDIRECTIONS = 5
"""Redirections of a request, at most."""
_FROZEN = (Path(__file__).parent / "frozen.js").read_text(encoding="utf-8")


@functools.cache
def recording(folder: str, writes: bool) -> Recording:
    """Return the recording of a folder, read once per process. Raises ConfigError."""
    return Recording(local_path(folder), writes=writes)


def recording_of(settings: BrowserSettings) -> Recording | None:
    """Return the recording that the settings name, if any. Raises ConfigError."""
    folder = settings.record or settings.replay
    return recording(folder, settings.record is not None) if folder else None


class Sites:
    """The sites as one page sees them.

    ``replays``: whether all answers are from a recording. ``missing``: the addresses that it lacks;
    ``lost``: a sentence about the one that the page itself was to become, and did not.
    """

    def __init__(self, context: Any, settings: BrowserSettings) -> None:
        self._context = context
        self._timeout_ms = settings.load_timeout * 1000
        self._recording = recording_of(settings)
        self.replays = settings.replay is not None
        self._seen: Counter[Key] = Counter()
        self.missing: dict[str, None] = {}
        self.lost = ""

    @property
    def script(self) -> str:
        """What runs before each page's scripts: its clock rests at the recording's moment."""
        if self._recording is None:
            return ""
        return f"{_FROZEN.rstrip()}({self._recording.moment * 1000})"

    def has(self, url: str) -> bool:
        """Return whether a page at the address may be asked for."""
        if self._recording is None or not self.replays:
            return True
        request = self._recording.request("GET", url, b"", "")
        return self._recording.find(request, Counter()) is not None

    async def relay(self, route: Any, passes: Callable[[str], bool]) -> str:
        """Answer a request with the site's answer; redirections stay where ``passes`` is true.

        Returns why there is no answer, "" when it was given.
        """
        request = route.request
        url: str = request.url
        method: str = request.method
        sent: bytes = request.post_data_buffer or b""
        is_page = request.resource_type == "document"
        cookies: list[str] = []
        options: dict[str, str] = {}
        for _ in range(MAX_REDIRECTIONS):
            answer = await self._answer(route, method, url, sent, options)
            if answer is None:
                is_whole_page = is_page and request.frame.parent_frame is None
                self._miss(url, is_whole_page)
                if is_whole_page:
                    # No content: the browser stays on its page.
                    await route.fulfill(status=204)
                return "unrecorded"
            # A redirection may set cookies too.
            cookies += answer.headers.get("set-cookie", "").splitlines()
            set_cookies = {"set-cookie": "\n".join(cookies)} if cookies else {}
            location = answer.headers.get("location") if 300 <= answer.status < 400 else None
            if location is None:
                headers = {**answer.headers, **set_cookies}
                await route.fulfill(status=answer.status, headers=headers, body=answer.body)
                return ""
            url = urljoin(url, location)
            if not passes(url):
                break
            # The page itself is sent on, so that it knows its address.
            if is_page:
                # An address with "</script>" would end the script that it is written into.
                target = json.dumps(url).replace("<", "\\u003c")
                headers = {"content-type": "text/html", **set_cookies}
                body = f"<script>location.replace({target})</script>"
                await route.fulfill(headers=headers, body=body)
                return ""
            method = "GET"
            sent = b""
            options = {"url": url, "method": method}
        return "network"

    async def _answer(
        self, route: Any, method: str, url: str, sent: bytes, options: dict[str, str]
    ) -> SiteAnswer | None:
        if self._recording is None:
            return await self._fetched(route, options)
        jar = await self._context.cookies(url)
        cookies = sorted(f"{cookie['name']}={cookie['value']}" for cookie in jar)
        request = self._recording.request(method, url, sent, "; ".join(cookies))
        if self.replays:
            return self._recording.find(request, self._seen)
        answer = await self._fetched(route, options)
        if not self._recording.keep(request, answer, self._seen):
            logger.warning("%s is too large to be recorded", url)
        return answer

    async def _fetched(self, route: Any, options: dict[str, str]) -> SiteAnswer:
        answer = await route.fetch(max_redirects=0, timeout=self._timeout_ms, **options)
        return SiteAnswer(answer.status, answer.headers, await answer.body())

    def _miss(self, url: str, is_whole_page: bool) -> None:
        assert self._recording is not None
        sentence = f"{url} is not in the recording {self._recording.folder}"
        if url not in self.missing:
            logger.warning("%s", sentence)
        self.missing[url] = None
        if is_whole_page:
            self.lost = sentence
