"""The desktop as an environment, with a new desktop for each episode.

The policy sees screenshots and answers with UI-TARS actions; the files give the result.
"""

import time
from collections.abc import Mapping, Sequence

from pydantic import Field

from rayloop.config.settings import local_path
from rayloop.core.failures import DataFailure
from rayloop.core.protocols import Observation, StepResult
from rayloop.core.types import ImageSource, Task
from rayloop.envs.desktop.session import (
    Desktop,
    DesktopLimits,
    DesktopLost,
    DesktopSpoiled,
    missing,
)
from rayloop.envs.desktop.tasks import SHIPPED, DesktopTask, StartFile, TaskFile, score, task_file
from rayloop.envs.grammar.actions import (
    Action,
    CallUser,
    Click,
    Drag,
    Finish,
    HoldKey,
    Hotkey,
    Hover,
    MouseButton,
    Point,
    Scroll,
    Sleep,
    Type,
)
from rayloop.envs.grammar.basic import CHARACTER_TIMEOUT_S, notches
from rayloop.envs.grammar.screens import ScreenEnvironment, ScreenSettings
from rayloop.sandbox import bubblewrap


class DesktopTasks(ScreenEnvironment):
    """A task of a file (``tasks``) on a local X desktop without network.

    The row names the task in its column ``desktop``, and its text ``{instruction}`` becomes the
    task's. A desktop that dies is a failure of infrastructure; one that the policy's programs broke
    ends the episode as ``action_error`` with the result 0.
    """

    class Settings(ScreenSettings):
        """Which tasks, how large a desktop is, and how long it is waited for."""

        tasks: str = ""
        """A YAML or JSON file of desktop tasks; empty for the shipped ones.

        The folders of their start files are in the same folder.
        """
        limits: DesktopLimits = DesktopLimits()
        """Screen size, memory, processes and deadlines of a desktop (docs/environments.md)."""
        pause: float = Field(0.1, ge=0)
        """Seconds after each action, so that programs can follow.

        Raise it on machines where they react late.
        """
        react: float = Field(0.5, ge=0)
        """Seconds at most, after a turn's actions, until the screen differs from before.

        Raise it on busy machines.
        """
        settle: float = Field(2.0, ge=0)
        """Seconds at most until two looks at the screen are equal.

        Raise it for programs that draw for longer.
        """
        wait: float = Field(1.0, ge=0)
        """Seconds of the action wait; UI-TARS means five, and local programs need less."""
        type_delay: float = Field(0.001, ge=0)
        """Seconds after each typed character.

        Raise it for programs that lose characters; none that was tried does.
        """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._settings = settings
        self._desktop: Desktop | None = None
        self._task: DesktopTask | None = None
        self._start: Mapping[str, StartFile] = {}
        self._spoiled = False

    @staticmethod
    def preflight(settings: Settings) -> str:
        """Say how desktops are confined on this machine, or why they cannot start here."""
        reason = missing() or bubblewrap.refused_here()
        if reason:
            return f"nothing yet: desktops cannot be started here ({reason})"
        return "namespaces without network, refused calls of administrators (desktops)"

    def reset(self, task: Task) -> Observation:
        """Start a desktop with the task's files and programs.

        Raises DataFailure for a task that does not exist or cannot start, DesktopLost.
        """
        settings = self._settings
        self._task, self._start = self._find(task)
        desktop = Desktop(settings.limits)
        self._desktop = desktop
        for path, file in self._start.items():
            desktop.put(path, file.content, file.executable)
        try:
            for program in self._task.open:
                desktop.launch(program)
            screen = self._look(0)
        except DesktopSpoiled as error:
            raise DesktopLost(f"before the policy did anything: {error}") from error
        return self._first(task, self._task.instruction, screen)

    def screen_size(self) -> tuple[int, int]:
        """Return width and height, as the settings say."""
        return self._settings.limits.width, self._settings.limits.height

    def _carry_out(self, actions: Sequence[Action]) -> StepResult:
        """Carry out a turn's actions, and take a screenshot.

        An impossible action is an error, with a screenshot when others came before it. A desktop
        that was broken from inside ends the episode.
        """
        try:
            for number, action in enumerate(actions):
                if isinstance(action, Finish | CallUser):
                    return StepResult(self._shown(self._look(0)), done=True)
                try:
                    for part in self.basic(action):
                        self._act(part)
                except ValueError as error:
                    screens = [self._look(0)] if number else []
                    return self._refused(str(error), *screens)
                time.sleep(self._settings.pause)
            return StepResult(self._shown(self._look(self._settings.react)))
        except DesktopSpoiled as error:
            self._spoiled = True
            return StepResult(done=True, error=f"the desktop was broken from inside: {error}")

    def evaluate(self) -> float:
        """Return 1 when all checks hold, else 0 or, if the task says so, their share.

        A broken desktop gives 0. Raises DesktopLost.
        """
        assert self._task is not None
        assert self._desktop is not None
        try:
            # Programs may still be writing: this waits until the screen is still.
            self._look(0)
        except DesktopSpoiled:
            self._spoiled = True
        if self._spoiled:
            return 0.0
        start = {path: file.content for path, file in self._start.items()}
        return score(self._task.checks, self._desktop.home(), start, self._task.partial)

    def close(self) -> None:
        """End the desktop."""
        if self._desktop is not None:
            self._desktop.close()

    def _act(self, action: Action) -> None:
        """Carry out a basic action.

        Raises ValueError for one that a desktop cannot do, for the policy; DesktopLost.
        """
        assert self._desktop is not None
        ask = self._desktop.ask
        match action:
            case Click(Point(x, y), button, times):
                ask("click", x=int(x), y=int(y), button=button, count=times)
            case Hover(Point(x, y)):
                ask("move", x=int(x), y=int(y))
            case Drag(Point(x, y), end):
                ask("drag", x=int(x), y=int(y), to_x=int(end.x), to_y=int(end.y))
            case Scroll(direction, at):
                if isinstance(at, Point):
                    ask("move", x=int(at.x), y=int(at.y))
                ticks = notches(action, *self.screen_size())
                ask("scroll", direction=direction, ticks=round(ticks))
            case MouseButton(down):
                ask("button", down=down)
            case Hotkey(keys):
                ask("press", keys=list(keys))
            case HoldKey(key, down):
                ask("hold", key=key, down=down)
            case Type(text):
                self._desktop.type(text, self._settings.type_delay, CHARACTER_TIMEOUT_S)
            case Sleep(seconds):
                time.sleep(self._settings.wait if seconds is None else seconds)
            case other:
                raise ValueError(f"a desktop has no {type(other).__name__}")

    def _look(self, react: float) -> ImageSource:
        assert self._desktop is not None
        return ImageSource(data=self._desktop.screenshot(react, self._settings.settle))

    def _find(self, task: Task) -> tuple[DesktopTask, Mapping[str, StartFile]]:
        """Return the row's task and its start files. Raises DataFailure."""
        path = local_path(self._settings.tasks) if self._settings.tasks else SHIPPED
        name = task.extra.get("desktop")
        try:
            tasks: TaskFile = task_file(path)
            if name not in tasks.tasks:
                examples = ", ".join(list(tasks.tasks)[:5])
                raise ValueError(
                    f"the row's `desktop` is {name!r}, no task of {path} ({examples}, ...)"
                )
            return tasks.tasks[name], tasks.start(tasks.tasks[name])
        except (OSError, ValueError) as error:
            raise DataFailure(task.id, str(error)) from error
