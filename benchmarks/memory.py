"""``bench memory``: whether a run grows.

A real run of any configuration, and the PSS of each of its actors step by step.

The slope is that of a least-squares line over the steps after the first quarter; the object store's
use is what Ray's node says on its metrics port.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import linear_regression, median

import httpx
import psutil

from benchmarks.measure import BenchFailed, machine, rollup
from rayloop.config.settings import load
from rayloop.run.records.jsonl import JsonLines

CHECK_EVERY_S = 0.2
"""Seconds between two looks at the run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, help="YAML file of a run")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="values to change"
    )
    parser.add_argument("--steps", type=int, default=200, help="over which processes are weighed")
    parser.set_defaults(run=_memory)


def _memory(arguments: argparse.Namespace) -> int:
    from rayloop.run.config import RunConfig

    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(prefix="") as temporary,
    ):  # sockets want short paths
        options = [*arguments.overrides, f"output={folder}", f"steps={arguments.steps}"]
        name = load(arguments.config, options, RunConfig).name
        command = [sys.executable, "-m", "rayloop", "train", str(arguments.config), *options]
        with subprocess.Popen(
            command, stdout=sys.stderr, env={**os.environ, "TMPDIR": temporary}
        ) as process:
            seen, store = _watch(process, Path(folder) / name / "metrics.jsonl", Path(temporary))
        if process.returncode:
            raise BenchFailed(f"the run ended with {process.returncode}; see above")
    print(
        json.dumps(
            {
                "config": str(arguments.config),
                "steps": arguments.steps,
                **_result(seen, store),
                "machine": machine(),
            }
        )
    )
    return 0


def _watch(
    process: subprocess.Popen[bytes], metrics: Path, temporary: Path
) -> tuple[dict[str, dict[int, float]], dict[int, float]]:
    """MiB of each actor, and of the object store, by step."""
    seen: dict[str, dict[int, float]] = defaultdict(dict)
    store: dict[int, float] = {}
    done = 0
    while process.poll() is None:
        time.sleep(CHECK_EVERY_S)
        step = sum(1 for _ in JsonLines(metrics)) if metrics.exists() else 0
        if step == done:
            continue
        done = step
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.Error, OSError):
                if (name := "".join(child.cmdline())).startswith("ray::") and "IDLE" not in name:
                    seen[f"{name.removeprefix('ray::').partition('.')[0]} {child.pid}"][step] = (
                        rollup(child.pid)["Pss"]
                    )
        if (used := _stored(temporary)) is not None:
            store[step] = used
    return seen, store


def _stored(temporary: Path) -> float | None:
    """MiB in the object store."""
    for file in temporary.rglob("metrics_export_port_*"):
        with suppress(httpx.TransportError, ValueError, OSError):
            page = httpx.get(
                f"http://127.0.0.1:{int(file.read_text(encoding='utf-8'))}/metrics", trust_env=False
            ).text
            lines = [
                line for line in page.splitlines() if line.startswith("ray_object_store_memory{")
            ]
            return sum(float(line.rpartition(" ")[2]) for line in lines) / 2**20
    return None


def _result(
    seen: Mapping[str, Mapping[int, float]], store: Mapping[int, float]
) -> dict[str, object]:
    last = max(max(steps) for steps in seen.values())
    kept = {
        name: _after(steps, last // 4) for name, steps in seen.items() if max(steps) > 0.9 * last
    }
    parts: Sequence[tuple[int, float]] = _after(store, last // 4)
    tenth = max(1, len(parts) // 10)
    return {
        "measured_steps": [last // 4, last],
        "mib_per_step": {
            name: round(linear_regression(*zip(*part, strict=True)).slope, 4)
            for name, part in kept.items()
        },
        "mib_at_end": {name: round(part[-1][1], 1) for name, part in kept.items()},
        "object_store_mib": {
            "begin": round(median(mib for _, mib in parts[:tenth]), 2),
            "end": round(median(mib for _, mib in parts[-tenth:]), 2),
        },
    }


def _after(steps: Mapping[int, float], first: int) -> list[tuple[int, float]]:
    return sorted((step, mib) for step, mib in steps.items() if step >= first)
