"""MiniWoB++: 130 small pages and 3 flight pages, each with its reward.

Liu et al. 2018; the html is in the package miniwob.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any, Literal

from rayloop.core.failures import DataFailure, EnvironmentFailed
from rayloop.core.types import Task
from rayloop.envs.browser.chromium import CLOSE_TIMEOUT_S
from rayloop.envs.browser.host import Host
from rayloop.envs.browser.page import PageEnvironment, PageSettings
from rayloop.envs.browser.tab import Files, Screen, Size, Tab

FLIGHTS = ("AA", "Alaska", "Alaska-auto")
"""Pages of another size, with a site in a frame."""
SMALL = Size(160, 210, 500, 320)
LARGE = Size(375, 667, 700, 760)
HOST = "miniwob"
START = (Path(__file__).parent / "miniwob.js").read_text(encoding="utf-8")


class MiniWob(PageEnvironment):
    """A row names a ``page`` (``pages()``) and a ``seed``; the page says when the episode is over.

    ``evaluate`` is the page's raw reward, -1 to 1, without its penalty for time; 0 until the page
    is over. ``find-greatest``, ``guess-number``, ``hot-cold``, ``moving-items``, ``simon-says`` and
    ``terminal`` have one first screen for all seeds, since the differences are hidden at first. The
    first screen of ``chase-circle``, ``click-dialog`` and ``stock-market`` is not the same for a
    seed, even when they are loaded again, so the members of a group see different ones.
    """

    STATE = "[WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL]"
    OVER = "WOB_DONE_GLOBAL"
    TREE = "#wrap"

    class Settings(PageSettings):
        """How pages are loaded and scored."""

        reload: bool = True
        """Whether each episode loads its page again, so that equal seeds look equal.

        False: ten times as fast, 15 pages differ.
        """
        mode: Literal["train", "test", "default"] = "train"
        """Which of the page's sets of problems is drawn from.

        Take ``test`` for evaluation, where a page has one.
        """
        success_at: float | None = None
        """A page's reward of at least this is 1, and any other 0; None: as it is.

        Set it to 1 for pages with partial rewards.
        """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._miniwob = settings
        self._page = ""
        self._seed = ""
        self._over = False
        self._reward = 0.0

    def evaluate(self) -> float:
        """Return the page's reward, or whether it reached ``success_at``."""
        reward = self._reward if self._over else 0.0
        threshold = self._miniwob.success_at
        return reward if threshold is None else float(reward >= threshold)

    def _prepare(self, task: Task) -> None:
        page = task.extra.get("page")
        seed = task.extra.get("seed")
        if not isinstance(page, str) or page not in pages():
            examples = ", ".join(pages()[:5])
            raise DataFailure(
                task.id, f"the row's `page` is {page!r}, no page of MiniWoB++ ({examples}, ...)"
            )
        if seed is None or isinstance(seed, list | dict | float):
            raise DataFailure(
                task.id, f"the row's `seed` is {seed!r}; a number or a text is needed"
            )
        self._page = page
        self._seed = str(seed)
        self.size = LARGE if page in FLIGHTS else SMALL

    def _files(self) -> Files:
        return Files({HOST: str(html())})

    async def _begin(self, tab: Tab) -> str:
        await tab.rest_pointer()
        if tab.address != address(self._page) or self._miniwob.reload:
            await tab.load(address(self._page))
        arguments = json.dumps([self._seed, self._miniwob.mode])
        return str(await tab.evaluate(f"({START})({arguments})"))

    def _open(self, host: Host) -> Tab:
        tab = None
        if not self._miniwob.reload:
            parked = host.parked(address(self._page), self.size)
            tab = host.run(parked, 3 * CLOSE_TIMEOUT_S)
        return tab or super()._open(host)

    def _release(self, host: Host, tab: Tab) -> None:
        if self._sound and not self._miniwob.reload:
            host.run(host.park(tab), 3 * CLOSE_TIMEOUT_S)
        else:
            super()._release(host, tab)

    def _seen(self, screen: Screen) -> bool:
        value: Any = screen.value
        if not (isinstance(value, list) and len(value) == 2):
            raise EnvironmentFailed(f"{self._page} left its page: its state is {value!r}")
        self._over = bool(value[0])
        self._reward = float(value[1])
        return self._over


def html() -> Path:
    """Return the folder of the pages. Raises EnvironmentFailed without the package."""
    # An import would need gymnasium and selenium.
    spec = importlib.util.find_spec("miniwob")
    if spec is None or spec.origin is None:
        raise EnvironmentFailed(
            'miniwob is not installed: pip install "rayloop[browser]"', bug=True
        )
    return Path(spec.origin).parent / "html"


def pages() -> tuple[str, ...]:
    """Return all names, sorted, the flight pages last."""
    small_pages = sorted(file.stem for file in (html() / "miniwob").glob("*.html"))
    return (*small_pages, *FLIGHTS)


def address(page: str) -> str:
    """Return the address at which the page is served."""
    if page in FLIGHTS:
        return f"http://{HOST}/flight/{page}/wrapper.html"
    return f"http://{HOST}/miniwob/{page}.html"
