"""What all measurements share: programs run in turn, the memory of process trees, and the machine
beside the figures.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from benchmarks.processes import CHECK_EVERY_S, Tree
from rayloop.core.failures import RayloopError

MEMORY_CHECK_EVERY_S = 1.0
"""Seconds between two looks at the memory of all processes."""


class BenchFailed(RayloopError):
    """One of the compared programs ended with an error."""


def alternately(
    commands: Mapping[str, Sequence[str]], rounds: int, describe: Callable[[Mapping[str, Any]], str]
) -> list[dict[str, dict[str, Any]]]:
    """What each program measured {name: result}, round by round, one after the other; prints what
    it does and finds.
    """
    found: list[dict[str, dict[str, Any]]] = []
    for number in range(1, rounds + 1):
        found.append({})
        for name, command in commands.items():
            print(f"round {number}: {shlex.join(command)}", file=sys.stderr, flush=True)
            found[-1][name] = measured(command)
        print(f"round {number}: {describe(found[-1])}", flush=True)
    return found


def measured(command: Sequence[str]) -> dict[str, Any]:
    """The last JSON object among the lines of a program's output.

    Raises BenchFailed.

    ``warm_steps`` [n + 1] in it are the Unix seconds at which n steps began and the last one ended;
    then it gets ``cpu_s_mean``, the CPU seconds that the program and all its descendants needed for
    a step.
    """
    # Our command line sets the variable for actors that share cores; the peer gets its own default.
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as said,
        tempfile.TemporaryFile("w+", encoding="utf-8") as blamed,
    ):
        run = subprocess.Popen(command, stdout=said, stderr=blamed, env=environment)
        tree = Tree(run.pid)
        while run.poll() is None:
            tree.look()
            time.sleep(CHECK_EVERY_S)
        said.seek(0)
        blamed.seek(0)
        if run.returncode:
            raise BenchFailed(
                f"{shlex.join(command)} ended with {run.returncode}:\n{blamed.read()[-2000:]}"
            )
        *_, last = (
            line for line in said if line.startswith("{")
        )  # vLLM logs to stdout even at its end
    result: dict[str, Any] = json.loads(last)
    if times := result.get("warm_steps"):
        spent = tree.until(times[-1]) - tree.until(times[0])
        result["cpu_s_mean"] = round(spent / (len(times) - 1), 3)
    return result


def machine() -> dict[str, Any]:
    """What the figures were measured on, and how busy it was (load average of the last minute)."""
    info = (
        Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").is_file() else ""
    )
    names = [
        line.partition(":")[2].strip()
        for line in info.splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
    }


class PeakMemory:
    """The most that this process and all its descendants held at once while the block ran, in MiB:
    RSS and PSS.

    RSS counts what processes share (libraries, Ray's object store) once for each of them, PSS once
    in all.
    """

    def __init__(self) -> None:
        self.rss = self.pss = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(MEMORY_CHECK_EVERY_S):
            rss, pss = tree_memory(psutil.Process())
            self.rss, self.pss = max(self.rss, rss), max(self.pss, pss)


def rollup(pid: int) -> dict[str, float]:
    """MiB by kind (``Rss``, ``Pss``, ...). Raises OSError when the process has ended."""
    parts = (
        line.split()
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]
    )
    return {name.rstrip(":"): int(kib) / 1024 for name, kib, _ in parts}


def tree_memory(root: psutil.Process) -> tuple[float, float]:
    """MiB of RSS and of PSS of a process and all its descendants; one that has just ended counts as
    nothing.
    """
    found = []
    for process in [root, *root.children(recursive=True)]:
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            found.append(rollup(process.pid))
    return sum(one.get("Rss", 0.0) for one in found), sum(one.get("Pss", 0.0) for one in found)
