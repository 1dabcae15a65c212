"""Two small helpers of the loop: background tasks that cannot fail silently, and timing inside the callee."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any, ParamSpec, TypeVar

from rayloop.core.failures import PolicyLost, Preempted

P = ParamSpec("P")
R = TypeVar("R")


@asynccontextmanager
async def background(*coroutines: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run coroutines beside the block. One that fails cancels the block and its error is raised; the block's end cancels them."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
            yield
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as errors:
        raise decisive(errors) from errors


def decisive(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Of errors that came together, the one after which there is a way on: rebuild, or save. Otherwise the first."""
    single = list(_flat(errors))
    return next((e for kind in (PolicyLost, Preempted) for e in single if isinstance(e, kind)), single[0])


def _flat(errors: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in errors.exceptions:
        yield from _flat(error) if isinstance(error, BaseExceptionGroup) else (error,)


def timed(name: str) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Awaitable[R]]]:
    """Add the seconds that an async method takes to ``self.timings[name]``; meanwhile ``self.phase`` is the name."""

    def decorate(method: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
        @functools.wraps(method)
        async def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            began = time.perf_counter()
            args[0].phase = name  # type: ignore[attr-defined]
            try:
                return await method(*args, **kwargs)
            finally:
                timings: dict[str, float] = args[0].timings  # type: ignore[attr-defined]
                timings[name] = timings.get(name, 0.0) + time.perf_counter() - began

        return wrapper

    return decorate
