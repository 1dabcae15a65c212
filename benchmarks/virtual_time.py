"""An event loop with its own clock: sleeping costs nothing, so days pass in a moment."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """Instead of waiting it turns the clock on."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        """Poll; move the clock to the next timer when nothing is ready."""
        found = super().select(0)
        if not found:
            if timeout is None:
                raise RuntimeError("nothing is left that could happen: a deadlock")
            self.now += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """``time()`` is 0 at the start and goes on when there is nothing to do but to wait."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Seconds of the virtual clock."""
        return self._virtual.now


def live(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
