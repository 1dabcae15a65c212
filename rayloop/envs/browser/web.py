"""Custom pages: a row names an address and the check of its task, a JavaScript expression."""

from typing import Any, Literal
from urllib.parse import urljoin, urlsplit

from pydantic import Field

from rayloop.config.explain import short
from rayloop.config.settings import LocalPath
from rayloop.core.failures import DataFailure
from rayloop.core.types import Task
from rayloop.envs.browser.page import PageEnvironment, PageSettings
from rayloop.envs.browser.tab import Files, Screen, Size, Tab
from rayloop.rewards.functions import number

HOST = "pages"
"""The host under which a folder's pages are addressed."""
SCREENS = {
    "desktop": Size(800, 600, 800, 600),
    "phone": Size(360, 800, 360, 800, scale=3.0, touch=True),
}
"""The screens of devices; the phone's has 1080x2400 pixels, as AndroidWorld's and MobileGym's."""


class WebPage(PageEnvironment):
    """A row names an ``url``, a ``check`` and, for ``{instruction}``, an ``instruction``.

    ``check`` is a JavaScript expression, evaluated after each turn: true or at least 1 ends the
    episode (``stop``); ``evaluate`` is its last value. It must be a value from the start (write
    ``?.``); where it throws later it is 0.
    """

    NAVIGATES = True

    class Settings(PageSettings):
        """Which pages may be loaded, and how large the screen is."""

        folder: LocalPath | None = None
        """The folder of the pages, addressed as ``http://pages/NAME`` or by name.

        No file outside of it can be loaded.
        """
        sites: tuple[str, ...] = ()
        """Hosts, with their ports if any, whose pages may be loaded by Playwright's driver.

        Name only what a policy may harm.
        """
        device: Literal["desktop", "phone"] = "desktop"
        """What the page is shown on: a desktop with a mouse, or a phone that is touched.

        A phone has the buttons back and home, opens apps by name, and scrolls with a finger; a long
        press opens a menu.
        """
        width: int | None = Field(None, ge=56)
        """Pixels of the page from left to right; fewer cost fewer image tokens.

        None: 800, or a phone's 360.
        """
        height: int | None = Field(None, ge=56)
        """Pixels of the page from top to bottom; fewer cost fewer image tokens.

        None: 600, or a phone's 800.
        """
        scale: float | None = Field(None, gt=0)
        """Pixels of the screenshot for each pixel of the page; fewer cost fewer image tokens.

        None: 1, or a phone's 3.
        """
        settle: float = Field(0.2, ge=0)
        """Seconds between a turn's actions and the screenshot, for late changes.

        Loading pages are waited for in addition.
        """
        stop: bool = True
        """Whether a check that comes true ends the episode.

        False: only the policy's ``finished`` ends it.
        """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._web = settings
        self.SETTLE_S = settings.settle
        usual = SCREENS[settings.device]
        if usual.touch:
            self.SCREEN = "phone"
        width = settings.width or usual.width
        height = settings.height or usual.height
        self.size = Size(width, height, width, height, settings.scale or usual.scale, usual.touch)
        self._url = ""
        self._check = ""
        self._instruction = ""
        self._value = 0.0

    def evaluate(self) -> float:
        """Return the last value of the row's check."""
        return self._value

    def _prepare(self, task: Task) -> None:
        url, check, instruction = (
            task.extra.get(name, "") for name in ("url", "check", "instruction")
        )
        are_texts = all(isinstance(value, str) for value in (url, check, instruction))
        if not are_texts or not url or not check:
            raise DataFailure(
                task.id,
                f"the row needs an `url` and a `check`, texts; they are {url!r} and {check!r}",
            )
        self._url = urljoin(f"http://{HOST}/", url) if self._web.folder else url
        files = self._files()
        parts = urlsplit(self._url)
        allowed = (*files.hosts, *self._web.sites)
        if parts.scheme not in ("http", "https") or parts.netloc not in allowed:
            hosts = ", ".join(allowed) or "no host"
            raise DataFailure(
                task.id, f"{self._url} cannot be loaded: `folder` and `sites` allow {hosts}"
            )
        if files.serves(self._url) and files.find(self._url) is None:
            raise DataFailure(task.id, f"{self._url} is not a file of {self._web.folder}")
        self._check = check
        self._instruction = instruction
        self.STATE = f"(() => {{ try {{ return ({check}) }} catch {{ return 0 }} }})()"
        self.OVER = f"Number({self.STATE}) >= 1" if self._web.stop else "false"

    def _files(self) -> Files:
        hosts = {HOST: self._web.folder} if self._web.folder else {}
        return Files(hosts, frozenset(self._web.sites))

    async def _begin(self, tab: Tab) -> str:
        await tab.load(self._url)
        try:
            _number(await tab.evaluate(self._check))
        except ValueError as error:
            raise DataFailure(
                self._url, f"its check must be true, false or a number from the start: {error}"
            ) from error
        return self._instruction

    def _seen(self, screen: Screen) -> bool:
        try:
            self._value = _number(screen.value)
        except ValueError:
            self._value = 0.0
        return self._web.stop and self._value >= 1


def _number(value: Any) -> float:
    """Return true or false as a number. Raises ValueError for anything but finite numbers."""
    if not isinstance(value, bool | int | float) or number(value) is None:
        raise ValueError(f"it is {short(value)}")
    return float(value)
