"""Signals: handlers for the time of a block, and a record of the signals that arrived."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

HANGUP: int = getattr(signal, "SIGHUP", 0)
"""A terminal was closed: the kernel and the shell each send one. Windows has none."""
STOP = (signal.SIGTERM, signal.SIGINT, *([HANGUP] if HANGUP else []))
"""The signals that ask a process to end."""


class StopSignals:
    """Records the signals that arrive.

    ``first`` is the number of the first one, or None, and ``again`` is true once another one has
    followed. It raises nothing, since the code that a signal interrupts may swallow an exception.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self.again = False

    def __call__(self, number: int, frame: Any) -> None:
        """Note a signal: this object is a handler."""
        leave_terminal()
        if self.first is None:
            self.first = number
        elif number != HANGUP:
            self.again = True

    def near_limit(self) -> bool:
        """Whether Slurm warned that the job's time ends."""
        return self.first == signal.SIGUSR1


def leave_terminal() -> None:
    """Discard this process's further output when its terminal was closed.

    Each write to a closed terminal raises.
    """
    for output in (1, 2):
        try:
            # An empty write has no effect but the error of a terminal that was closed.
            os.write(output, b"")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), output)


@contextmanager
def handling(handler: Callable[[int, Any], None], *numbers: int) -> Iterator[None]:
    """Let ``handler`` answer these signals within the block; then restore the former handlers.

    SIGHUP stays ignored where it is ignored: the process was started by nohup. Only in the main
    thread.
    """
    numbers = tuple(n for n in numbers if n != HANGUP or signal.getsignal(n) != signal.SIG_IGN)
    former = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in former.items():
            signal.signal(number, previous)
