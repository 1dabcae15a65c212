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
from rayloop.envs.tools import schemas


class Instance(Protocol):
    """An environment as the episode loop sees it. Each call waits at most ``timeout`` seconds.

    ``name`` is that of its class. ``contained``: it has a process of its own, so a hang or a crash costs no other episode.
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


class _Here:
    """An environment in this process: ``_run`` calls it."""

    contained = False

    def __init__(self, name: str, build: Callable[[], Environment]) -> None:
        self.name, self._build = name, build
        self._environment: Environment | None = None

    async def make(self, timeout: float) -> None:
        """As ``Instance.make``."""
        await self._run(timeout, "__init__", self._make)

    async def call(self, method: str, *args: object, timeout: float) -> Any:
        """As ``Instance.call``."""
        return await self._run(timeout, method, lambda: invoke(self._made(), method, args))

    async def close(self, timeout: float) -> None:
        """As ``Instance.close``."""
        await self._run(timeout, "close", self._close)

    def _make(self) -> None:
        self._environment = self._build()

    def _made(self) -> Environment:
        assert self._environment is not None
        return self._environment

    def _close(self) -> Any:
        return None if self._environment is None else self._environment.close()

    async def _run(self, timeout: float, method: str, function: Callable[[], Any]) -> Any:
        raise NotImplementedError


class Immediate(_Here):
    """For a class that is ``immediate``: called on the event loop itself, without a thread. A call is over when it returns: no
    deadline can interrupt it, and a coroutine is refused (EnvironmentFailed)."""

    async def _run(self, timeout: float, method: str, function: Callable[[], Any]) -> Any:
        result = contained(function)
        if not inspect.isawaitable(result):
            return result
        if inspect.iscoroutine(result):
            result.close()  # or Python warns that it was never awaited
        raise EnvironmentFailed(f"{method} is a coroutine: {self.name} must not say `immediate = True`", bug=True)


class InThread(_Here):
    """``isolation: thread``: one thread of this process for the whole life of the instance.

    A call that does not return, or whose episode is cancelled, keeps its thread; ``close`` then waits in that thread's queue.
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
