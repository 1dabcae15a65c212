"""Sums the memory of all processes of a desktop from /proc, as its first process, and ends them
when it is too much.
"""

import os
import signal
import threading
import time
from contextlib import suppress

from rayloop.sandbox.memory import filled, filled_exactly

CALM, ALERT = 0.5, 0.05
"""Seconds between two looks: while little is filled, and beyond a quarter of the limit."""


class Watch:
    """Ends every process but this one when they fill more than ``limit`` bytes together; ``filled``
    is then how many they did.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self.filled = limit, 0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        own = os.getpid()
        while True:
            now = used(own)
            if now > self._limit and (now := used(own, exact=True)) > self._limit:
                self.filled = now
                with suppress(ProcessLookupError):
                    # The kernel spares the sender and the first process of the namespace: both are
                    # this one.
                    os.kill(-1, signal.SIGKILL)
            time.sleep(ALERT if now > self._limit // 4 else CALM)


def used(but: int, exact: bool = False) -> int:
    """Bytes of written pages of every process but ``but``, of memfd files and System V segments."""
    others = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != but]
    return _segments() + (filled_exactly if exact else filled)(*others)


def _segments() -> int:
    with suppress(OSError), open("/proc/sysvipc/shm", encoding="utf-8") as file:
        header, *lines = (line.split() for line in file)
        return sum(int(line[header.index("rss")]) for line in lines)
    return 0
