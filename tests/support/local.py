"""Actors without Ray: the methods of an object in this process behind the calls that handles of Ray
actors understand.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Generator
from typing import Any


class LocalRef:
    """A result to await, equal to itself only, like an object reference.

    ``value`` is there once it was awaited.
    """

    def __init__(self, task: asyncio.Task[Any], index: int | None = None) -> None:
        self._task, self._index = task, index

    def __await__(self) -> Generator[Any, None, Any]:
        result = yield from asyncio.shield(self._task).__await__()
        return result if self._index is None else result[self._index]

    @property
    def value(self) -> Any:
        return self._task.result() if self._index is None else self._task.result()[self._index]


class LocalMethod:
    def __init__(self, method: Any, returns: int = 1) -> None:
        self._method, self._returns = method, returns

    def options(self, *, num_returns: int, name: str = "") -> LocalMethod:
        return LocalMethod(self._method, num_returns)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Start the call.

        As in Ray, references among the arguments are resolved, those inside of arguments are not.
        """
        task = asyncio.get_running_loop().create_task(self._call(args, kwargs))
        return (
            LocalRef(task)
            if self._returns == 1
            else [LocalRef(task, i) for i in range(self._returns)]
        )

    async def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        resolved = [await arg if isinstance(arg, LocalRef) else arg for arg in args]
        result = self._method(*resolved, **kwargs)
        return await result if inspect.isawaitable(result) else result


class LocalActor:
    """``LocalActor(object).method.remote(...)`` runs on the event loop of the caller."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def __getattr__(self, name: str) -> LocalMethod:
        return LocalMethod(getattr(self.actor, name))


def get(refs: list[LocalRef]) -> list[Any]:
    """In place of ``ray.get``, for references whose calls have ended."""
    return [ref.value for ref in refs]
