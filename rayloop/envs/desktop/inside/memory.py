"""Sums the memory of all processes of a desktop from /proc, as its first process, and ends them when it is too much."""

import os
import signal
import stat
import threading
import time
from contextlib import suppress

_OWN, _SHARE = ("RssAnon:", "RssShmem:"), ("Pss_Anon:", "Pss_Shmem:")
BLOCK = 512
CALM, ALERT = 0.5, 0.05
"""Seconds between two looks: while little is filled, and beyond a quarter of the limit."""


class Watch:
    """Ends every process but this one when they fill more than ``limit`` bytes together; ``filled`` is then how many they did."""

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
                    os.kill(-1, signal.SIGKILL)
            time.sleep(ALERT if now > self._limit // 4 else CALM)


def used(but: int, exact: bool = False) -> int:
    """Bytes of written pages of every process but ``but``, of memfd files and System V segments."""
    whole, seen = _segments(), set[int]()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != but:
            with suppress(OSError):
                whole += _pages(name, exact)
                whole += _anonymous_files(name, seen)  # refused for processes of another user, such as X's
    return whole


def _pages(pid: str, exact: bool) -> int:
    if exact:
        with suppress(OSError), open(f"/proc/{pid}/smaps_rollup", encoding="utf-8") as file:
            if found := [int(line.split()[1]) << 10 for line in file if line.startswith(_SHARE)]:
                return sum(found)
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:  # another user's, and older kernels
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith(_OWN))


def _anonymous_files(pid: str, seen: set[int]) -> int:
    whole = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            path = f"/proc/{pid}/fd/{name}"
            found = os.stat(path)
            nameless = stat.S_ISREG(found.st_mode) and not found.st_nlink
            if nameless and found.st_ino not in seen and os.readlink(path).startswith("/memfd:"):
                seen.add(found.st_ino)
                whole += found.st_blocks * BLOCK
    return whole


def _segments() -> int:
    with suppress(OSError), open("/proc/sysvipc/shm", encoding="utf-8") as file:
        header, *lines = (line.split() for line in file)
        return sum(int(line[header.index("rss")]) for line in lines)
    return 0
