"""The sandbox for hosts that run on asyncio: the calls of ``host.py``, each awaited while a thread of a pool waits for it.

async with AsyncSandbox(Level.NAMESPACES) as sandbox:
    async with await sandbox.interpreter() as python:
        answer = await python.run("print(6 * 7)", seconds=5)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from rayloop.sandbox.host import START, Answer, Interpreter, Sandbox
from rayloop.sandbox.options import Level, Options, SandboxFailed

P = ParamSpec("P")
T = TypeVar("T")


class AsyncInterpreter:
    """As ``Interpreter``. Calls of several tasks come one after the other; a deadline begins when its call does. A call that is
    cancelled ends the interpreter, since nobody knows how far its code came."""

    def __init__(self, interpreter: Interpreter, pool: ThreadPoolExecutor) -> None:
        self._interpreter, self._pool, self._turn = interpreter, pool, asyncio.Lock()

    async def __aenter__(self) -> AsyncInterpreter:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def run(self, code: str, seconds: float) -> Answer:
        """Raises CodeDeadline, CodeFailed, SandboxFailed."""
        return await self._asked(self._interpreter.run, code, seconds)

    async def images(self, named: Mapping[str, bytes], seconds: float) -> str | None:
        """Why one cannot be read, else None. Raises as ``run``."""
        return await self._asked(self._interpreter.images, named, seconds)

    async def video(self, name: str, encoded: Sequence[bytes], fps: float, seconds: float) -> str | None:
        """As ``images``."""
        return await self._asked(self._interpreter.video, name, encoded, fps, seconds)

    @property
    def closed(self) -> bool:
        return self._interpreter.closed

    async def close(self) -> None:
        """End it, also while a call is on its way: that one raises CodeFailed. May be called again."""
        await asyncio.shield(asyncio.to_thread(self._interpreter.close))

    async def _asked(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        async with self._turn:
            try:
                return await asyncio.wrap_future(_begun(self._pool, call, *args, **kwargs))
            except asyncio.CancelledError:
                await self.close()
                raise


class AsyncSandbox:
    """As ``Sandbox``, which it starts when it is made. At most ``at_once`` calls are on their way; the others wait for a thread."""

    def __init__(self, level: Level, options: Options | None = None, at_once: int = 64) -> None:
        self._sandbox = Sandbox(level, options)
        self._pool = ThreadPoolExecutor(at_once, "sandbox-call")

    async def __aenter__(self) -> AsyncSandbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def interpreter(self, seconds: float = START) -> AsyncInterpreter:
        """A new one within ``seconds``. Raises SandboxFailed. One that comes after the caller was cancelled is ended."""
        coming = _begun(self._pool, self._sandbox.interpreter, seconds)
        try:
            return AsyncInterpreter(await asyncio.shield(asyncio.wrap_future(coming)), self._pool)
        except asyncio.CancelledError:
            coming.add_done_callback(_end)
            raise

    async def close(self) -> None:
        """End all interpreters and the fork server. May be called again."""
        await asyncio.shield(asyncio.to_thread(self._sandbox.close))
        self._pool.shutdown(wait=False)


def _begun(pool: ThreadPoolExecutor, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    try:
        return pool.submit(call, *args, **kwargs)
    except RuntimeError as error:  # after its shutdown
        raise SandboxFailed("the sandbox is closed") from error


def _end(coming: Future[Interpreter]) -> None:
    """An interpreter that nobody waits for any more."""
    with contextlib.suppress(Exception):
        coming.result().close()
