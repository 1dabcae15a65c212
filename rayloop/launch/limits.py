"""The memory limit of this process: that of its control groups, of versions 1 and 2, and of its
Slurm job. Ray and psutil see the machine's memory, or at most the limit of the container's own
group; a scheduler's job is in one below it.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
NO_LIMIT = 2**60
"""Bytes from which version 1 means none."""
MIB = 2**20


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """``most`` bytes, of which ``used`` are taken (None: unknown); ``by`` names who set the limit."""

    most: int
    used: int | None
    by: str


def memory_limit(
    environment: Mapping[str, str] = os.environ, groups: Path = GROUPS, own: Path = OWN
) -> MemoryLimit | None:
    """The lowest limit that holds for this process; None without one."""
    return min(
        [*_of_groups(groups, own), *_of_slurm(environment)],
        key=lambda limit: limit.most,
        default=None,
    )


def _of_groups(groups: Path, own: Path) -> Iterator[MemoryLimit]:
    """The limits of the group that this process is in, and of those above it."""
    names = (
        (Path(), "memory.max", "memory.current"),
        (Path("memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
    )
    for below, most, used in names:
        top = groups / below
        found = top / _path(own, controller=str(below) if below.parts else "").lstrip("/")
        for folder in (found, *found.parents):
            if not folder.is_relative_to(top):
                break
            if (limit := _number(folder / most)) is not None and limit < NO_LIMIT:
                yield MemoryLimit(limit, _number(folder / used), f"the control group {folder}")


def _path(own: Path, controller: str) -> str:
    """Where in the hierarchy of ``controller`` ("": version 2) this process is; "/" when that is
    unknown.
    """
    try:
        lines = [line.split(":", 2) for line in own.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return "/"
    return next((path for _, names, path in lines if controller in names.split(",")), "/")


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # "max"
        return None


def _of_slurm(environment: Mapping[str, str]) -> Iterator[MemoryLimit]:
    """The memory that the job asked for on this node, in MiB; 0 is all of it."""
    for name, times in (("SLURM_MEM_PER_NODE", "1"), ("SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE")):
        asked, count = environment.get(name, "0"), environment.get(times, times)
        if asked.isdigit() and count.isdigit() and int(asked) * int(count):
            yield MemoryLimit(int(asked) * int(count) * MIB, None, f"{name} of the Slurm job")


SHARED = Path("/dev/shm")
SHARE, FITS = 0.3, 0.9
"""Of the limit that Ray's object store gets (Ray's own share of the machine), and of the shared
memory that it lies in.
"""
LEAST = 75 * MIB
"""Bytes of an object store that Ray takes."""


def ray_memory(
    store: int | None, limit: MemoryLimit | None, shared: Path = SHARED
) -> dict[str, int]:
    """Options of ``ray start``, in bytes, for a node below ``limit``; ``store`` is what was asked
    for. Empty when Ray may count.
    """
    if limit is None or limit.most >= psutil.virtual_memory().total:
        return {} if store is None else {"--object-store-memory": store}
    if store is None:
        room = shutil.disk_usage(shared).free if shared.is_dir() else limit.most
        store = max(LEAST, int(min(SHARE * limit.most, FITS * room)))
    # The store's pages count against the same limit, so tasks get what it leaves.
    return {"--object-store-memory": store, "--memory": max(0, limit.most - store)}
