"""CPU seconds of a process and its descendants over time, from /proc: what has ended counts up to
the last look. Linux only.
"""

from __future__ import annotations

import os
import re
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

CHECK_EVERY_S = 0.25
"""Seconds between two looks."""
TICK = 1 / os.sysconf("SC_CLK_TCK")
DAEMONS = {
    "gcs_server": "GCS",
    "raylet/raylet": "raylet",
    "dashboard/dashboard.py": "dashboard",
    "dashboard/agent.py": "agent",
    "runtime_env/agent/main.py": "runtime-env agent",
    "log_monitor.py": "log monitor",
    "monitor.py": "autoscaler",
    "setup_worker.py": "IDLE",
    "default_worker.py": "IDLE",
}
"""Part of a command -> what the process is called here."""
IDLE = "IDLE"
"""Ray's own name of a worker that is no actor yet."""


class Tree:
    """CPU seconds of a process and its descendants, over time."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._names: dict[tuple[int, str], str] = {}
        self._looks: list[tuple[float, dict[tuple[int, str], float]]] = []
        """When, and what each process (id and start time) had used until then, ended ones included.
        """

    def look(self) -> None:
        """Note what has been used so far."""
        found = _processes()
        children = defaultdict(list)
        for pid, (parent, _, _) in found.items():
            children[parent].append(pid)
        used = dict(self._looks[-1][1]) if self._looks else {}
        wanted = [self._root]
        for pid in wanted:
            if pid in found:
                wanted += children[pid]
                _, begun, seconds = found[pid]
                used[pid, begun] = seconds
                name = "command line" if pid == self._root else _name(pid)
                if (
                    name != IDLE or (pid, begun) not in self._names
                ):  # a worker between two calls is still an actor
                    self._names[pid, begun] = name
        self._looks.append((time.time(), used))

    @property
    def seconds(self) -> float:
        """Of all of them together, until the last look."""
        return sum(self._looks[-1][1].values()) if self._looks else 0.0

    def until(self, when: float) -> float:
        """The same until then (Unix seconds); 0 before the first look."""
        return sum(self._until(process, when) for process in self._names) if self._looks else 0.0

    def parts(self, began: float, ends: Mapping[str, float]) -> dict[str, dict[str, float]]:
        """Kind of process (``3 idle workers``) -> part -> CPU seconds."""
        kinds: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for process, name in self._names.items():
            kinds[name].append(process)
        many = {name: f"{len(own)} {name}" if len(own) > 1 else name for name, own in kinds.items()}
        used = {
            many[name]: [sum(self._until(p, end) for p in own) for end in ends.values()]
            for name, own in kinds.items()
        }
        return {
            name: {
                part: round(now - before, 2)
                for part, now, before in zip(ends, sums, [0.0, *sums], strict=False)
            }
            for name, sums in sorted(used.items(), key=lambda item: -item[1][-1])
        }

    def _until(self, process: tuple[int, str], when: float) -> float:
        """CPU seconds of a process until then, between two looks in proportion."""
        at = min(bisect_left(self._looks, when, key=lambda look: look[0]), len(self._looks) - 1)
        after, then = self._looks[at]
        if at == 0:
            return then.get(process, 0.0)
        before, first = self._looks[at - 1]
        low, high = first.get(process, 0.0), then.get(process, 0.0)
        return low + (high - low) * min((when - before) / (after - before), 1.0)


def _processes() -> dict[int, tuple[int, str, float]]:
    """Process id -> parent, start time, CPU seconds, of all processes of the machine."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                fields = (
                    Path(f"/proc/{entry}/stat")
                    .read_text(encoding="utf-8")
                    .rpartition(")")[2]
                    .split()
                )
                found[int(entry)] = (
                    int(fields[1]),
                    fields[19],
                    (int(fields[11]) + int(fields[12])) * TICK,
                )
    return found


def _name(pid: int) -> str:
    """What kind of process it is.

    Ray writes an actor's class and name over the command of its process.
    """
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return IDLE
    if (actor := re.match(r"ray::(\w+)", words[0])) is not None:
        return actor[1]
    begin = " ".join(words[:3])  # the raylet's further arguments are the commands of others
    return next(
        (name for part, name in DAEMONS.items() if part in begin), Path(words[0]).name or IDLE
    )
