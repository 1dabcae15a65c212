"""OSWorld as an environment: a task of its JSON on one of its machines, UI-TARS actions, screenshots, OSWorld's own result."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayloop.config.settings import local_path
from rayloop.core.failures import DataFailure, EnvironmentFailed
from rayloop.core.protocols import Observation, StepResult
from rayloop.core.types import ImageSource, Message, Task
from rayloop.envs.grammar.actions import Action, CallUser, Finished, Mistake
from rayloop.envs.grammar.scanner import read
from rayloop.envs.grammar.screens import UI_TARS_OR_FAIL, first
from rayloop.envs.osworld.machines import Machine, MachineLost, machines_of
from rayloop.envs.osworld.pyautogui import code
from rayloop.envs.osworld.settings import OSWorldSettings


class OSWorld:
    """A row names a task as domain/id in its column ``osworld``, or holds OSWorld's JSON of it there.

    What OSWorld raises, and what does not answer, is a failure of infrastructure; only what ``evaluate`` returns is a result.
    """

    Settings = OSWorldSettings

    def __init__(self, settings: OSWorldSettings) -> None:
        self._settings = settings
        self._machines = machines_of(settings)
        self._machine: Machine | None = None
        self._broken = False

    def reset(self, task: Task) -> Observation:
        """Tries other machines, with growing pauses between. Raises DataFailure, MachineLost when all attempts failed."""
        config = self._config(task)
        screen = self._begin(config)
        return first(task, str(config["instruction"]), ImageSource(data=screen))

    def step(self, text: str) -> StepResult:
        """Each action is sent once; OSWorld may carry it out twice after a broken connection. Raises MachineLost."""
        turn = read(text)
        if isinstance(turn, Mistake):
            return self._refused(str(turn))
        if len(turn.actions) > self._settings.max_actions:
            return self._refused(f"{len(turn.actions)} actions in one turn, {self._settings.max_actions} are allowed")
        try:
            lines = [self._line(action) for action in turn.actions]
        except ValueError as error:
            return self._refused(str(error))
        screen = b""
        for line in lines:
            header, screen = self._ask("step", self._settings.step_timeout, action=line, pause=self._settings.pause)
            if header["done"]:
                return StepResult(done=True)
        return StepResult(Observation((Message(self._settings.role, (ImageSource(data=screen),)),)))

    def evaluate(self) -> float:
        """OSWorld's result, 0 to 1. Raises MachineLost where OSWorld raises: that is no 0."""
        header, _ = self._ask("evaluate", self._settings.evaluate_timeout)
        return float(header["result"])

    def close(self) -> None:
        machine, self._machine = self._machine, None
        if machine is None:
            return
        if self._broken:
            self._machines.discard(machine, self._settings.back_off)
        else:
            self._machines.give(machine)

    def _begin(self, config: Mapping[str, Any]) -> bytes:
        settings = self._settings
        failed: dict[int, str] = {}
        why: MachineLost | None = None
        for attempt in range(settings.attempts):
            if attempt:
                time.sleep(settings.back_off * 2 ** (attempt - 1))
            machine = None
            try:
                until = time.monotonic() + settings.boot_timeout
                machine = self._machines.take(until, frozenset(failed))
                _, screen = machine.ask("reset", settings.reset_timeout, task=config)
                self._machine, self._broken = machine, False
                return screen
            except MachineLost as error:
                why = error
                if machine is not None:
                    failed[machine.number] = str(error)
                    self._machines.discard(machine, settings.back_off * 2**attempt)
        raise MachineLost(f"{settings.attempts} resets failed, the last one: {why}") from why

    def _ask(self, op: str, seconds: float, **arguments: Any) -> tuple[dict[str, Any], bytes]:
        if self._machine is None or self._broken:
            raise EnvironmentFailed("its machine is lost")
        try:
            return self._machine.ask(op, seconds, **arguments)
        except MachineLost:
            self._broken = True
            raise

    def _line(self, action: Action) -> str:
        """Raises ValueError."""
        if isinstance(action, Finished):
            return "DONE"
        if isinstance(action, CallUser):
            return "FAIL"  # the right answer to a task that cannot be done
        return code(self._settings.pointing.on(action, self._settings.width, self._settings.height))

    def _refused(self, why: str) -> StepResult:
        return StepResult(Observation((Message(self._settings.role, (f"Error: {why}",)),)), error=why)

    def _config(self, task: Task) -> Mapping[str, Any]:
        """Raises DataFailure."""
        found = task.extra.get("osworld")
        if isinstance(found, str) and self._settings.tasks:
            folder = local_path(self._settings.tasks)
            path = (folder / f"{found}.json").resolve()
            if not path.is_relative_to(folder.resolve()):
                raise DataFailure(task.id, f"the row's `osworld` {found!r} leads out of {folder}")
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise DataFailure(task.id, f"the OSWorld task {path} cannot be read: {error}") from error
        if not (isinstance(found, Mapping) and {"id", "instruction", "evaluator"} <= set(found)):
            raise DataFailure(task.id, "the row's `osworld` is no task of OSWorld: domain/id below `tasks`, or its JSON")
        return found


def rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a data file from one of OSWorld's lists of tasks, ``{domain: [id, ...]}``. Raises OSError, ValueError."""
    names = [f"{domain}/{name}" for domain, ids in json.loads(path.read_text(encoding="utf-8")).items() for name in ids]
    return [{"id": name, "prompt": UI_TARS_OR_FAIL, "osworld": name} for name in names]
