"""An environment that hangs, raises or kills its process on demand: for the fault tests, in a
checkout only.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Literal

from rayloop.config.settings import SettingsModel
from rayloop.core.protocols import Observation, StepResult
from rayloop.core.types import Task

Fault = Literal["hang", "raise", "exit"]


class FaultyEnvironment:
    """Question and answer, with faults for the tasks named in the settings."""

    class Settings(SettingsModel):
        reset: dict[str, Fault] = {}
        """Task id -> what ``reset`` does for it."""
        step: dict[str, Fault] = {}
        """Task id -> what ``step`` does for it."""
        once: str | None = None
        """A folder in which each fault that fired leaves a file, so that it fires only once.

        None: every time.
        """
        marks: str | None = None
        """A folder in which each ``reset`` leaves a file with the task in its name: an episode has
        begun.
        """
        hang: float = 3600.0
        """Seconds that a hang lasts."""

    def __init__(self, settings: FaultyEnvironment.Settings) -> None:
        self._settings = settings
        self._task = ""

    def reset(self, task: Task) -> Observation:
        self._task = task.id
        if self._settings.marks is not None:
            (Path(self._settings.marks) / f"reset-{time.time_ns()}-{task.id}").touch()
        self._fire("reset", self._settings.reset.get(task.id))
        return Observation(task.messages)

    def step(self, text: str) -> StepResult:
        self._fire("step", self._settings.step.get(self._task))
        return StepResult(done=True)

    def evaluate(self) -> float | None:
        return None

    def close(self) -> None: ...

    def _fire(self, where: str, fault: Fault | None) -> None:
        if fault is None:
            return
        if self._settings.once is not None:
            try:
                (Path(self._settings.once) / f"{where}-{self._task.replace('/', '_')}").touch(
                    exist_ok=False
                )
            except FileExistsError:
                return
        if fault == "hang":
            time.sleep(self._settings.hang)
        elif fault == "exit":
            os._exit(1)
        else:
            raise ValueError(f"{where} fails for task {self._task}")
