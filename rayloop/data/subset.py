"""Which rows stand for all of a file when there is time for some of them only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rayloop.core.types import Task


def evenly(tasks: Sequence[Task], limit: int | None) -> list[Task]:
    """``limit`` of the tasks, in their order: as many of each data source as of any other, as far as it has them, and of a source
    every n-th. Always the same ones; all of them when ``limit`` is None or above their number."""
    if limit is None or limit >= len(tasks):
        return list(tasks)
    sources: dict[str, list[int]] = defaultdict(list)
    for index, task in enumerate(tasks):
        sources[task.source].append(index)
    chosen, left = list[int](), limit
    ascending = sorted(sources.values(), key=len)
    for position, rows in enumerate(ascending):  # what a small source lacks, the larger ones get
        share = min(len(rows), left // (len(ascending) - position))
        chosen += [rows[n * len(rows) // share] for n in range(share)]
        left -= share
    return [tasks[index] for index in sorted(chosen)]
