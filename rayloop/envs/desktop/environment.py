"""The desktop as an environment: a new desktop for each episode, UI-TARS actions, screenshots, a result from the files."""

from __future__ import annotations

import time
from collections.abc import Mapping

from pydantic import Field

from rayloop.config.settings import local_path
from rayloop.core.failures import DataFailure
from rayloop.core.protocols import Observation, StepResult
from rayloop.core.types import ImageSource, Message, Task
from rayloop.envs.desktop.checks import score
from rayloop.envs.desktop.hands import Hands
from rayloop.envs.desktop.session import Desktop, DesktopLost, DesktopSpoiled, missing
from rayloop.envs.desktop.settings import DesktopLimits
from rayloop.envs.desktop.tasks import SHIPPED, DesktopTask, StartFile, TaskFile, task_file
from rayloop.envs.grammar.actions import CallUser, Finished, Mistake
from rayloop.envs.grammar.scanner import read
from rayloop.envs.grammar.screens import ScreenSettings, first
from rayloop.sandbox import bubblewrap


class DesktopTasks:
    """A task of a file (``tasks``), which the row names in its column ``desktop``, on a local X desktop without network.

    The messages are those of the row, in which the text ``{instruction}`` becomes the task's; a screenshot follows them, and
    each turn. Actions are those of UI-TARS. When the X server or the whole desktop dies, infrastructure has failed; programs that
    the policy started and that break its desktop end the episode as ``action_error``, with the result 0.
    """

    class Settings(ScreenSettings):
        tasks: str = ""
        """A YAML or JSON file of desktop tasks with the folders of their start files beside it; empty for the shipped ones."""
        limits: DesktopLimits = DesktopLimits()
        """Size of the screen, memory, processes and deadlines of each desktop (docs/environments.md)."""
        pause: float = Field(0.1, ge=0)
        """Seconds after each action, so that programs can follow. Raise it on machines where they react late."""
        react: float = Field(0.5, ge=0)
        """Seconds at most, after a turn's actions, until the screen differs from before. Raise it on busy machines."""
        settle: float = Field(2.0, ge=0)
        """Seconds at most until two looks at the screen are equal. Raise it for programs that draw for longer."""
        wait: float = Field(1.0, ge=0)
        """Seconds of the action wait; UI-TARS means five, and local programs need less."""
        type_delay: float = Field(0.001, ge=0)
        """Seconds after each typed character. Raise it for programs that lose characters; none that was tried does."""

    def __init__(self, settings: DesktopTasks.Settings) -> None:
        self._settings = settings
        self._desktop: Desktop | None = None
        self._task: DesktopTask | None = None
        self._start: Mapping[str, StartFile] = {}
        self._spoiled = False

    @staticmethod
    def preflight(settings: DesktopTasks.Settings) -> str:
        """What holds desktops in on this machine, for the run's header; or why none can be started, as other nodes may have it."""
        if lacks := missing() or bubblewrap.refused_here():
            return f"nothing yet: desktops cannot be started here ({lacks})"
        return "namespaces without network, refused calls of administrators (desktops)"

    def reset(self, task: Task) -> Observation:
        """Raises DataFailure for a task that does not exist or cannot start, DesktopLost."""
        settings = self._settings
        self._task, self._start = self._find(task)
        desktop = self._desktop = Desktop(settings.limits)
        size = (settings.limits.width, settings.limits.height)
        self._hands = Hands(desktop, settings.pointing, size, settings.wait, settings.type_delay)
        for path, file in self._start.items():
            desktop.put(path, file.content, file.executable)
        try:
            for program in self._task.open:
                desktop.launch(program)
            screen = self._look(0)
        except DesktopSpoiled as error:
            raise DesktopLost(f"before the policy did anything: {error}") from error
        return first(task, self._task.instruction, screen)

    def step(self, text: str) -> StepResult:
        """What cannot be read or done is an error that the policy sees; with a screenshot when something was done before.

        A desktop that its programs broke ends the episode, with an error too.
        """
        try:
            return self._step(text)
        except DesktopSpoiled as error:
            self._spoiled = True
            return StepResult(done=True, error=f"the desktop was broken from inside: {error}")

    def _step(self, text: str) -> StepResult:
        turn = read(text)
        if isinstance(turn, Mistake):
            return self._refused(str(turn))
        if len(turn.actions) > self._settings.max_actions:
            return self._refused(f"{len(turn.actions)} actions in one turn, {self._settings.max_actions} are allowed")
        for number, action in enumerate(turn.actions):
            if isinstance(action, Finished | CallUser):
                return StepResult(self._shown(self._look(0)), done=True)
            try:
                self._hands.carry_out(action)
            except ValueError as error:
                return self._refused(str(error), *([self._look(0)] if number else ()))
            time.sleep(self._settings.pause)
        return StepResult(self._shown(self._look(self._settings.react)))

    def evaluate(self) -> float:
        """1 when all checks hold, else 0 (or the share of them, if the task says so); 0 for a desktop that its programs broke.

        Raises DesktopLost.
        """
        assert self._task is not None
        assert self._desktop is not None
        try:
            self._look(0)  # programs may still be writing
        except DesktopSpoiled:
            self._spoiled = True
        if self._spoiled:
            return 0.0
        start = {path: file.content for path, file in self._start.items()}
        return score(self._task.checks, self._desktop.tell(), start, self._task.partial)

    def close(self) -> None:
        if self._desktop is not None:
            self._desktop.close()

    def _look(self, react: float) -> ImageSource:
        assert self._desktop is not None
        return ImageSource(data=self._desktop.screenshot(react, self._settings.settle))

    def _shown(self, *parts: str | ImageSource) -> Observation:
        return Observation((Message(self._settings.role, parts),))

    def _refused(self, why: str, *seen: ImageSource) -> StepResult:
        return StepResult(self._shown(f"Error: {why}", *seen), error=why)

    def _find(self, task: Task) -> tuple[DesktopTask, Mapping[str, StartFile]]:
        """Raises DataFailure."""
        path = local_path(self._settings.tasks) if self._settings.tasks else SHIPPED
        name = task.extra.get("desktop")
        try:
            tasks: TaskFile = task_file(path)
            if name not in tasks.tasks:
                known = ", ".join(list(tasks.tasks)[:5])
                raise ValueError(f"the row's `desktop` is {name!r}, no task of {path} ({known}, ...)")
            return tasks.tasks[name], tasks.start(tasks.tasks[name])
        except (OSError, ValueError) as error:
            raise DataFailure(task.id, str(error)) from error
