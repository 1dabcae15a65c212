"""The process on its machine: the cores that it may use, its open files, the memory that it keeps.

The module imports no torch, and works on every system. Training, serving and sandboxes need Linux;
looking at rows, settings and runs does not.
"""

import ctypes
import logging
import os
import sys
from pathlib import Path

from rayloop.core.failures import ConfigError

if sys.platform != "win32":
    import resource

CGROUP = Path("/sys/fs/cgroup")


def quota(group: Path = CGROUP) -> float | None:
    """Return the control group's limit in cores (``docker --cpus``).

    None without a limit, and with version 1 of cgroups.
    """
    try:
        share, period = (group / "cpu.max").read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return None
    return None if share == "max" else int(share) / int(period)


def cores() -> int:
    """Return the number of cores that the process may run on.

    These are all of the machine's where the system has no affinity (macOS, Windows).
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable(group: Path = CGROUP) -> int:
    """Return whole cores, at least one: the affinity, cut to the control group's limit."""
    allowed = cores()
    return max(1, min(allowed, int(quota(group) or allowed)))


def per_process(processes: int) -> int:
    """Return the torch threads of each of ``processes`` that compute at once: an equal share."""
    return max(1, usable() // max(1, processes))


def open_files() -> tuple[int, int]:
    """Return the soft and the hard limit of open files; -1: none."""
    if sys.platform == "win32":
        return (-1, -1)
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def needs_linux(what: str) -> None:
    """Raise ConfigError on another system than Linux."""
    if sys.platform != "linux":
        raise ConfigError(
            f"{what} needs Linux (on Windows: WSL2). `data validate`, `try`, `doctor`, `estimate`,"
            " `report` and `console` work here"
        )


logger = logging.getLogger(__name__)

# Parameters of mallopt, in glibc's malloc.h, and their values.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_TRIM_NEVER = -1
_LARGEST_INT = 2**31 - 1


def keep_freed() -> None:
    """Let this process keep the memory that it frees.

    glibc otherwise gives blocks above 32 MiB back, and the kernel fills each page with zeros again:
    an eighth of the CPU time of an update (docs/performance.md). Does nothing with another C
    library.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    # The first keeps large blocks on the heap, the second keeps the heap from shrinking.
    if not (mallopt(_MMAP_THRESHOLD, _LARGEST_INT) and mallopt(_TRIM_THRESHOLD, _TRIM_NEVER)):
        logger.info(
            "the C library gives freed memory back at once: updates on this CPU take somewhat"
            " longer"
        )


def grow_segments() -> None:
    """Let PyTorch grow its blocks on a GPU instead of adding blocks.

    Micro-batches differ in length. Call it before torch is imported. Environment variables of the
    user win.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        # PyTorch reads the older name, too, so a user's value there counts.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
