"""Signals: handlers for the time of a block, and the record of what was asked."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

STOP = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Records the signals that arrive: ``first`` is the number of the first one, or None, and ``again`` is true once another one
    has followed. It raises nothing, since the code that a signal interrupts may swallow an exception."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.again = False

    def __call__(self, number: int, frame: Any) -> None:
        """Note a signal: this object is a handler."""
        if self.first is None:
            self.first = number
        else:
            self.again = True

    def near_limit(self) -> bool:
        """Whether Slurm warned that the job's time ends."""
        return self.first == signal.SIGUSR1


@contextmanager
def handling(handler: Callable[[int, Any], None], *numbers: int) -> Iterator[None]:
    """Let ``handler`` answer these signals within the block; the ones before come back. Only in the main thread."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
