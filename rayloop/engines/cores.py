"""How many cores this process may use."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def quota(group: Path = CGROUP) -> float | None:
    """The cores that the control group is limited to (``docker --cpus``); None without a limit, and without version 2 of them."""
    try:
        share, period = (group / "cpu.max").read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return None
    return None if share == "max" else int(share) / int(period)


def usable(group: Path = CGROUP) -> int:
    """Whole cores, at least one: those the process may run on, and no more than the control group's limit."""
    allowed = len(os.sched_getaffinity(0))
    return max(1, min(allowed, int(quota(group) or allowed)))
