"""One environment while it lives: made, called and closed.

A thread, a process or the event loop runs it.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from rayloop.config.settings import Component
from rayloop.core.deadlines import bounded
from rayloop.core.failures import DataFailure, DeadlineExceeded, EnvironmentFailed
from rayloop.core.protocols import Environment
from rayloop.core.threads import OwnerThread, contained
from rayloop.core.types import Task
from rayloop.envs.history.policies import FULL, EpisodeHistory, built
from rayloop.envs.process import IdleWorkers, InProcess
from rayloop.envs.settings import EnvironmentKind
from rayloop.envs.tools import invoke

if TYPE_CHECKING:
    from rayloop.envs.agents.endpoint import Endpoint


class Instance(Protocol):
    """An environment as the episode loop sees it. Each call waits at most ``timeout`` seconds."""

    name: str
    contained: bool

    async def make(self, timeout: float) -> None:
        """Call its constructor, before all other calls. Raises as ``call`` does."""

    async def call(self, method: str, *args: object, timeout: float) -> Any:
        """Return what ``invoke`` returns.

        Raises DeadlineExceeded, EnvironmentFailed when its process ended, and what the method
        raises.
        """

    async def close(self, timeout: float) -> None:
        """Close it, after all other calls and also after a failure.

        Raises as ``call`` does; whatever happens, nothing of it is used again.
        """


class _Here:
    """An environment in this process: ``_run`` calls it."""

    contained = False

    def __init__(self, name: str, build: Callable[[], Environment]) -> None:
        self.name = name
        self._build = build
        self._environment: Environment | None = None

    async def make(self, timeout: float) -> None:
        """As ``Instance.make``."""
        await self._run(timeout, "__init__", self._make)

    async def call(self, method: str, *args: object, timeout: float) -> Any:
        """As ``Instance.call``."""
        return await self._run(timeout, method, lambda: invoke(self._built(), method, args))

    async def close(self, timeout: float) -> None:
        """As ``Instance.close``."""
        await self._run(timeout, "close", self._close)

    def _make(self) -> None:
        self._environment = self._build()

    def _built(self) -> Environment:
        assert self._environment is not None
        return self._environment

    def _close(self) -> Any:
        return None if self._environment is None else self._environment.close()

    async def _run(self, timeout: float, method: str, function: Callable[[], Any]) -> Any:
        raise NotImplementedError


class Immediate(_Here):
    """For an ``immediate`` class: called on the event loop, without a deadline.

    Raises EnvironmentFailed for a coroutine.
    """

    async def _run(self, timeout: float, method: str, function: Callable[[], Any]) -> Any:
        result = contained(function)
        if not inspect.isawaitable(result):
            return result
        if inspect.iscoroutine(result):
            # Otherwise Python warns that it was never awaited.
            result.close()
        raise EnvironmentFailed(
            f"{method} is a coroutine: {self.name} must not say `immediate = True`", bug=True
        )


class AgentDriven(_Here):
    """For an ``agent_driven`` class: its coroutines run on the event loop.

    ``endpoint`` is the endpoint of its process.
    """

    contained = True

    def __init__(self, name: str, build: Callable[[], Any], endpoint: "Endpoint") -> None:
        super().__init__(name, build)
        self.endpoint = endpoint

    @property
    def model(self) -> str:
        """Return the model's name that the agent sends."""
        return str(self._built().model)  # type: ignore[attr-defined]

    @property
    def on_error(self) -> float | None:
        """Return the result of an episode whose program the policy broke.

        None: such an episode is left out.
        """
        value = getattr(self._built(), "on_error", "exclude")
        return None if value == "exclude" else float(value)

    async def run_agent(self, task: Task, address: Mapping[str, str]) -> float | None:
        """As ``AgentDrivenEnvironment.run_agent``."""
        result: float | None = await self._built().run_agent(task, address)  # type: ignore[attr-defined]
        return result

    async def _run(self, timeout: float, method: str, function: Callable[[], Any]) -> Any:
        result = contained(function)
        if not inspect.isawaitable(result):
            return result
        return await bounded(
            timeout, result, DeadlineExceeded(f"no answer within {timeout:g} seconds")
        )


class InThread(_Here):
    """``isolation: thread``: an environment in a thread of this process.

    A call that hangs or is cancelled keeps the thread; ``close`` then queues.
    """

    def __init__(self, name: str, build: Callable[[], Environment]) -> None:
        super().__init__(name, build)
        self._thread = OwnerThread()
        self._stuck = False

    async def close(self, timeout: float) -> None:
        """As ``Instance.close``; ends the thread."""
        try:
            if self._stuck:
                self._thread.put(self._close)
            else:
                await super().close(timeout)
        finally:
            self._thread.end()

    async def _run(self, timeout: float, method: str, function: Callable[[], Any]) -> Any:
        try:
            return await self._thread.call(function, timeout=timeout)
        except (DeadlineExceeded, asyncio.CancelledError):
            self._stuck = True
            raise


class Environments:
    """Makes instances of the kinds that tasks name.

    A task that names none gets ``default``, and every task where there are no ``kinds``.
    """

    def __init__(
        self,
        default: EnvironmentKind,
        kinds: Mapping[str, EnvironmentKind],
        history: Component | None = None,
    ) -> None:
        """Build the history of each kind; without one, episodes show everything.

        Raises ConfigError.
        """
        self._default = default
        self._kinds = kinds
        self._histories: dict[int, EpisodeHistory] = {}
        for kind in (default, *kinds.values()):
            # An agent decides itself what it shows of the past.
            if history is not None and not kind.agent_driven:
                self._histories[id(kind)] = built(history, kind)
        self._workers = IdleWorkers()
        self._endpoint: Endpoint | None = None

    def kind(self, task: Task) -> EnvironmentKind:
        """Return the kind of a task. Raises DataFailure for an unknown one."""
        if not (self._kinds and task.environment):
            return self._default
        if task.environment not in self._kinds:
            raise DataFailure(
                task.id, f"environment.kinds has no {task.environment!r}, which the task names"
            )
        return self._kinds[task.environment]

    def history(self, task: Task) -> EpisodeHistory:
        """Return what a task's policy is shown of its past. Raises as ``kind``."""
        return self._histories.get(id(self.kind(task)), FULL)

    def of(self, task: Task) -> Instance:
        """Return a new instance, not made yet; it must be closed. Raises as ``kind``."""
        kind = self.kind(task)
        if kind.agent_driven:
            # A web server, only for the runs that need one.
            from rayloop.envs.agents.endpoint import Endpoint

            self._endpoint = self._endpoint or Endpoint()
            return AgentDriven(kind.name, kind.build, self._endpoint)
        if kind.isolation == "process":
            return InProcess(kind, self._workers)
        if kind.immediate:
            return Immediate(kind.name, kind.build)
        return InThread(kind.name, kind.build)

    def end(self) -> None:
        """End the processes that wait for their next instance, and the agents' endpoint."""
        self._workers.end()
        if self._endpoint is not None:
            self._endpoint.end()
