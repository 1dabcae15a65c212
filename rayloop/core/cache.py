"""A cache with a limit: what was not used for longest goes first, and of many threads that want a value one makes it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Cache(Generic[K, V]):
    """Values by key, none of them None. Safe to use from many threads.

    ``limit`` and ``size`` of a value are in the same unit, most often bytes. Keys that are ``in_use`` stay beyond the limit.
    """

    def __init__(
        self, limit: int, size: Callable[[V], int] = lambda value: 1, in_use: Callable[[K], bool] = lambda key: False
    ) -> None:
        self.used = 0
        """The sum of the sizes."""
        self._limit, self._size, self._in_use = limit, size, in_use
        self._values: OrderedDict[K, V] = OrderedDict()
        self._making: dict[K, Future[V]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K) -> V | None:
        """The value, which then is the most recently used one; None when there is none (any more)."""
        with self._lock:
            if (value := self._values.get(key)) is not None:
                self._values.move_to_end(key)
            return value

    def put(self, key: K, value: V) -> None:
        """Keep a value, in the place of an earlier one of this key. One that is larger than the limit is not kept."""
        with self._lock:
            if (old := self._values.pop(key, None)) is not None:
                self.used -= self._size(old)
            self._values[key] = value
            self.used += self._size(value)
            self._shrink()

    def shrink(self) -> None:
        """Back to the limit: keys may have been in use when something was put, and are no more."""
        with self._lock:
            self._shrink()

    def clear(self) -> None:
        """Forget everything; what is being made is kept once it is there."""
        with self._lock:
            self._values.clear()
            self.used = 0

    def made(self, key: K, make: Callable[[], V]) -> V:
        """The value, made now if there is none. Who asks while another thread makes it waits, and gets what that one gets.

        Raises what ``make`` raises; nothing is kept then.
        """
        if (value := self.get(key)) is not None:
            return value
        with self._lock:
            ours = key not in self._making
            answer = self._making.setdefault(key, Future())
        if ours:
            try:
                value = make()
                self.put(key, value)
                answer.set_result(value)
            except BaseException as error:
                answer.set_exception(error)
            finally:
                del self._making[key]
        return answer.result()

    def _shrink(self) -> None:
        gone = []
        for key, value in self._values.items():
            if self.used <= self._limit:
                break
            if not self._in_use(key):
                gone.append(key)
                self.used -= self._size(value)
        for key in gone:
            del self._values[key]
