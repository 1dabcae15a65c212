"""Foreign calls from the event loop end by their deadline, whatever they do."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from rayloop.core.failures import DeadlineExceeded
from rayloop.core.threads import in_thread


def test_result_and_exception_arrive() -> None:
    assert asyncio.run(in_thread(lambda a, b: a + b, 1, 2, timeout=5)) == 3
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_thread(lambda: 1 / 0, timeout=5))


@pytest.mark.parametrize("error", [StopIteration("x"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
def test_exceptions_that_would_confuse_the_loop_arrive_as_runtime_errors(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(RuntimeError, match=type(error).__name__) as failure:
        asyncio.run(in_thread(fail, timeout=5))
    assert failure.value.__cause__ is error


def test_a_foreign_timeout_is_not_the_deadline() -> None:
    def fail() -> None:
        raise TimeoutError("socket")

    with pytest.raises(TimeoutError, match="socket"):
        asyncio.run(in_thread(fail, timeout=5))


def test_many_hung_calls_neither_block_others_nor_the_loop() -> None:
    release = threading.Event()

    async def calls() -> int:
        hung = [asyncio.create_task(in_thread(release.wait, timeout=0.5)) for _ in range(100)]
        result = await in_thread(lambda: 7, timeout=0.4)
        assert all(isinstance(e, DeadlineExceeded) for e in await asyncio.gather(*hung, return_exceptions=True))
        return result

    began = time.monotonic()
    assert asyncio.run(calls()) == 7
    release.set()
    assert time.monotonic() - began < 5


def test_a_hung_call_does_not_keep_the_process() -> None:
    code = (
        "import asyncio, time; from rayloop.core.threads import in_thread; from rayloop.core.failures import *\n"
        "try: asyncio.run(in_thread(time.sleep, 60, timeout=0.05))\n"
        "except DeadlineExceeded: raise SystemExit(4)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=20).returncode == 4
