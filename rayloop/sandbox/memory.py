"""The memory that processes fill, and a cgroup that bounds it.

/proc shows the pages that they wrote, private and shared, and files in memory without a name; the
cgroup also bounds what /proc does not show. Standard library only, since desktops and agents run
this module in other Pythons.
"""

import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

BLOCK_BYTES = 512
"""Bytes of a block, in which ``stat`` counts."""
EXIT_TIMEOUT_S = 2.0
"""Seconds in which processes that were killed have ended."""
CHARGED_AT_ONCE_BYTES = 1 << 20
"""Bytes that the kernel charges to a cgroup at once.

It may refuse memory when the use is that far below the limit.
"""
_STATUS_LINES = ("RssAnon:", "RssShmem:", "VmSwap:")
"""Lines of ``status``: written pages, each counted for every process that has it."""
_SMAPS_LINES = ("Pss_Anon:", "Pss_Shmem:", "SwapPss:")
"""Lines of ``smaps_rollup``: written pages, each divided among the processes that have it."""
_LIMIT_FILES_V1 = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
"""Files of a cgroup of version 1 with the limits of memory, and of memory and swap together."""
_LIMIT_FILES_V2 = ("memory.max", "memory.swap.max")
"""Files of a cgroup of version 2 with the limits of memory, and of swap."""


def tree(root: int) -> list[int]:
    """The process and its descendants, parents first; empty when it has ended."""
    pids = [root] if os.path.exists(f"/proc/{root}") else []
    # The list grows while it is walked, so children of children are found too.
    for pid in pids:
        pids += children(pid)
    return pids


def children(pid: int) -> list[int]:
    """The children of all threads of a process; none when it has ended."""
    pids: list[int] = []
    for thread in _threads(pid):
        with (
            suppress(OSError),
            open(f"/proc/{pid}/task/{thread}/children", encoding="utf-8") as file,
        ):
            pids += map(int, file.read().split())
    return pids


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
    """Bytes of the written pages of processes, shared or not, and of their memfd files.

    Pages that several of them share count once for each: ``filled_exactly`` divides them, and takes
    longer.
    """
    return _sum(pids, _STATUS_LINES, "status")


def filled_exactly(*pids: int) -> int:
    """The bytes of ``filled``, with each shared page divided among the processes that have it.

    Where this user may not read that, the result is that of ``filled``.
    """
    return _sum(pids, _SMAPS_LINES, "smaps_rollup")


def beyond(limit: float, pids: Sequence[int]) -> int:
    """How many bytes processes fill together when that is more than ``limit``, else 0."""
    # This sum is never too low, since it counts shared pages several times, and it costs less.
    if filled(*pids) <= limit:
        return 0
    exactly = filled_exactly(*pids)
    return exactly if exactly > limit else 0


@contextmanager
def bounded(limit: int) -> Iterator[str]:
    """The file into which a process writes 0 to have at most ``limit`` bytes.

    The limit holds for the process and its descendants together, and for every kind of memory that
    the kernel counts. The file is "" where no cgroup can be made. The processes must have been
    killed when the context ends.
    """
    folder = ""
    with suppress(OSError):
        folder = _cgroup(limit)
    try:
        yield f"{folder}/cgroup.procs" if folder else ""
    finally:
        if folder:
            _remove(folder)


def kernel_kills(group: str = "") -> int:
    """The number of processes that the kernel has ended because memory was short.

    Without a cgroup: all such processes of this machine.
    """
    if not group:
        return _counter("/proc/vmstat", "oom_kill")
    # Version 2 has the first of these files, version 1 the second.
    files = ("memory.events", "memory.oom_control")
    return sum(_counter(f"{group}/{file}", "oom_kill") for file in files)


def limit_was_reached(group: str) -> bool:
    """Whether the processes of a cgroup were refused memory by its own limit.

    Version 1 counts no refusals on new kernels, so there the peak of their use decides.
    """
    if _counter(f"{group}/memory.events", "oom") > 0:
        return True
    peak = _counter(f"{group}/memory.max_usage_in_bytes", "")
    limit = _counter(f"{group}/memory.limit_in_bytes", "")
    return peak + CHARGED_AT_ONCE_BYTES >= limit > 0


def machine_was_short(group: str, before: int) -> bool:
    """Whether the kernel ended one of these processes because the machine was short of memory.

    With a cgroup: it ended one, and the cgroup has not reached its limit. Without one: whether it
    ended any process of this machine since ``before``, since its owner is unknown.
    """
    if group:
        return kernel_kills(group) > 0 and not limit_was_reached(group)
    return kernel_kills() > before


def _counter(path: str, name: str) -> int:
    """The number after ``name`` in a file of counters; 0 without the file or the name.

    With an empty name: the number of a file that has only a number.
    """
    with suppress(OSError), open(path, encoding="utf-8") as file:
        for line in file:
            key, _, number = line.strip().rpartition(" ")
            if key == name:
                return int(number)
    return 0


def _remove(folder: str) -> None:
    """Remove a cgroup as soon as its processes, which were killed, have ended."""
    until = time.monotonic() + EXIT_TIMEOUT_S
    while time.monotonic() < until:
        with suppress(OSError):
            os.rmdir(folder)
            return
        time.sleep(0.01)


def _sum(pids: Iterable[int], lines: tuple[str, ...], file_name: str) -> int:
    size = 0
    counted_files: set[tuple[int, int]] = set()
    for pid in pids:
        size += _page_bytes(pid, lines, file_name) + _memfd_bytes(pid, counted_files)
    return size


def _page_bytes(pid: int, lines: tuple[str, ...], file_name: str) -> int:
    """The sum of ``lines`` in the file of the first thread that has some.

    A process may have lost its first thread and live.
    """
    for thread in _threads(pid):
        path = f"/proc/{thread}/{file_name}"
        with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            sizes_kib = [int(line.split()[1]) for line in file if line.startswith(lines)]
            if sizes_kib:
                return sum(sizes_kib) << 10
    if file_name == "status":
        return 0
    # smaps_rollup of another user's process cannot be read, and older kernels lack some lines.
    return _page_bytes(pid, _STATUS_LINES, "status")


def _memfd_bytes(pid: int, counted_files: set[tuple[int, int]]) -> int:
    """Bytes of the memfd files that a process has open and that are not in ``counted_files``.

    The kernel refuses this for a process of another user, such as X's; it then counts as 0.
    """
    size = 0
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                path = f"/proc/{pid}/fd/{name}"
                status = os.stat(path)
                identity = (status.st_dev, status.st_ino)
                if identity in counted_files:
                    continue
                # A file on disk that was deleted while open has no link either: the path decides.
                is_unlinked = stat.S_ISREG(status.st_mode) and not status.st_nlink
                if is_unlinked and os.readlink(path).startswith("/memfd:"):
                    counted_files.add(identity)
                    size += status.st_blocks * BLOCK_BYTES
    return size


def _threads(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def _cgroup(limit: int) -> str:
    """A new cgroup below that of this process; "" where none can be made.

    The limits of the cgroup above hold for it too. Raises OSError.
    """
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        lines = [line.strip().split(":", 2) for line in file]
    for _, controllers, path in lines:
        # Only lines of version 1 name controllers.
        is_v1 = bool(controllers)
        if is_v1 and "memory" not in controllers.split(","):
            continue
        root = "/sys/fs/cgroup/memory" if is_v1 else "/sys/fs/cgroup"
        parent = os.path.join(root, path.lstrip("/"))
        if not os.path.exists(os.path.join(parent, "cgroup.procs")):
            continue
        folder = os.path.join(parent, f"rayloop-{secrets.token_hex(8)}")
        os.mkdir(folder)
        memory_file, swap_file = _LIMIT_FILES_V1 if is_v1 else _LIMIT_FILES_V2
        try:
            _write(f"{folder}/{memory_file}", limit)
        except OSError:
            # The cgroup above gives its children no memory controller.
            os.rmdir(folder)
            continue
        # A kernel that does not account for swap lacks this file.
        with suppress(OSError):
            _write(f"{folder}/{swap_file}", limit if is_v1 else 0)
        return folder
    return ""


def _write(path: str, number: int) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(str(number))
