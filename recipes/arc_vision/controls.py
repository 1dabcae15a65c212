"""The blind prior of UI grounding: the best constant box per instruction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import mean, median

from rayloop.config.settings import SettingsModel
from rayloop.core.groups import Scored
from rayloop.core.protocols import Box
from rayloop.core.types import Task
from rayloop.recipes.arc_vision.boxes import click_hits, iou


class BlindBox:
    """Answers with the box that has the highest mean IoU over the training rows with the same instruction.

    Candidates are those rows' own boxes and their median. An instruction with fewer than ``fewest`` rows falls back to
    its page type, and a page type that training has not, to all rows.
    """

    class Settings(SettingsModel):
        fewest: int = 3
        """Training rows that an instruction needs for a guess of its own."""
        rows: int = 150
        """Rows that are considered per instruction or page type."""

    def __init__(self, settings: BlindBox.Settings) -> None:
        self._settings = settings
        self._known: dict[tuple[str, ...], list[Box]] = defaultdict(list)
        self._best: dict[tuple[str, ...], Box] = {}

    def fit(self, tasks: Iterable[Task]) -> None:
        """Collect the boxes of the training rows."""
        for task in tasks:
            for key in _keys(task):
                self._known[key].append(task.ground_truth)

    def score(self, task: Task) -> Scored:
        """The constant box of the task's instruction against its true box. Raises ValueError before ``fit``."""
        enough = (key for key in _keys(task) if len(self._known[key]) >= min(self._settings.fewest, len(self._known[()])))
        if not self._known[()] or (key := next(enough, None)) is None:
            raise ValueError("fit the blind prior on training rows first")
        if key not in self._best:
            boxes = self._known[key][: self._settings.rows]
            middle: Box = tuple(median(box[i] for box in boxes) for i in range(4))  # type: ignore[assignment]
            self._best[key] = max([middle, *boxes], key=lambda candidate: mean(iou(candidate, box) for box in boxes))
        answer, truth = self._best[key], task.ground_truth
        overlap = iou(answer, truth)
        return Scored(overlap, {"iou": overlap, "click": float(click_hits(answer, truth)), "format": 1.0})


def _keys(task: Task) -> list[tuple[str, ...]]:
    """From the most specific to the most general group of rows that a task belongs to."""
    return [(task.source, str(task.extra["instruction"])), (task.source,), ()]
