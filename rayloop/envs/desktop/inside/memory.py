"""Bounds the memory of all processes of a desktop together.

The first process of the desktop sums it from /proc, and ends the others when it is too much.
"""

import os
import signal
import threading
import time
from contextlib import suppress

from rayloop.sandbox.memory import filled, filled_exactly

CALM_PERIOD_S = 0.5
"""Seconds between two checks while little memory is filled."""
ALERT_PERIOD_S = 0.05
"""Seconds between two checks beyond a quarter of the limit."""


class Watch:
    """Ends every process but this one when they fill more than ``limit`` bytes together.

    ``filled`` is then the number of bytes that they filled, else 0.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.filled = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        this_process = os.getpid()
        while True:
            used_bytes = used(this_process)
            if used_bytes > self._limit:
                used_bytes = used(this_process, exact=True)
            if used_bytes > self._limit:
                self.filled = used_bytes
                with suppress(ProcessLookupError):
                    # The kernel spares the sender and the first process of the namespace: both are
                    # this one.
                    os.kill(-1, signal.SIGKILL)
            time.sleep(ALERT_PERIOD_S if used_bytes > self._limit // 4 else CALM_PERIOD_S)


def used(but: int, exact: bool = False) -> int:
    """Return the bytes that every process but ``but`` has filled.

    They are written pages, memfd files and System V segments.
    """
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    others = [pid for pid in pids if pid != but]
    measure = filled_exactly if exact else filled
    return _segments() + measure(*others)


def _segments() -> int:
    """Return the bytes of System V segments."""
    with suppress(OSError), open("/proc/sysvipc/shm", encoding="utf-8") as file:
        header, *rows = (line.split() for line in file)
        column = header.index("rss")
        return sum(int(row[column]) for row in rows)
    return 0
