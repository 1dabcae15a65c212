"""The sandbox for hosts on asyncio: calls that wait side by side, and what becomes of one that nobody waits for any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import psutil
import pytest

from rayloop.sandbox.asynchronous import AsyncInterpreter, AsyncSandbox
from rayloop.sandbox.options import CodeDeadline, CodeFailed, Level, Options, SandboxFailed
from tests.support.runs import eventually

pytestmark = [pytest.mark.env, pytest.mark.timeout(120)]
LONG = "import time; time.sleep(60)"


def played(what: Callable[[AsyncSandbox], Awaitable[None]]) -> None:
    async def play() -> None:
        async with AsyncSandbox(Level.PROCESS, Options(preload=(), spares=0)) as sandbox:
            await what(sandbox)

    asyncio.run(play())


@asynccontextmanager
async def busy(python: AsyncInterpreter) -> AsyncIterator[asyncio.Task[object]]:
    """While a call of it is on its way."""
    task: asyncio.Task[object] = asyncio.create_task(python.run(LONG, seconds=60))
    await asyncio.sleep(0.2)
    yield task


def test_calls_of_interpreters_wait_side_by_side_and_those_of_one_in_order() -> None:
    async def what(sandbox: AsyncSandbox) -> None:
        async with await sandbox.interpreter() as slow, await sandbox.interpreter() as quick, busy(slow) as waiting:
            answers = await asyncio.gather(quick.run("x = 6; print(x)", 20), quick.run("print(x * 7)", 20))
            assert [answer.text for answer in answers] == ["6\n", "42\n"]
            assert not waiting.done()
            await slow.close()
            with pytest.raises(CodeFailed):
                await waiting

    played(what)


def test_a_call_that_is_cancelled_or_late_ends_its_interpreter() -> None:
    async def what(sandbox: AsyncSandbox) -> None:
        first, second = await sandbox.interpreter(), await sandbox.interpreter()
        async with busy(first) as call:
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        assert first.closed
        with pytest.raises(CodeFailed, match="ended by an earlier call"):
            await first.run("print(1)", seconds=5)
        with pytest.raises(CodeDeadline):
            await second.run(LONG, seconds=0.3)

    played(what)


def test_an_interpreter_that_comes_too_late_is_ended() -> None:
    async def what(sandbox: AsyncSandbox) -> None:
        await (await sandbox.interpreter()).close()  # the fork server is there now
        asked = asyncio.create_task(sandbox.interpreter())
        await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await asyncio.to_thread(eventually, lambda: len(psutil.Process().children(True)) == 1, "only the fork server", 20)

    played(what)


def test_nothing_is_asked_of_a_sandbox_that_is_closed() -> None:
    async def what(sandbox: AsyncSandbox) -> None:
        python = await sandbox.interpreter()
        await sandbox.close()
        with pytest.raises(SandboxFailed):
            await python.run("print(1)", seconds=5)
        with pytest.raises(SandboxFailed, match="the sandbox is closed"):
            await sandbox.interpreter()

    played(what)
