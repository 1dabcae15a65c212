"""Foreign calls from the event loop end by their deadline, whatever they do."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from rayloop.core.failures import DeadlineExceeded
from rayloop.core.threads import call_within, hanging, in_thread


def test_result_and_exception_arrive() -> None:
    assert asyncio.run(in_thread(lambda a, b: a + b, 1, 2, timeout=5)) == 3
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_thread(lambda: 1 / 0, timeout=5))


@pytest.mark.parametrize(
    "error", [StopIteration("x"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()]
)
def test_exceptions_that_would_confuse_the_loop_arrive_as_runtime_errors(
    error: BaseException,
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(RuntimeError, match=type(error).__name__) as failure:
        asyncio.run(in_thread(fail, timeout=5))
    assert failure.value.__cause__ is error


@pytest.mark.parametrize("error", [ZeroDivisionError("x"), SystemExit(3)])
def test_a_call_within_a_time_gives_result_or_exception(error: BaseException) -> None:
    def fail() -> None:
        raise error

    assert call_within(5, lambda a, *, timeout: a + timeout, 1, timeout=2) == 3
    with pytest.raises((ZeroDivisionError, RuntimeError)):
        call_within(5, fail)


def test_calls_that_hang_are_counted_until_they_end() -> None:
    while hanging():  # of the tests before
        time.sleep(0.01)
    release = threading.Event()
    for _ in range(2):
        with pytest.raises(DeadlineExceeded, match=r"no answer within 0\.05 seconds"):
            call_within(0.05, release.wait)
    with pytest.raises(DeadlineExceeded):
        asyncio.run(in_thread(release.wait, timeout=0.05))
    assert hanging() == 3
    release.set()
    while hanging():
        time.sleep(0.01)


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
        assert all(
            isinstance(e, DeadlineExceeded)
            for e in await asyncio.gather(*hung, return_exceptions=True)
        )
        return result

    began = time.monotonic()
    assert asyncio.run(calls()) == 7
    release.set()
    assert time.monotonic() - began < 5


def test_a_hung_call_does_not_keep_the_process() -> None:
    code = (
        "import asyncio, time; from rayloop.core.threads import in_thread; from"
        " rayloop.core.failures import *\ntry: asyncio.run(in_thread(time.sleep, 60,"
        " timeout=0.05))\nexcept DeadlineExceeded: raise SystemExit(4)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=20).returncode == 4
