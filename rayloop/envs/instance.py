"""One environment while it lives: made, called and closed by the one thread that owns it, here or in a process of its own; or, when
its class is ``immediate``, by the event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, Protocol

from rayloop.core.failures import DeadlineExceeded, EnvironmentFailed
from rayloop.core.protocols import Environment
from rayloop.core.threads import OwnerThread, contained
from rayloop.envs.toolkit import schemas


class Instance(Protocol):
    """An environment as the episode loop sees it. Each call waits at most ``timeout`` seconds.

    ``name`` is that of its class. ``contained``: it has a process of its own, so whatever it does costs nobody else.
    """

    name: str
    contained: bool

    async def make(self, timeout: float) -> None:
        """Call its constructor; first of all. Raises as ``call`` does."""
        ...

    async def call(self, method: str, *args: object, timeout: float) -> Any:
        """What ``invoke`` gives. Raises DeadlineExceeded, EnvironmentFailed when its process ended, and what the method raises."""
        ...

    async def close(self, timeout: float) -> None:
        """Last of all, also after a failure. Raises as ``call`` does; whatever happens, nothing of it is used again."""
        ...


def invoke(environment: Environment, method: str, args: tuple[Any, ...]) -> Any:
    """Call a method of the protocol; ``tools`` gives the schemas of the tools that the environment offers now."""
    return schemas(environment) if method == "tools" else getattr(environment, method)(*args)


class Immediate:
    """For a class that is ``immediate``: called on the event loop itself, without a thread. A call is over when it returns: no
    deadline can interrupt it, and a coroutine is refused.
    """

    contained = False

    def __init__(self, name: str, build: Callable[[], Environment]) -> None:
        self.name, self._build = name, build
        self._environment: Environment | None = None

    async def make(self, timeout: float) -> None:
        self._environment = contained(self._build)

    async def call(self, method: str, *args: object, timeout: float) -> Any:
        """Raises EnvironmentFailed for a coroutine, and what the method raises."""
        environment = self._environment
        assert environment is not None
        return self._finished(method, contained(lambda: invoke(environment, method, args)))

    async def close(self, timeout: float) -> None:
        if self._environment is not None:
            self._finished("close", contained(self._environment.close))

    def _finished(self, method: str, result: Any) -> Any:
        if not inspect.isawaitable(result):
            return result
        if inspect.iscoroutine(result):
            result.close()  # or Python warns that nobody awaited it
        raise EnvironmentFailed(f"{method} is a coroutine: {self.name} must not say `immediate = True`", bug=True)


class InThread:
    """``isolation: thread``: one thread of this process for the whole life of the instance.

    A call that does not return, or whose episode is cancelled, keeps its thread; ``close`` is then left to that thread, for when
    it does.
    """

    contained = False

    def __init__(self, name: str, build: Callable[[], Environment]) -> None:
        self.name, self._build = name, build
        self._environment: Environment | None = None
        self._thread = OwnerThread()
        self._stuck = False

    async def make(self, timeout: float) -> None:
        await self._within(timeout, self._make)

    async def call(self, method: str, *args: object, timeout: float) -> Any:
        return await self._within(timeout, invoke, self._environment, method, args)

    async def close(self, timeout: float) -> None:
        try:
            if self._stuck:
                self._thread.put(self._close)
            else:
                await self._within(timeout, self._close)
        finally:
            self._thread.end()

    def _make(self) -> None:
        self._environment = self._build()

    def _close(self) -> Any:
        return None if self._environment is None else self._environment.close()

    async def _within(self, timeout: float, function: Callable[..., Any], *args: object) -> Any:
        try:
            return await self._thread.call(function, *args, timeout=timeout)
        except (DeadlineExceeded, asyncio.CancelledError):
            self._stuck = True
            raise
