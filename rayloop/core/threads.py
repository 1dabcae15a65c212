"""Calling foreign, blocking code from an event loop, with a deadline.

Each call gets its own daemon thread: a hung call neither exhausts a pool nor keeps the process from exiting, as
``asyncio.to_thread`` would (its pool is joined at exit).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
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

    threading.Thread(target=work, daemon=True, name="rayloop-call").start()
    done, _ = await asyncio.wait({future}, timeout=timeout)
    if not done:
        future.cancel()
        raise DeadlineExceeded(f"no answer within {timeout:g} seconds")
    return future.result()


def _runtime_error(error: BaseException) -> RuntimeError:
    wrapped = RuntimeError(f"raised {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
