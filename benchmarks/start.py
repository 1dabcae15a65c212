"""``bench start``: a run as a user starts it, until its first step is trained: seconds, and CPU seconds of every process.

The run is a process of its own; all its descendants are looked at every ``EVERY`` seconds in /proc, so that what a process
used counts also after its end (but for its last moment), whoever its parent was. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.measure import BenchFailed, machine
from benchmarks.step import Shape, add_shape, prepare
from rayloop.core.failures import ConfigError
from rayloop.run.jsonl import JsonLines

EVERY = 0.25
LIMIT = 600.0
"""Seconds after which a run without a first step is given up."""
TICK = 1 / os.sysconf("SC_CLK_TCK")
DAEMONS = {
    "gcs_server": "GCS", "raylet/raylet": "raylet", "dashboard/dashboard.py": "dashboard", "dashboard/agent.py": "agent",
    "runtime_env/agent/main.py": "runtime-env agent", "log_monitor.py": "log monitor", "monitor.py": "autoscaler",
    "setup_worker.py": "IDLE", "default_worker.py": "IDLE",
}  # fmt: skip
"""Part of a command -> what the process is called here."""
IDLE = "IDLE"
"""Ray's own name of a worker that is no actor yet."""
PARTS = {
    "start": "Ray is up", "starting": "driver is up", "started": "actors are up", "parity": "published and compared",
    "self_test": "self-test", "evaluated": "evaluation", "step": "first step",
}  # fmt: skip
"""Event -> the part that its last record before the first step ends."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, nargs="?", metavar="CONFIG", help="YAML file of a run")
    add_shape(parser, model=False)  # the run of `bench step` instead of CONFIG's
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="of the configuration")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    overrides = list(arguments.overrides)
    if arguments.config is not None and "=" in str(arguments.config):  # with --model there is none
        arguments.config, overrides = None, [str(arguments.config), *overrides]
    if (arguments.config is None) == (arguments.model is None):
        raise ConfigError("name a CONFIG or --model DIR, and not both")
    with tempfile.TemporaryDirectory() as temporary:
        config = arguments.config or prepare(Shape.of(arguments), "transformers", Path(temporary))
        found = measure(config, overrides, Path(temporary) / "runs")
    print(table(found))
    print(json.dumps({"tool": "rayloop", "config": str(config), **found, "machine": machine()}))
    return 0


def measure(config: Path, overrides: Sequence[str], output: Path) -> dict[str, Any]:
    """Start the run with its folder below ``output`` and end it after its first step. Raises BenchFailed."""
    command = [sys.executable, "-m", "cluster", "train", str(config), *overrides, f"output={output}", "name=start"]
    began, folder = time.time(), output / "start"
    with tempfile.TemporaryFile("w+") as said:
        run = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        tree = Tree(run.pid)
        try:
            while not (records := list(JsonLines(folder / "metrics.jsonl"))):
                if run.poll() is not None or time.time() > began + LIMIT:
                    said.seek(0)
                    raise BenchFailed(f"{' '.join(command)} had no first step:\n{said.read()[-2000:]}")
                tree.look()
                time.sleep(EVERY)
            tree.look()
        finally:
            with suppress(ProcessLookupError):
                run.send_signal(signal.SIGTERM)  # it saves, and ends its cluster
            run.wait(LIMIT)
    ends = until(list(JsonLines(folder / "events.jsonl")), records[0]["time"])
    return {"wall_s": _lengths(ends, began), "cpu_s": tree.parts(began, ends)}


def until(events: Sequence[Mapping[str, Any]], stepped: float) -> dict[str, float]:
    """When each part ended (Unix seconds), in order."""
    times = {event["event"]: event["time"] for event in events if event["time"] < stepped} | {"step": stepped}
    return dict(sorted(((name, times[kind]) for kind, name in PARTS.items() if kind in times), key=lambda end: end[1]))


def _lengths(ends: Mapping[str, float], began: float) -> dict[str, float]:
    times = [began, *ends.values()]
    return {name: round(end - before, 2) for (name, end), before in zip(ends.items(), times, strict=False)}


class Tree:
    """CPU seconds of a process and its descendants, over time."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._names: dict[tuple[int, str], str] = {}
        self._looks: list[tuple[float, dict[tuple[int, str], float]]] = []
        """When, and what each process (id and start time) had used until then, ended ones included."""

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
                if name != IDLE or (pid, begun) not in self._names:  # a worker between two calls is still an actor
                    self._names[pid, begun] = name
        self._looks.append((time.time(), used))

    @property
    def seconds(self) -> float:
        """Of all of them together, until the last look."""
        return sum(self._looks[-1][1].values()) if self._looks else 0.0

    def parts(self, began: float, ends: Mapping[str, float]) -> dict[str, dict[str, float]]:
        """Kind of process (``3 idle workers``) -> part -> CPU seconds."""
        kinds: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for process, name in self._names.items():
            kinds[name].append(process)
        many = {name: f"{len(own)} {name}" if len(own) > 1 else name for name, own in kinds.items()}
        used = {
            many[name]: [sum(self._until(p, end) for p in own) for end in ends.values()] for name, own in kinds.items()
        }
        return {
            name: {part: round(now - before, 2) for part, now, before in zip(ends, sums, [0.0, *sums], strict=False)}
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
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                found[int(entry)] = (int(fields[1]), fields[19], (int(fields[11]) + int(fields[12])) * TICK)
    return found


def _name(pid: int) -> str:
    """What kind of process it is. Ray writes an actor's class and name over the command of its process."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return IDLE
    if (actor := re.match(r"ray::(\w+)", words[0])) is not None:
        return actor[1]
    begin = " ".join(words[:3])  # the raylet's further arguments are the commands of others
    return next((name for part, name in DAEMONS.items() if part in begin), Path(words[0]).name or IDLE)


def table(found: Mapping[str, Any]) -> str:
    """Markdown: parts as columns, processes as rows."""
    wall: Mapping[str, float] = found["wall_s"]
    rows = {"wall": wall, **found["cpu_s"]}
    rows["CPU of all"] = {part: sum(used[part] for used in found["cpu_s"].values()) for part in wall}
    lines = [["seconds until", *wall, "in all"], ["---"] * (len(wall) + 2)]
    lines += [[name, *(f"{row[part]:.1f}" for part in wall), f"{sum(row.values()):.1f}"] for name, row in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
