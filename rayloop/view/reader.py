"""Reads the records of a run folder for reports and the console.

It needs neither Ray, nor torch, nor the model.
"""

import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

from rayloop.config.settings import Component
from rayloop.core.protocols import BoxReader
from rayloop.measure.controls import RIGHT
from rayloop.run.folder import RunFolder
from rayloop.run.records.jsonl import JsonLines
from rayloop.view.formatting import gained

Record = dict[str, Any]
T = TypeVar("T")
ENDS = ("finished", "preempted", "failed")


class Tail:
    """The records of a file that grows.

    Each is parsed once, and all are parsed again after the file was replaced. Thread-safe.
    """

    def __init__(self, file: JsonLines) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._records: list[Record] = []
        self._position = 0
        self._inode = 0

    def records(self) -> list[Record]:
        """All records up to now; nobody changes the list. Raises OSError."""
        with self._lock:
            path = self._file.path
            stat = path.stat() if path.exists() else None
            if stat is None or stat.st_ino != self._inode or stat.st_size < self._position:
                self._records = []
                self._position = 0
                self._inode = stat.st_ino if stat else 0
            if stat and stat.st_size > self._position:
                new_records, self._position = self._file.since(self._position)
                if new_records:
                    self._records = [*self._records, *new_records]
            return self._records


def box_reader(config: Mapping[str, Any]) -> BoxReader | None:
    """The component that ``report.boxes`` names. Raises ConfigError when it cannot be loaded."""
    component = (config.get("report") or {}).get("boxes")
    return Component.model_validate(component).build() if component else None


def by_step(events: Iterable[Record], name: str) -> list[Record]:
    """The event called ``name`` of each step, without the ones that a later restore superseded."""
    matches: dict[int, Record] = {}
    for event in events:
        if event["event"] == "begin":
            matches = {step: record for step, record in matches.items() if step <= event["step"]}
        elif event["event"] == name:
            matches[event["step"]] = event
    return list(matches.values())


def gains(events: Iterable[Record]) -> list[str]:
    """The sentences on the change of the held-out reward, in the order of the steps."""
    return list(chain.from_iterable(map(gained, by_step(events, "gain"))))


def series(records: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, float | None]]]:
    """Metric -> (step, value) pairs in order; None where the number was not finite."""
    points: dict[str, list[tuple[int, float | None]]] = {}
    for record in records:
        for name, value in record.items():
            if name not in ("schema_version", "time", "step", "event"):
                points.setdefault(name, []).append((int(record["step"]), value))
    return points


def matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The names that fit a pattern, in the order of the patterns.

    ``*`` stands for text without a slash.
    """
    names = list(names)
    matches: dict[str, None] = {}
    for pattern in patterns:
        expression = re.compile(re.escape(pattern).replace(r"\*", "[^/]+"))
        matches |= dict.fromkeys(filter(expression.fullmatch, names))
    return list(matches)


def rollout_groups(folder: RunFolder) -> Iterator[list[Record]]:
    """The recorded groups, each as the records of its members, by step and group number."""
    for step in folder.rollouts.files():
        groups = members(folder, step)
        yield from (groups[number] for number in sorted(groups))


def members(folder: RunFolder, step: int) -> dict[int, list[Record]]:
    """Group -> the records of its members, of one step; empty when none is on record."""
    groups: dict[int, list[Record]] = {}
    for record in folder.rollouts.read(step):
        groups.setdefault(record["group"], []).append(record)
    return groups


def compared(folder: RunFolder) -> list[tuple[Record, ...]]:
    """The first and the last evaluation's answers to each task, from the largest gain to a loss.

    The answers are to the task's own image. Empty without two evaluations.
    """
    steps = list(folder.evaluations.files())
    pairs = answers(folder, steps[0], steps[-1]) if len(steps) > 1 else []
    return sorted(pairs, key=_loss)


def _loss(pair: tuple[Record, ...]) -> float:
    first, last = pair
    return (first["reward"] or 0.0) - (last["reward"] or 0.0)


def answers(folder: RunFolder, *steps: int) -> list[tuple[Record, ...]]:
    """By task: its first answer to the task's own image in each of these evaluations.

    Tasks that one of the evaluations lacks are left out.
    """
    evaluations = [_first_answers(folder, step) for step in steps]
    common = set.intersection(*map(set, evaluations))
    return [tuple(by_task[task] for by_task in evaluations) for task in sorted(common)]


def _first_answers(folder: RunFolder, step: int) -> dict[str, Record]:
    """Task -> its first answer to the task's own image in the evaluation of a step."""
    return {
        record["task"]: {**record, "step": step}
        for record in folder.evaluations.read(step)
        if record["arm"] == RIGHT and not record.get("sample")
    }


def evenly(items: Sequence[T], count: int) -> list[T]:
    """At most ``count`` of the items, evenly spread, in order, the first included."""
    if len(items) <= count:
        return list(items)
    return [items[index * len(items) // count] for index in range(count)]
