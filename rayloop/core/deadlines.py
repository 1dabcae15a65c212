"""What this process waits for: every await of the driver on an actor has a deadline and stands in one table."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rayloop.core.failures import Preempted, WorkerLost

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Awaited:
    """``what`` names the call and, if it is one's work, the task; ``actor`` is the handle of who should answer;
    ``starts``: its process is only being made, and answers nothing yet."""

    what: str
    since: float
    actor: Any = None
    counts: bool = True
    starts: bool = False


@dataclass(slots=True)
class Waits:
    """The waits under way, and when one last ended (``time.monotonic``)."""

    open: dict[int, Awaited] = field(default_factory=dict)
    moved: float = field(default_factory=time.monotonic)
    entered: int = 0

    def oldest(self) -> list[Awaited]:
        return sorted((wait for wait in self.open.values() if wait.counts), key=lambda wait: wait.since)


WAITS = Waits()
"""Of this process."""


async def bounded(seconds: float, awaitable: Awaitable[T], late: Exception) -> T:
    """Await for so many seconds at most, then raise ``late``. A TimeoutError of what is awaited stays what it is.

    Not asyncio.wait_for: in Python 3.11 that swallows a cancellation which comes together with the result.
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            return await awaitable
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise late from error


async def with_deadline(
    deadline: float, awaitable: Awaitable[T], what: str, actor: Any = None, *, counts: bool = True, starts: bool = False
) -> T:
    """Await with a deadline in seconds. Raises WorkerLost that names what did not answer.

    With ``counts=False`` (health checks) its end does not tell that anything moves.
    """
    WAITS.entered += 1
    key = WAITS.entered
    WAITS.open[key] = Awaited(what, time.monotonic(), actor, counts, starts)
    try:
        return await bounded(deadline, awaitable, WorkerLost(f"{what} did not answer within {deadline:g} s"))
    finally:
        del WAITS.open[key]
        if counts:
            WAITS.moved = time.monotonic()


async def until_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``, but cancel it when ``stop`` is set. Raises Preempted then."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
        raise Preempted("asked to stop")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
