"""Calling foreign, blocking code from an event loop, with a deadline.

Each call gets its own daemon thread: a hung call neither exhausts a pool nor keeps the process from exiting, as
``asyncio.to_thread`` would (its pool is joined at exit). What belongs to the thread that made it: rayloop/core/owner_thread.py.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from rayloop.core.failures import DeadlineExceeded

Result = TypeVar("Result")


async def in_thread(function: Callable[..., Result], *args: object, timeout: float) -> Result:
    """``function(*args)`` in a thread, awaited for at most ``timeout`` seconds.

    Raises DeadlineExceeded when it takes longer (the thread is abandoned), and whatever ``function`` raises; an
    exception that is no ``Exception`` (SystemExit), and StopIteration, arrive as RuntimeError.
    """
    answer = asked()
    return await within(timeout, answer, start(lambda: settle(answer, lambda: function(*args))))


def call_within(timeout: float, function: Callable[..., Result], /, *args: object, **options: object) -> Result:
    """``function(*args, **options)`` in a thread, waited for by this one for at most ``timeout`` seconds.

    Raises as ``in_thread`` does.
    """
    answer = asked()
    thread = start(lambda: settle(answer, lambda: function(*args, **options)))
    if not wait({answer}, timeout).done:
        raise _given_up(thread, timeout)
    result: Result = answer.result()
    return result


HUNG = 8
"""Calls that may hang in one actor before it is replaced, which counts against no budget: each holds its memory, and may spin."""
_abandoned: set[threading.Thread] = set()


def hanging() -> int:
    """Threads of this process that were given up at their deadline and still run. Python cannot end a thread: only the
    process's end does."""
    _abandoned.difference_update([thread for thread in _abandoned if not thread.is_alive()])
    return len(_abandoned)


def start(work: Callable[[], None]) -> threading.Thread:
    """A thread that does not keep the process from exiting."""
    thread = threading.Thread(target=work, daemon=True, name="rayloop-call")
    thread.start()
    return thread


def asked() -> Future[Any]:
    """An answer that a thread will give: who waits for it can give up, not cancel."""
    answer: Future[Any] = Future()
    answer.set_running_or_notify_cancel()
    return answer


def settle(answer: Future[Any], work: Callable[[], Any]) -> None:
    """Give ``answer`` what ``contained(work)`` returns or raises, here and now."""
    try:
        answer.set_result(contained(work))
    except Exception as error:
        answer.set_exception(error)


def contained(work: Callable[[], Result]) -> Result:
    """What ``work()`` returns or raises; an exception that is no ``Exception`` (SystemExit), and StopIteration, as RuntimeError."""
    try:
        return work()
    except StopIteration as error:
        raise _runtime_error(error) from error
    except Exception:
        raise
    except BaseException as error:
        raise _runtime_error(error) from error


async def within(timeout: float, answer: Future[Any], thread: threading.Thread) -> Any:
    """The answer that ``thread`` will give, awaited for at most ``timeout`` seconds. Raises as ``in_thread`` does.

    Many may wait for one answer, each within its own time.
    """
    if answer.done():
        return answer.result()
    future = asyncio.wrap_future(answer)
    try:
        done, _ = await asyncio.wait({future}, timeout=timeout)
    finally:
        future.cancel()  # nobody waits any more, or nothing is left to cancel
    if not done:
        raise _given_up(thread, timeout)
    return future.result()


def _given_up(thread: threading.Thread, timeout: float) -> DeadlineExceeded:
    _abandoned.add(thread)
    return DeadlineExceeded(f"no answer within {timeout:g} seconds")


def _runtime_error(error: BaseException) -> RuntimeError:
    return RuntimeError(f"raised {type(error).__name__}: {error}")
