"""How long the phases of a step take, and which one it is in: measured in the callee, once, with a decorator."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar


class Timings:
    """``phase`` is what began last; ``seconds`` what each phase took since they were last taken."""

    def __init__(self) -> None:
        self.phase = "start"
        self.seconds: dict[str, float] = {}

    def take(self) -> dict[str, float]:
        """The seconds of a step, which are then forgotten."""
        seconds, self.seconds = self.seconds, {}
        return seconds


class Timed(Protocol):
    """Whose methods are ``timed``."""

    timings: Timings


T = TypeVar("T", bound=Timed)
P = ParamSpec("P")
R = TypeVar("R")
Method = Callable[Concatenate[T, P], Coroutine[Any, Any, R]]


def timed(phase: str) -> Callable[[Method[T, P, R]], Method[T, P, R]]:
    """Add the seconds that an async method takes to ``self.timings``, as those of ``phase``, which begins with it."""

    def decorate(method: Method[T, P, R]) -> Method[T, P, R]:
        async def wrapper(self: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
            began, timings = time.perf_counter(), self.timings
            timings.phase = phase
            try:
                return await method(self, *args, **kwargs)
            finally:
                timings.seconds[phase] = timings.seconds.get(phase, 0.0) + time.perf_counter() - began

        functools.update_wrapper(wrapper, method)
        return wrapper

    return decorate
