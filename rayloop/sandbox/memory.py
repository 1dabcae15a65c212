"""The memory that processes fill, from /proc: pages that they wrote, private and shared, and files
in memory without a name; and a cgroup that bounds what /proc does not show. Standard library only,
since desktops and agents run it in Pythons of their own.
"""

import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

BLOCK = 512
"""Bytes of a block, in which ``stat`` counts."""
ENDING = 2.0
"""Seconds in which processes that were killed have ended."""
AT_ONCE = 1 << 20
"""Bytes for which the kernel asks a cgroup at once, so that it may be refused so much below its
limit.
"""
_OWN = ("RssAnon:", "RssShmem:", "VmSwap:")
"""Lines of ``status``: written pages, each counted for every process that has it."""
_SHARES = ("Pss_Anon:", "Pss_Shmem:", "SwapPss:")
"""Lines of ``smaps_rollup``: the same, each page divided among the processes that have it."""
_LIMITS = (
    ("memory.max", "memory.swap.max"),
    ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
)
"""Files with the limits of cgroups of version 2 (memory, and swap) and of version 1 (memory, and
both together).
"""


def tree(root: int) -> list[int]:
    """The process and its descendants, parents first; empty when it has ended."""
    found = [root] if os.path.exists(f"/proc/{root}") else []
    # The list grows while it is walked, so children of children are found too.
    for pid in found:
        found += children(pid)
    return found


def children(pid: int) -> list[int]:
    """The children of all threads of a process; none when it has ended."""
    found: list[int] = []
    for thread in _threads(pid):
        with (
            suppress(OSError),
            open(f"/proc/{pid}/task/{thread}/children", encoding="utf-8") as file,
        ):
            found += map(int, file.read().split())
    return found


def lives(pid: int) -> bool:
    """Whether the process, or a thread of it, still runs.

    One that has ended stays in /proc until its parent asks for its code.
    """
    with suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        # A program's name, in parentheses before the state, may hold blanks and parentheses itself.
        state = file.read().rpartition(") ")[2][:1]
        return state not in ("Z", "X") or len(_threads(pid)) > 1
    return False


def filled(*pids: int) -> int:
    """Bytes of their written pages, shared or not, and of their memfd files.

    Pages that several of them share count once for each: ``filled_exactly`` divides them, and takes
    longer.
    """
    return _sum(pids, _OWN, "status")


def filled_exactly(*pids: int) -> int:
    """As ``filled``, with each shared page divided among the processes that have it, where this
    user may ask for that.
    """
    return _sum(pids, _SHARES, "smaps_rollup")


def beyond(limit: float, pids: Sequence[int]) -> int:
    """How many bytes they fill together when that is more than ``limit``, else 0."""
    # This sum is never too low, since it counts shared pages several times, and it costs less.
    if filled(*pids) <= limit:
        return 0
    exactly = filled_exactly(*pids)
    return exactly if exactly > limit else 0


@contextmanager
def bounded(limit: int) -> Iterator[str]:
    """The file into which a process writes 0 to have at most ``limit`` bytes together with its
    descendants, of all kinds that the kernel counts; "" where no cgroup can be made. Its processes
    must have been killed when it is left.
    """
    folder = ""
    with suppress(OSError):
        folder = _cgroup(limit)
    try:
        yield f"{folder}/cgroup.procs" if folder else ""
    finally:
        if folder:
            _removed(folder)


def kernel_kills(group: str = "") -> int:
    """Processes that the kernel has ended because memory was short: those of a cgroup, or all of
    this machine.
    """
    if not group:
        return _counted("/proc/vmstat", "oom_kill")
    return _counted(f"{group}/memory.events", "oom_kill") + _counted(
        f"{group}/memory.oom_control", "oom_kill"
    )


def limit_was_reached(group: str) -> bool:
    """Whether the processes of a cgroup were refused memory by its own limit.

    Version 1 counts no refusals on new kernels, so there the most that they had decides.
    """
    most, limit = (
        _counted(f"{group}/memory.{name}_in_bytes", "") for name in ("max_usage", "limit")
    )
    return _counted(f"{group}/memory.events", "oom") > 0 or most + AT_ONCE >= limit > 0


def machine_was_short(group: str, before: int) -> bool:
    """Whether the kernel ended one of these processes although their cgroup has not reached its
    limit. Without a cgroup: whether it ended any of this machine since ``before``, as nobody knows
    whose it was.
    """
    if group:
        return kernel_kills(group) > 0 and not limit_was_reached(group)
    return kernel_kills() > before


def _counted(path: str, name: str) -> int:
    """The number behind ``name``, or, with an empty name, in a file that has only a number; 0 where
    there is none.
    """
    with suppress(OSError), open(path, encoding="utf-8") as file:
        for line in file:
            before, _, number = line.strip().rpartition(" ")
            if before == name:
                return int(number)
    return 0


def _removed(folder: str) -> None:
    """Remove a cgroup as soon as its processes, which were killed, have ended."""
    until = time.monotonic() + ENDING
    while time.monotonic() < until:
        with suppress(OSError):
            os.rmdir(folder)
            return
        time.sleep(0.01)


def _sum(pids: Iterable[int], lines: tuple[str, ...], where: str) -> int:
    whole, seen = 0, set[tuple[int, int]]()
    for pid in pids:
        whole += _pages(pid, lines, where) + _nameless(pid, seen)
    return whole


def _pages(pid: int, lines: tuple[str, ...], where: str) -> int:
    """The sum of these lines, of the first thread that has some: a process may have lost its first
    thread and live.
    """
    for thread in _threads(pid):
        with (
            suppress(OSError),
            open(f"/proc/{thread}/{where}", encoding="utf-8", errors="replace") as file,
        ):
            found = [int(line.split()[1]) << 10 for line in file if line.startswith(lines)]
            if found:
                return sum(found)
    return (
        _pages(pid, _OWN, "status") if where != "status" else 0
    )  # another user's, and older kernels


def _nameless(pid: int, seen: set[tuple[int, int]]) -> int:
    """Bytes of the memfd files that it has open; refused for processes of another user, such as
    X's.
    """
    whole = 0
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                path = f"/proc/{pid}/fd/{name}"
                found = os.stat(path)
                mark = found.st_dev, found.st_ino
                # A file on disk that was deleted while open has no link either: the path decides.
                nameless = stat.S_ISREG(found.st_mode) and not found.st_nlink
                if nameless and mark not in seen and os.readlink(path).startswith("/memfd:"):
                    seen.add(mark)
                    whole += found.st_blocks * BLOCK
    return whole


def _threads(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def _cgroup(limit: int) -> str:
    """A new cgroup below that of this process, whose limits hold for it too; "" where none can be
    made. Raises OSError.
    """
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        lines = [line.strip().split(":", 2) for line in file]
    for _, controllers, path in lines:
        if controllers and "memory" not in controllers.split(","):
            continue
        root = "/sys/fs/cgroup/memory" if controllers else "/sys/fs/cgroup"
        first, swapped = _LIMITS[1] if controllers else _LIMITS[0]
        folder = os.path.join(root, path.lstrip("/"), f"rayloop-{secrets.token_hex(8)}")
        if not os.path.exists(os.path.join(os.path.dirname(folder), "cgroup.procs")):
            continue
        os.mkdir(folder)
        try:
            _write(f"{folder}/{first}", limit)
        except OSError:  # no memory controller for its children
            os.rmdir(folder)
            continue
        # A kernel that does not account for swap lacks this file.
        with suppress(OSError):
            _write(f"{folder}/{swapped}", limit if controllers else 0)
        return folder
    return ""


def _write(path: str, number: int) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(str(number))
