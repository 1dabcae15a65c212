"""Background tasks that cannot fail silently."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

from rayloop.core.failures import PolicyLost, Preempted


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
