"""``report --files``: a run's records in the two forms that other tools ask for, made of what the run folder has already.

    training_metrics.json      {"schema_version", "steps": [...], "metrics": {name: [of each step, or null]}}
    task_results/<task>.json   {"schema_version", "task", "source", "evaluations": [...], "training": [...]}

``evaluations`` are all held-out answers to the task, ``training`` those trajectories that the run has kept (``keep_rollouts``);
each has its step and reward (null: ``unscored`` says why). A task's name is quoted as in a URL to be a file's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rayloop.core.files import write_whole
from rayloop.run.folder import RolloutDump, RunFolder
from rayloop.run.records.jsonl import SCHEMA_VERSION, JsonLines, encode
from rayloop.view.reader import open_run, series

METRICS, RESULTS = "training_metrics.json", "task_results"
HELD_OUT = ("step", "arm", "sample", "reward", "components", "unscored")
TRAINED = ("step", "group", "sample", "end_reason", "reward", "components", "flags", "unscored", "status", "replayed")
_LONGEST = 200
"""Bytes of a file's name; file systems take 255."""


def write_files(run: Path) -> list[Path]:
    """Write ``training_metrics.json`` and ``task_results`` into the run's folder, replacing earlier ones, and return both.
    Raises ConfigError for a folder without a run."""
    folder = open_run(run)
    results = folder.path / RESULTS
    results.mkdir(exist_ok=True)
    for old in results.glob("*.json"):
        old.unlink()
    for number, (task, found) in enumerate(task_results(folder).items()):
        name = quote(task, safe=" ,=@")
        name = name if len(name) <= _LONGEST else f"{name[:_LONGEST]}-{number}"
        write_whole(results / f"{name}.json", _bytes({"task": task, **found}), durable=False)
    write_whole(folder.path / METRICS, _bytes(training_metrics(folder)), durable=False)
    return [folder.path / METRICS, results]


def training_metrics(folder: RunFolder) -> dict[str, Any]:
    """Each metric's values [steps]."""
    records = list(folder.metrics)
    steps = [int(record["step"]) for record in records]
    return {
        "steps": steps,
        "metrics": {name: [dict(points).get(step) for step in steps] for name, points in series(records).items()},
    }


def task_results(folder: RunFolder) -> dict[str, dict[str, Any]]:
    """Task -> its source, its held-out answers and its trajectories, in the order of steps."""
    found: dict[str, dict[str, Any]] = {}
    for kind, dump, keys in (("evaluations", folder.evaluations, HELD_OUT), ("training", folder.rollouts, TRAINED)):
        for record in _records(dump):
            empty: dict[str, Any] = {"source": record["source"], "evaluations": [], "training": []}
            of_task = found.setdefault(record["task"], empty)
            of_task[kind].append({key: record[key] for key in keys if key in record})
    return found


def _records(dump: RolloutDump) -> Iterator[Mapping[str, Any]]:
    for file in dump.files().values():
        yield from JsonLines(file)


def _bytes(content: Mapping[str, Any]) -> bytes:
    return (encode({"schema_version": SCHEMA_VERSION, **content}) + "\n").encode()
