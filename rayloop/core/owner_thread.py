"""One thread for all calls of an object: for code that belongs to the thread that made it, and for coroutines of one event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from rayloop.core.threads import asked, settle, start, within

_Call = tuple[Future[Any], Callable[[], Any]]


class CallLoop:
    """Calls that other threads ``put`` are carried out one after the other by the one thread that is in ``run``.

    What returns a coroutine is awaited on an event loop, made at the first of them. From then on the thread waits for its next
    call on that loop, so what coroutines leave running (a connection's heartbeat) goes on between calls. Plain functions are
    never called while a loop runs: libraries such as Playwright's sync API refuse that.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._runner: asyncio.Runner | None = None
        self._filled = asyncio.Event()

    def put(self, function: Callable[[], Any]) -> Future[Any]:
        """Returns at once; the future gets what ``function`` returns or raises, as of ``in_thread``."""
        answer = asked()
        self._enqueue((answer, function))
        return answer

    def stop(self) -> None:
        """``run`` returns when it has carried out what was put before."""
        self._enqueue(None)

    def run(self) -> None:
        """Carry out calls until ``stop``; then what is left on the event loop is cancelled. May be called again."""
        try:
            while (call := self._next()) is not None:
                self._carry_out(*call)
                del call  # what it returned belongs to who asked
        finally:
            runner, self._runner = self._runner, None
            if runner is not None:
                runner.close()

    def _enqueue(self, call: _Call | None) -> None:
        self._calls.put(call)
        if (runner := self._runner) is not None:
            with suppress(RuntimeError):  # it is closed: nobody will look
                runner.get_loop().call_soon_threadsafe(self._filled.set)

    def _next(self) -> _Call | None:
        if self._runner is not None:
            self._runner.run(self._wait())
        return self._calls.get()

    async def _wait(self) -> None:
        while self._calls.empty():
            self._filled.clear()
            if self._calls.empty():
                await self._filled.wait()

    def _carry_out(self, answer: Future[Any], function: Callable[[], Any]) -> None:
        settle(answer, lambda: self._complete(function()))

    def _complete(self, result: Any) -> Any:
        if not inspect.isawaitable(result):
            return result
        if self._runner is None:
            runner = asyncio.Runner()
            runner.get_loop()  # made here, before another thread asks for it
            self._filled, self._runner = asyncio.Event(), runner
        return self._runner.run(_awaited(result))


class OwnerThread:
    """A daemon thread that carries out calls until it is told to ``end``."""

    def __init__(self) -> None:
        self._calls = CallLoop()
        self._thread = start(self._calls.run)

    async def call(self, function: Callable[..., Any], *args: object, timeout: float) -> Any:
        """``function(*args)``, awaited too when that is a coroutine. Raises as ``in_thread`` does."""
        return await within(timeout, self._calls.put(lambda: function(*args)), self._thread)

    def put(self, function: Callable[[], Any]) -> None:
        """Called when all that was asked for before has returned, if ever; nobody waits for it."""
        self._calls.put(function)

    def end(self) -> None:
        """The thread ends when all that was asked for before has returned."""
        self._calls.stop()


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result
