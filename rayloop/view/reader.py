"""What a run folder has on record, read back for people: needs neither Ray, nor torch, nor the
model.
"""

import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from rayloop.config.settings import Component
from rayloop.core.protocols import BoxReader
from rayloop.measure.controls import RIGHT
from rayloop.run.folder import RunFolder
from rayloop.run.records.jsonl import JsonLines

Record = dict[str, Any]
T = TypeVar("T")
ENDS = ("finished", "preempted", "failed")


class Tail:
    """The records of a file that grows.

    Each is parsed once, and all anew after the file was replaced. Thread-safe.
    """

    def __init__(self, file: JsonLines) -> None:
        self._file, self._lock = file, threading.Lock()
        self._records, self._read, self._inode = list[Record](), 0, 0

    def records(self) -> list[Record]:
        """All records up to now; nobody changes the list. Raises OSError."""
        with self._lock:
            found = self._file.path.stat() if self._file.path.exists() else None
            if found is None or found.st_ino != self._inode or found.st_size < self._read:
                self._records, self._read, self._inode = [], 0, found.st_ino if found else 0
            if found and found.st_size > self._read:
                new, self._read = self._file.since(self._read)
                self._records = [*self._records, *new] if new else self._records
            return self._records


def box_reader(config: Mapping[str, Any]) -> BoxReader | None:
    """What ``report.boxes`` names. Raises ConfigError when it cannot be loaded."""
    named = (config.get("report") or {}).get("boxes")
    return Component.model_validate(named).build() if named else None


def by_step(events: Iterable[Record], name: str) -> dict[int, Record]:
    """Step -> the event called ``name``. What a later restore superseded is left out."""
    found: dict[int, Record] = {}
    for event in events:
        if event["event"] == "begin":
            found = {step: record for step, record in found.items() if step <= event["step"]}
        elif event["event"] == name:
            found[event["step"]] = event
    return found


def series(records: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, float | None]]]:
    """Metric -> (step, value) pairs in order; None where the number was not finite."""
    found: dict[str, list[tuple[int, float | None]]] = {}
    for record in records:
        for name, value in record.items():
            if name not in ("schema_version", "time", "step", "event"):
                found.setdefault(name, []).append((int(record["step"]), value))
    return found


def matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The names that fit a pattern, in the order of the patterns; ``*`` stands for text without a
    slash.
    """
    names, fits = (
        list(names),
        [re.compile(re.escape(p).replace(r"\*", "[^/]+")).fullmatch for p in patterns],
    )
    return list(dict.fromkeys(name for fit in fits for name in names if fit(name)))


def rollout_groups(folder: RunFolder) -> Iterator[list[Record]]:
    """The recorded groups, each as the records of its members, by step and group number."""
    for step in folder.rollouts.files():
        found = members(folder, step)
        yield from (found[number] for number in sorted(found))


def members(folder: RunFolder, step: int) -> dict[int, list[Record]]:
    """Group -> the records of its members, of one step; empty when none is on record."""
    found: dict[int, list[Record]] = {}
    for record in folder.rollouts.read(step):
        found.setdefault(record["group"], []).append(record)
    return found


def compared(folder: RunFolder) -> list[tuple[Record, ...]]:
    """By task, from the largest gain to the largest loss: the answers of the first and of the last
    evaluation to the task's own image; none without two evaluations.
    """
    steps = list(folder.evaluations.files())
    pairs = answers(folder, steps[0], steps[-1]) if len(steps) > 1 else []
    return sorted(pairs, key=lambda pair: (pair[0]["reward"] or 0.0) - (pair[1]["reward"] or 0.0))


def answers(folder: RunFolder, *steps: int) -> list[tuple[Record, ...]]:
    """By task: its first answer to the own image in each of these evaluations; tasks that one of
    them lacks are left out.
    """
    found = [
        {r["task"]: {**r, "step": step} for r in folder.evaluations.read(step) if _first(r)}
        for step in steps
    ]
    return [
        tuple(by[task] for by in found)
        for task in sorted(set.intersection(*(set(by) for by in found)))
    ]


def _first(item: Record) -> bool:
    return item["arm"] == RIGHT and not item.get("sample")


def evenly(items: Sequence[T], count: int) -> list[T]:
    """At most ``count`` of the items, evenly spread, in order, the first included."""
    return (
        [items[index * len(items) // count] for index in range(count)]
        if len(items) > count
        else list(items)
    )
