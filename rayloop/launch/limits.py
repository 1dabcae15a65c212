"""The memory limit of this process: that of its control groups, and of its Slurm job.

Control groups may have version 1 or 2. Ray and psutil see the machine's memory, or at most the
limit of the container's group; a scheduler's job is in a group below it.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
NO_LIMIT_BYTES = 2**60
"""The least bytes at which a limit of version 1 means "unlimited"."""
MIB = 2**20


@dataclass(frozen=True)
class MemoryLimit:
    """A limit of ``most`` bytes, of which ``used`` are taken (None: unknown).

    ``by`` names the owner of the limit.
    """

    most: int
    used: int | None
    by: str


def memory_limit(
    environment: Mapping[str, str] = os.environ, groups: Path = GROUPS, own: Path = OWN
) -> MemoryLimit | None:
    """The lowest limit that holds for this process; None without one."""
    limits = [*_of_groups(groups, own), *_of_slurm(environment)]
    return min(limits, key=lambda limit: limit.most, default=None)


def _of_groups(groups: Path, own: Path) -> Iterator[MemoryLimit]:
    """The limits of the group that this process is in, and of those above it."""
    # Version 2 has one hierarchy, version 1 one for each controller.
    hierarchies = (
        ("", "memory.max", "memory.current"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    )
    for controller, limit_file, usage_file in hierarchies:
        top = groups / controller
        group = top / _path(own, controller).lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(top):
                break
            limit = _number(folder / limit_file)
            if limit is not None and limit < NO_LIMIT_BYTES:
                usage = _number(folder / usage_file)
                yield MemoryLimit(limit, usage, f"the control group {folder}")


def _path(own: Path, controller: str) -> str:
    """This process's group in the hierarchy of ``controller`` ("": version 2).

    It is "/" when the group is unknown.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return "/"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path
    return "/"


def _number(file: Path) -> int | None:
    """The number in a file; None without a number, for example for "max"."""
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _of_slurm(environment: Mapping[str, str]) -> Iterator[MemoryLimit]:
    """The memory of the job on this node. Slurm's variables are in MiB, and 0 is all of it."""
    cpus = environment.get("SLURM_CPUS_ON_NODE", "")
    for name, count in (("SLURM_MEM_PER_NODE", "1"), ("SLURM_MEM_PER_CPU", cpus)):
        amount = environment.get(name, "0")
        if not amount.isdigit() or not count.isdigit():
            continue
        total = int(amount) * int(count) * MIB
        if total:
            yield MemoryLimit(total, None, f"{name} of the Slurm job")


SHARED = Path("/dev/shm")
LIMIT_SHARE = 0.3
"""Share of the limit that Ray's object store gets, as Ray gives it of the machine's memory."""
SHARED_SHARE = 0.9
"""Share of the shared memory that the object store may take."""
MIN_OBJECT_STORE_BYTES = 75 * MIB
"""Bytes of the smallest object store that Ray accepts."""


def ray_memory(
    store: int | None, limit: MemoryLimit | None, shared: Path = SHARED
) -> dict[str, int]:
    """Options of ``ray start``, in bytes, for a node with ``limit``; empty when Ray may count.

    ``store``: the configured size of the object store.
    """
    if limit is None or limit.most >= psutil.virtual_memory().total:
        return {} if store is None else {"--object-store-memory": store}
    if store is None:
        free = shutil.disk_usage(shared).free if shared.is_dir() else limit.most
        store = max(MIN_OBJECT_STORE_BYTES, int(min(LIMIT_SHARE * limit.most, SHARED_SHARE * free)))
    # The store's pages count against the same limit, so tasks get what it leaves.
    return {"--object-store-memory": store, "--memory": max(0, limit.most - store)}
