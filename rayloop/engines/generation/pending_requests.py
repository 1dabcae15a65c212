"""Requests that a library still prepares when new weights come.

They carry the version of the present weights.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any


class PendingRequests:
    """The requests that the library has and its scheduler has not, by their ids."""

    def __init__(self) -> None:
        self._events: dict[str, asyncio.Event] = {}

    @contextmanager
    def request(self, number: str) -> Iterator[None]:
        """Surround the call of the library for the request ``number``."""
        self._events[number] = asyncio.Event()
        try:
            yield
        finally:
            self._mark_scheduled(number)

    def tracked(
        self, send: Callable[..., Awaitable[Any]], number: Callable[[Any], str] = str
    ) -> Callable[..., Awaitable[Any]]:
        """Return ``send`` as the library must call it to give a request to its scheduler.

        Its first argument has the ``number``.
        """

        async def tracked(first: Any, *arguments: Any, **options: Any) -> Any:
            try:
                return await send(first, *arguments, **options)
            finally:
                # This holds when sending fails, too: a pause must
                # not wait for a request that will never arrive.
                self._mark_scheduled(number(first))

        return tracked

    async def all_scheduled(self) -> None:
        """Return when the scheduler has all of them, or their calls have ended."""
        # The loop is over a copy, since requests that are scheduled leave the mapping during it.
        for event in list(self._events.values()):
            await event.wait()

    def _mark_scheduled(self, number: str) -> None:
        event = self._events.pop(number, None)
        if event is not None:
            event.set()
