"""The base of environments with a page.

The actions of a turn go to the page, and its screenshot comes back.
"""

import dataclasses
import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from rayloop.core.failures import EnvironmentFailed, ToolDeadline
from rayloop.core.protocols import Observation, StepResult
from rayloop.core.types import ImageSource, Task
from rayloop.envs.browser.chromium import CLOSE_TIMEOUT_S
from rayloop.envs.browser.containment import BrowserSettings, available
from rayloop.envs.browser.host import Host, host_of
from rayloop.envs.browser.inputs import NotHere, extra_time
from rayloop.envs.browser.sites import recording_of
from rayloop.envs.browser.tab import Files, PageHangs, PageTooLarge, Screen, Size, Tab
from rayloop.envs.grammar.actions import Action, CallUser, Finish, GoBack, Mark, OpenUrl, Point
from rayloop.envs.grammar.screens import ScreenEnvironment, ScreenSettings
from rayloop.measure.protocol import printed

MAX_TREE_CHARACTERS = 20_000
"""Characters of an accessibility tree; the rest is cut."""
ELEMENTS = (Path(__file__).parent / "elements.js").read_text(encoding="utf-8")


class PageSettings(ScreenSettings):
    """Settings of the browser environments."""

    browser: BrowserSettings = BrowserSettings()
    """The Chromium of the environment actor: how it is confined, its pages and its deadlines."""
    observe: tuple[Literal["screenshot", "tree", "elements"], ...] = Field(
        ("screenshot",), min_length=1
    )
    """What the policy sees after each turn: screenshot, tree, elements, or several of them.

    ``tree`` is the accessibility tree with boxes (hundreds of tokens). ``elements`` are numbered
    lines of what can be acted upon, for languages whose actions name a number, as AndroidWorld's.
    """


class PageEnvironment(ScreenEnvironment):
    """An environment with a page; subclasses have ``_prepare``, ``_files``, ``_begin``, ``_seen``.

    The text ``{instruction}`` of the row becomes the page's.
    """

    STATE = "null"
    """A JavaScript expression, asked with each screenshot: ``_seen`` gets its value."""
    OVER = "false"
    """A JavaScript expression: after it is true no further action of a turn is carried out."""

    NAVIGATES = False
    """Whether a policy may go back and to other pages."""
    SETTLE_S = 0.0
    """Seconds between a turn's actions and the screenshot, which itself takes two frames."""
    TREE = "body"
    """A CSS selector of the element whose accessibility tree is shown."""

    def __init__(self, settings: PageSettings) -> None:
        super().__init__(settings)
        self._settings = settings
        self._tab: Tab | None = None
        self._host: Host | None = None
        self._elements: dict[str, Point] = {}
        # Whether the last call of the page succeeded.
        self._sound = False

    @classmethod
    def preflight(cls, settings: PageSettings) -> str:
        """Describe how Chromium is confined on this machine, for the run's header.

        Raises ConfigError for a ``browser.replay`` that is not a recording.
        """
        if settings.browser.replay is not None:
            recording_of(settings.browser)
        program = settings.browser.program
        if shutil.which(program) is None:
            return f"nothing yet: {program} is not on this machine"
        return f"{available()} (Chromium)"

    @classmethod
    def protocol_parts(cls, settings: PageSettings) -> dict[str, Any]:
        """Return what the pixels of a page depend on besides its settings: browser and fonts."""
        fonts = sorted(printed("fc-list", "--format", "%{family} %{style} %{fontversion}\n"))
        digest = hashlib.sha256("\n".join(fonts).encode()).hexdigest()[:16]
        version = " ".join(printed(settings.browser.program, "--version"))
        return {
            "browser": {
                "version": version.strip() or "unknown",
                "fonts": f"{len(fonts)} fonts, {digest}",
            }
        }

    def reset(self, task: Task) -> Observation:
        """Load the row's page.

        Raises DataFailure for a row that names no page, EnvironmentFailed for all other errors.
        """
        self._prepare(task)
        host = host_of(self._settings.browser)
        self._host = host
        tab = self._open(host)
        self._tab = tab
        timeout = 2 * self._settings.browser.load_timeout
        instruction, screen, texts = host.run(self._start(tab), timeout)
        self._seen(screen)
        self._sound = True
        return self._first(task, instruction, *self._parts(screen, texts))

    def screen_size(self) -> tuple[int, int]:
        """Return the size of the page's window."""
        size = self.size
        return round(size.width * size.scale), round(size.height * size.scale)

    def _carry_out(self, actions: Sequence[Action]) -> StepResult:
        """Carry out a turn's actions, up to the one that ends the episode.

        Raises ValueError, in words for the policy, for what the page lacks; ToolDeadline when what
        the policy did makes the page hang or fill the memory.
        """
        on_page: list[Action] = []
        ends = False
        for action in actions:
            if isinstance(action, Finish | CallUser):
                ends = True
                break
            if isinstance(action, GoBack | OpenUrl) and not self.NAVIGATES:
                raise NotHere("this episode stays on its page")
            on_page += self.basic(action)
        assert self._tab is not None
        assert self._host is not None

        # It stays False when the call raises: such a page is closed, and never parked.
        self._sound = False
        try:
            # The deadlines of the page come first.
            pauses = self.SETTLE_S + sum(map(extra_time, on_page))
            timeout = 2 * self._settings.browser.action_timeout + pauses
            screen, texts = self._host.run(self._act(self._tab, on_page), timeout)
        except NotHere:
            self._sound = True
            raise
        except (PageHangs, PageTooLarge) as error:
            raise ToolDeadline(str(error)) from error
        is_over = self._seen(screen)
        self._sound = True
        return StepResult(
            self._shown(*self._parts(screen, texts)),
            done=is_over or ends,
            info={
                "refused": dict(self._tab.refused),
                "unrecorded": list(self._tab.sites.missing),
            },
        )

    def evaluate(self) -> float | None:
        """Return the episode's result."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the page, or park it for the next episode."""
        tab = self._tab
        self._tab = None
        if tab is not None and self._host is not None:
            self._release(self._host, tab)

    size: Size
    """The size of the screen."""

    def _prepare(self, task: Task) -> None:
        """Read the row, and set ``size``. Raises DataFailure."""
        raise NotImplementedError

    def _files(self) -> Files:
        """Return what the page may load."""
        raise NotImplementedError

    async def _begin(self, tab: Tab) -> str:
        """Load the page and start its episode; returns the instruction."""
        raise NotImplementedError

    def _seen(self, screen: Screen) -> bool:
        """Take in the value of ``STATE``; returns whether the episode is over."""
        raise NotImplementedError

    def _open(self, host: Host) -> Tab:
        timeout = 3 * self._settings.browser.launch_timeout
        return host.run(host.open(self.size, self._files()), timeout)

    def _release(self, host: Host, tab: Tab) -> None:
        host.run(host.close_tab(tab), 3 * CLOSE_TIMEOUT_S)

    async def _start(self, tab: Tab) -> tuple[str, Screen, dict[str, str]]:
        """Return instruction, screen and texts.

        A page that hangs or is too large before the policy acts is not the policy's fault.
        """
        try:
            instruction = await self._begin(tab)
            return instruction, await tab.look(self.STATE), await self._text(tab)
        except (PageHangs, PageTooLarge, ValueError) as error:
            raise EnvironmentFailed(f"the page could not be started: {error}") from error

    async def _act(self, tab: Tab, actions: Sequence[Action]) -> tuple[Screen, dict[str, str]]:
        screen = await tab.act(actions, self.STATE, self.OVER, self.SETTLE_S)
        return screen, await self._text(tab)

    def basic(self, action: Action) -> tuple[Action, ...]:
        """As ``ScreenEnvironment.basic``; a number stands for the middle of its element."""
        placed: Any = action
        place = getattr(action, "at", None)
        if isinstance(place, Mark) and place.name in self._elements:
            placed = dataclasses.replace(placed, at=self._elements[place.name])
        return super().basic(placed)

    async def _text(self, tab: Tab) -> dict[str, str]:
        """Return the texts about the screen, by their names in ``observe``."""
        texts: dict[str, str] = {}
        if "tree" in self._settings.observe:
            texts["tree"] = (await tab.tree(self.TREE))[:MAX_TREE_CHARACTERS]
        if "elements" in self._settings.observe:
            texts["elements"] = self._numbered(await tab.evaluate(ELEMENTS))
        return texts

    def _numbered(self, elements: Sequence[tuple[float, float, str, str]]) -> str:
        """Return a line for each element, and keep their places in the model's unit."""
        columns, rows = self._settings.pointing.size(*self.screen_size())
        self._elements = {}
        lines = []
        for number, (x, y, tag, text) in enumerate(elements):
            place = Point(x * columns / self.size.width, y * rows / self.size.height)
            self._elements[str(number)] = place
            lines.append(f"{number}: {tag} {text!r}")
        return "\n".join(lines)

    def _parts(self, screen: Screen, texts: dict[str, str]) -> tuple[str | ImageSource, ...]:
        parts: dict[str, str | ImageSource] = {
            "screenshot": ImageSource(data=screen.png),
            **texts,
        }
        return tuple(parts[name] for name in self._settings.observe)
