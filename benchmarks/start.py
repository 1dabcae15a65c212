"""``bench start``: a run as a user starts it, until its first step is trained: seconds, and CPU
seconds of every process.

The run is a process of its own; all its descendants are looked at every ``CHECK_EVERY_S`` seconds
in /proc, so that what a process used counts also after its end (but for its last moment), with any
parent. Linux only.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.measure import BenchFailed, machine
from benchmarks.processes import CHECK_EVERY_S, Tree
from benchmarks.step import Shape, add_shape, prepare
from rayloop.core.failures import ConfigError
from rayloop.run.records.jsonl import JsonLines

FIRST_STEP_TIMEOUT_S = 600.0
"""Seconds after which a run without a first step is given up."""
PARTS = {
    "start": "Ray is up",
    "starting": "driver is up",
    "started": "actors are up",
    "logprob_check": "synced and compared",
    "self_test": "self-test",
    "evaluated": "evaluation",
    "step": "first step",
}
"""Event -> the part that its last record before the first step ends."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, nargs="?", metavar="CONFIG", help="YAML file of a run")
    add_shape(parser, model=False)  # the run of `bench step` instead of CONFIG's
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="of the configuration"
    )
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
    """Start the run with its folder below ``output`` and end it after its first step.

    Raises BenchFailed.
    """
    command = [
        sys.executable,
        "-m",
        "rayloop",
        "train",
        str(config),
        *overrides,
        f"output={output}",
        "name=start",
    ]
    began, folder = time.time(), output / "start"
    with tempfile.TemporaryFile("w+", encoding="utf-8") as said:
        run = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        tree = Tree(run.pid)
        try:
            while not (records := list(JsonLines(folder / "metrics.jsonl"))):
                if run.poll() is not None or time.time() > began + FIRST_STEP_TIMEOUT_S:
                    said.seek(0)
                    raise BenchFailed(
                        f"{' '.join(command)} had no first step:\n{said.read()[-2000:]}"
                    )
                tree.look()
                time.sleep(CHECK_EVERY_S)
            tree.look()
        finally:
            with suppress(ProcessLookupError):
                run.send_signal(signal.SIGTERM)  # it saves, and ends its cluster
            run.wait(FIRST_STEP_TIMEOUT_S)
    ends = until(list(JsonLines(folder / "events.jsonl")), records[0]["time"])
    return {"wall_s": _lengths(ends, began), "cpu_s": tree.parts(began, ends)}


def until(events: Sequence[Mapping[str, Any]], stepped: float) -> dict[str, float]:
    """When each part ended (Unix seconds), in order."""
    times = {event["event"]: event["time"] for event in events if event["time"] < stepped} | {
        "step": stepped
    }
    return dict(
        sorted(
            ((name, times[kind]) for kind, name in PARTS.items() if kind in times),
            key=lambda end: end[1],
        )
    )


def _lengths(ends: Mapping[str, float], began: float) -> dict[str, float]:
    times = [began, *ends.values()]
    return {
        name: round(end - before, 2)
        for (name, end), before in zip(ends.items(), times, strict=False)
    }


def table(found: Mapping[str, Any]) -> str:
    """Markdown: parts as columns, processes as rows."""
    wall: Mapping[str, float] = found["wall_s"]
    rows = {"wall": wall, **found["cpu_s"]}
    rows["CPU of all"] = {
        part: sum(used[part] for used in found["cpu_s"].values()) for part in wall
    }
    lines = [["seconds until", *wall, "in all"], ["---"] * (len(wall) + 2)]
    lines += [
        [name, *(f"{row[part]:.1f}" for part in wall), f"{sum(row.values()):.1f}"]
        for name, row in rows.items()
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
