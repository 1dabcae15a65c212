"""The base of environments with a page: a turn in the UI-TARS grammar goes to the page, and its
screen comes back.
"""

import shutil
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from rayloop.core.failures import EnvironmentFailed, ToolDeadline
from rayloop.core.protocols import Observation, StepResult
from rayloop.core.types import ImageSource, Task
from rayloop.envs.browser.chromium import CLOSING
from rayloop.envs.browser.containment import BrowserSettings, available
from rayloop.envs.browser.host import Host, host_of
from rayloop.envs.browser.inputs import NotHere, pause
from rayloop.envs.browser.tab import Files, PageHangs, PageTooLarge, Screen, Size, Tab
from rayloop.envs.grammar.actions import Action, CallUser, Finish
from rayloop.envs.grammar.screens import ScreenEnvironment, ScreenSettings

LONGEST_TREE = 20_000
"""Characters of an accessibility tree; the rest is cut."""


class PageSettings(ScreenSettings):
    """Settings of the browser environments."""

    browser: BrowserSettings = BrowserSettings()
    """The Chromium of the environment actor: how it is confined, how many pages it has, how long
    things may take.
    """
    observe: tuple[Literal["screenshot", "tree"], ...] = Field(("screenshot",), min_length=1)
    """What the policy sees after each turn: the screen, the accessibility tree with boxes (hundreds
    of tokens), or both.
    """


class PageEnvironment(ScreenEnvironment):
    """Derive from it: ``_prepare``, ``_files``, ``_begin``, ``_seen``.

    The text ``{instruction}`` of the row becomes the page's.
    """

    STATE = "null"
    """A JavaScript expression, asked with each screenshot: what ``_seen`` is given."""
    OVER = "false"
    """A JavaScript expression: after it is true no further action of a turn is carried out."""

    SETTLE = 0.0
    """Seconds between a turn's actions and the screenshot, beside the two frames that it takes
    anyway.
    """
    TREE = "body"
    """A CSS selector: of which element the accessibility tree is."""

    def __init__(self, settings: PageSettings) -> None:
        super().__init__(settings)
        self._settings = settings
        self._tab: Tab | None = None
        self._host: Host | None = None
        self._sound = False
        """Whether the last call of the page succeeded."""

    @classmethod
    def preflight(cls, settings: PageSettings) -> str:
        """How Chromium is confined on this machine, for the run's header."""
        program = settings.browser.program
        return (
            f"{available()} (Chromium)"
            if shutil.which(program)
            else f"nothing yet: {program} is not on this machine"
        )

    def reset(self, task: Task) -> Observation:
        """Raises DataFailure for a row that names no page, EnvironmentFailed for all that goes
        wrong.
        """
        self._prepare(task)
        host = self._host = host_of(self._settings.browser)
        tab = self._tab = self._open(host)
        instruction, screen, tree = host.run(
            self._start(tab), 2 * self._settings.browser.load_timeout
        )
        self._seen(screen)
        self._sound = True
        return self._first(task, instruction, *self._parts(screen, tree))

    def screen_size(self) -> tuple[int, int]:
        """Of the page's window."""
        return self.size.width, self.size.height

    def _carry_out(self, actions: Sequence[Action]) -> StepResult:
        """Raises NotHere; ToolDeadline when what the policy did makes the page hang or fill the
        memory.
        """
        placed: list[Action] = []
        for action in actions:
            if isinstance(action, Finish | CallUser):
                break
            placed.append(self._settings.pointing.on(action, self.size.width, self.size.height))
        assert self._tab is not None
        assert self._host is not None

        # It stays False when the call raises: such a page is closed, and never parked.
        self._sound = False
        try:
            longest = (
                2 * self._settings.browser.action_timeout + self.SETTLE + sum(map(pause, placed))
            )  # the page's own deadlines
            screen, tree = self._host.run(self._act(self._tab, placed), longest)
        except NotHere:
            self._sound = True
            raise
        except (PageHangs, PageTooLarge) as error:
            raise ToolDeadline(str(error)) from error
        over = self._seen(screen)
        self._sound = True
        info = {"refused": dict(self._tab.refused)}
        return StepResult(
            self._shown(*self._parts(screen, tree)),
            done=over or len(placed) < len(actions),
            info=info,
        )

    def evaluate(self) -> float | None:
        """The episode's result."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the page, or park it for the next episode."""
        tab, self._tab = self._tab, None
        if tab is not None and self._host is not None:
            self._release(self._host, tab)

    size: Size
    """Of the screen."""

    def _prepare(self, task: Task) -> None:
        """What the row says; sets ``size``. Raises DataFailure."""
        raise NotImplementedError

    def _files(self) -> Files:
        """What the page may load."""
        raise NotImplementedError

    async def _begin(self, tab: Tab) -> str:
        """Load the page and start its episode; the instruction."""
        raise NotImplementedError

    def _seen(self, screen: Screen) -> bool:
        """Take in the value of ``STATE``; whether the episode is over."""
        raise NotImplementedError

    def _open(self, host: Host) -> Tab:
        return host.run(
            host.open(self.size, self._files()), 3 * self._settings.browser.launch_timeout
        )

    def _release(self, host: Host, tab: Tab) -> None:
        host.run(host.close_tab(tab), 3 * CLOSING)

    async def _start(self, tab: Tab) -> tuple[str, Screen, str]:
        """Instruction, screen and tree.

        What hangs or is too large before the policy acted is no doing of its own.
        """
        try:
            instruction = await self._begin(tab)
            return instruction, await tab.look(self.STATE), await self._tree(tab)
        except (PageHangs, PageTooLarge, ValueError) as error:
            raise EnvironmentFailed(f"the page could not be started: {error}") from error

    async def _act(self, tab: Tab, actions: Sequence[Action]) -> tuple[Screen, str]:
        return await tab.act(actions, self.STATE, self.OVER, self.SETTLE), await self._tree(tab)

    async def _tree(self, tab: Tab) -> str:
        return (
            (await tab.tree(self.TREE))[:LONGEST_TREE] if "tree" in self._settings.observe else ""
        )

    def _parts(self, screen: Screen, tree: str) -> tuple[str | ImageSource, ...]:
        shown: dict[str, str | ImageSource] = {
            "screenshot": ImageSource(data=screen.png),
            "tree": tree,
        }
        return tuple(shown[name] for name in self._settings.observe)
