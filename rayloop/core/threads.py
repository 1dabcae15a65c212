"""Calling foreign, blocking code from an event loop, with a deadline.

Each call gets its own daemon thread: a hung call neither exhausts a pool nor keeps the process from exiting, as
``asyncio.to_thread`` would (its pool is joined at exit).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import TypeVar

from rayloop.core.failures import DeadlineExceeded

Result = TypeVar("Result")


async def in_thread(function: Callable[..., Result], *args: object, timeout: float) -> Result:
    """``function(*args)`` in a thread, awaited for at most ``timeout`` seconds.

    Raises DeadlineExceeded when it takes longer (the thread is abandoned), and whatever ``function`` raises; an
    exception that is no ``Exception`` (SystemExit), and StopIteration, arrive as RuntimeError.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def deliver(result: Result | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result: Result | None = None
        failure: Exception | None = None
        try:
            result = function(*args)
        except StopIteration as error:
            failure = _runtime_error(error)
        except Exception as error:
            failure = error
        except BaseException as error:
            failure = _runtime_error(error)
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, result, failure)

    thread = _start(work)
    done, _ = await asyncio.wait({future}, timeout=timeout)
    if not done:
        future.cancel()
        raise _given_up(thread, timeout)
    return future.result()


def call_within(timeout: float, function: Callable[..., Result], /, *args: object, **options: object) -> Result:
    """``function(*args, **options)`` in a thread, waited for by this one for at most ``timeout`` seconds.

    Raises as ``in_thread`` does.
    """
    answer: Future[Result] = Future()

    def work() -> None:
        try:
            answer.set_result(function(*args, **options))
        except Exception as error:
            answer.set_exception(error)
        except BaseException as error:
            answer.set_exception(_runtime_error(error))

    thread = _start(work)
    if not wait({answer}, timeout).done:
        raise _given_up(thread, timeout)
    return answer.result()


HUNG = 8
"""Calls that may hang in one actor before it is replaced, which counts against no budget: each holds its memory, and may spin."""
_abandoned: set[threading.Thread] = set()


def hanging() -> int:
    """Threads of this process that were given up at their deadline and still run. Python cannot end a thread: only the
    process's end does."""
    _abandoned.difference_update([thread for thread in _abandoned if not thread.is_alive()])
    return len(_abandoned)


def _start(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True, name="rayloop-call")
    thread.start()
    return thread


def _given_up(thread: threading.Thread, timeout: float) -> DeadlineExceeded:
    _abandoned.add(thread)
    return DeadlineExceeded(f"no answer within {timeout:g} seconds")


def _runtime_error(error: BaseException) -> RuntimeError:
    wrapped = RuntimeError(f"raised {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
