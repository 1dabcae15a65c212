"""The kinds of environment of a run: makes an instance of the kind that a task names."""

from __future__ import annotations

from collections.abc import Mapping

from rayloop.core.failures import DataFailure
from rayloop.core.types import Task
from rayloop.envs.instance import Immediate, Instance, InThread
from rayloop.envs.process import IdleWorkers, InProcess
from rayloop.envs.settings import EnvironmentKind


class Environments:
    """``default`` (``environment.episode.environment``) is for tasks that name none, and for all when ``kinds`` is empty."""

    def __init__(self, default: EnvironmentKind, kinds: Mapping[str, EnvironmentKind]) -> None:
        self._default, self._kinds = default, kinds
        self._workers = IdleWorkers()

    def of(self, task: Task) -> Instance:
        """A new instance, not made yet; it must be closed. Raises DataFailure for a kind that does not exist."""
        kind = self._default
        if self._kinds and task.environment:
            if task.environment not in self._kinds:
                raise DataFailure(task.id, f"environment.kinds has no {task.environment!r}, which the task names")
            kind = self._kinds[task.environment]
        if kind.isolation == "process":
            return InProcess(kind, self._workers)
        return (Immediate if kind.immediate else InThread)(kind.name, kind.build)

    def end(self) -> None:
        """End the processes that wait for their next instance."""
        self._workers.end()
