"""Awaiting: each await of the driver on an actor has a deadline and is listed in one table.

Background tasks cannot fail silently.
"""

import asyncio
import functools
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from rayloop.core.failures import AnswerLate, PolicyLost, Preempted, WorkerLost
from rayloop.core.types import Summary

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Awaited:
    """A wait of the driver for an answer."""

    what: str
    """The call and its task."""
    since: float
    actor: Any = None
    """The handle that should answer."""
    counts: bool = True
    """Whether its end is progress."""
    starts: bool = False
    """Whether the actor's process is being started."""
    limit: asyncio.Timeout | None = None
    """Ends the wait."""
    why: str = ""
    """Why ``actor`` was given up, or ""."""


class Span(NamedTuple):
    """An activity on a ``track``, with begin and end in unix seconds.

    The track of a call is "", since its name contains the actor.
    """

    track: str
    name: str
    began: float
    ended: float


@dataclass(slots=True)
class Waits:
    """The waits under way, and when one last ended (``moved``, of ``time.monotonic``).

    ``spans`` are the activities that have ended, None unless they are recorded.
    """

    open: dict[int, Awaited] = field(default_factory=dict)
    moved: float = field(default_factory=time.monotonic)
    entered: int = 0
    spans: list[Span] | None = None

    def did(self, name: str, since: float, track: str = "") -> None:
        """Record an activity that began at ``since`` (``time.monotonic``) and ends now."""
        if self.spans is not None:
            now = time.time()
            self.spans.append(Span(track, name, now - (time.monotonic() - since), now))

    def record_episodes(self, episodes: Sequence[object], environment: str, engine: str) -> None:
        """Record the spans of the episodes that have a summary."""
        if self.spans is None:
            return
        for episode in episodes:
            if isinstance(episode, Summary):
                for name, began, ended in episode.spans:
                    track = engine if name == "generate" else environment
                    self.spans.append(Span(track, f"{name} {episode.id}", began, ended))

    def oldest(self) -> list[Awaited]:
        """The open waits that count, the longest first."""
        counting = [wait for wait in self.open.values() if wait.counts]
        return sorted(counting, key=lambda wait: wait.since)

    def give_up(self, actor: Any, why: str) -> None:
        """End all waits for ``actor``, which will answer none of them: each raises WorkerLost."""
        for wait in self.open.values():
            # A limit that has expired cannot be moved: asyncio raises RuntimeError.
            if wait.actor == actor and wait.limit is not None and not wait.limit.expired():
                wait.why = why
                wait.limit.reschedule(asyncio.get_running_loop().time())


WAITS = Waits()


MEASURED_CALLS = 5
"""The latest durations of a call that decide how long the next one may take."""
CALL_FACTOR = 20.0
"""A call may take this many times as long as the longest of the latest calls."""


@dataclass
class Patience:
    """How long a call may take that is repeated: a multiple of the longest of the latest calls.

    At most ``longest`` seconds, which the first call has, and at least ``shortest``.
    ``durations``: in seconds, of calls that ended within their limit.
    """

    longest: float
    shortest: float
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=MEASURED_CALLS))

    @property
    def seconds(self) -> float:
        """The limit of the next call."""
        slowest = max(self.durations, default=self.longest)
        return min(self.longest, max(self.shortest, CALL_FACTOR * slowest))


async def bounded(seconds: float, awaitable: Awaitable[T], late: Exception) -> T:
    """Await for ``seconds`` at most, then raise ``late``.

    asyncio.wait_for of Python 3.11 can swallow a cancellation.
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            return await awaitable
    except TimeoutError as error:
        # The TimeoutError is the awaitable's own, and not this deadline's.
        if not limit.expired():
            raise
        raise late from error


async def with_deadline(
    deadline: float,
    awaitable: Awaitable[T],
    what: str,
    actor: Any = None,
    *,
    counts: bool = True,
    starts: bool = False,
) -> T:
    """Await for ``deadline`` seconds at most, else raise AnswerLate.

    Raises WorkerLost when ``actor`` is given up (``Waits.give_up``). Without ``counts`` (health
    checks) its end is not progress.
    """
    WAITS.entered += 1
    key = WAITS.entered
    wait = Awaited(what, time.monotonic(), actor, counts, starts)
    WAITS.open[key] = wait
    try:
        async with asyncio.timeout(deadline) as wait.limit:
            return await awaitable
    except TimeoutError as error:
        # The call itself raised a TimeoutError, before the deadline.
        if wait.limit is None or not wait.limit.expired():
            raise
        if wait.why:
            raise WorkerLost(f"{what} {wait.why}") from error
        raise AnswerLate(f"{what} did not answer within {deadline:g} s") from error
    finally:
        del WAITS.open[key]
        if counts:
            WAITS.moved = time.monotonic()
            WAITS.did(what, wait.since)


async def until_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``, but cancel it when ``stop`` is set. Raises Preempted then."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        # The work counts when both came at once: its result must not be lost.
        if tasks[0].done():
            return tasks[0].result()
        raise Preempted("asked to stop")
    finally:
        for task in tasks:
            task.cancel()
        # They are awaited, so that the cancelled work has
        # cleaned up, and no exception is left unread.
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def background(*coroutines: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run coroutines during the block.

    One that fails cancels the block and its error is raised; the block's end cancels them.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
            yield
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as errors:
        raise decisive(errors) from errors


def decisive(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error of a group after which the run can continue: by a rebuild, or by saving.

    Otherwise the first error.
    """
    single = list(_flat(errors))
    # A rebuild comes before a stop: a policy that is lost cannot be saved.
    for kind in (PolicyLost, Preempted):
        for error in single:
            if isinstance(error, kind):
                return error
    return single[0]


def _flat(errors: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in errors.exceptions:
        yield from _flat(error) if isinstance(error, BaseExceptionGroup) else (error,)


class Timings:
    """Durations of phases: ``phase`` began last, ``seconds`` has each phase's since ``take``."""

    def __init__(self) -> None:
        self.phase = "start"
        self.seconds: dict[str, float] = {}

    def take(self) -> dict[str, float]:
        """The seconds of a step, which are then forgotten."""
        seconds = self.seconds
        self.seconds = {}
        return seconds


class Timed(Protocol):
    """An object with ``timed`` methods."""

    timings: Timings


TimedT = TypeVar("TimedT", bound=Timed)
P = ParamSpec("P")
R = TypeVar("R")
Method = Callable[Concatenate[TimedT, P], Coroutine[Any, Any, R]]


def timed(phase: str) -> Callable[[Method[TimedT, P, R]], Method[TimedT, P, R]]:
    """Add the seconds of an async method to ``self.timings``, under ``phase``, which it begins."""

    def decorate(method: Method[TimedT, P, R]) -> Method[TimedT, P, R]:
        async def wrapper(self: TimedT, /, *args: P.args, **kwargs: P.kwargs) -> R:
            began = time.monotonic()
            timings = self.timings
            timings.phase = phase
            try:
                return await method(self, *args, **kwargs)
            finally:
                timings.seconds[phase] = timings.seconds.get(phase, 0.0) + time.monotonic() - began
                WAITS.did(phase, began, "driver")

        functools.update_wrapper(wrapper, method)
        return wrapper

    return decorate
