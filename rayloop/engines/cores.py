"""The cores that this process may use, and its share of them."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def quota(group: Path = CGROUP) -> float | None:
    """Returns the control group's limit in cores (``docker --cpus``); None without a limit, and with version 1 of cgroups."""
    try:
        share, period = (group / "cpu.max").read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return None
    return None if share == "max" else int(share) / int(period)


def usable(group: Path = CGROUP) -> int:
    """Returns whole cores, at least one: the process's affinity, cut to the control group's limit."""
    allowed = len(os.sched_getaffinity(0))
    return max(1, min(allowed, int(quota(group) or allowed)))


def per_process(processes: int) -> int:
    """Returns the torch threads of each of ``processes`` that compute on this machine at the same time: an equal share."""
    return max(1, usable() // max(1, processes))
