"""Reads an answer's box, compares it with the truth, and finds the best constant box.

An answer is ``<bbox>[x1,y1,x2,y2]</bbox>`` or Qwen's ``"bbox_2d": [x1, y1, x2, y2]``, in fractions
of the image's sides or in pixels; the last counts. Nothing else is guessed to be a box.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import mean, median
from typing import Any

from rayloop.config.settings import SettingsModel
from rayloop.core.groups import Scored
from rayloop.core.protocols import Box
from rayloop.core.types import Task
from rayloop.recipes.arc_vision.data import box

Size = tuple[float, float]
"""Width and height, in the unit of an answer that is not a fraction."""

_NUMBER = r"\s*(\d{1,4}(?:\.\d{1,20})?)\s*"
_FOUR = r"\[" + ",".join([_NUMBER] * 4) + r"\]"
_TAG = re.compile(rf"<bbox>\s*{_FOUR}\s*</bbox>")
_CONFIDENCE = re.compile(r"<confidence>\s*(\d{1,3}(?:\.\d{1,6})?)\s*+(%?)\s*</confidence>")
_QWEN = re.compile(rf'"bbox_2d"\s*:\s*{_FOUR}')


class GroundingBoxes:
    """The ground truth is a box, and a valid answer holds one."""

    def true(self, truth: Any) -> Sequence[Box]:
        """The true box. Raises DataFailure when the ground truth is not a box."""
        return (box(truth, "ground truth"),)

    def answered(self, text: str) -> Sequence[Box]:
        """The answer's box; none for an answer in pixels, since the image's size is unknown."""
        answer, _ = answered(text)
        return () if answer is None else (answer,)


def parse_box(text: str) -> Box | None:
    """The last ``<bbox>[x1,y1,x2,y2]</bbox>`` of a text.

    None without one, or when it is not a box within 0..1.
    """
    matches = _TAG.findall(text)
    if not matches:
        return None
    x1, y1, x2, y2 = map(float, matches[-1])
    is_box = 0 <= x1 < x2 <= 1 and 0 <= y1 < y2 <= 1
    return (x1, y1, x2, y2) if is_box else None


def answered(text: str, size: Size | None = None) -> tuple[Box | None, str]:
    """The answer's box in fractions and "", or None and a flag.

    The flag is ``unparsable``, or ``unknown_size`` for pixels without ``size``.
    """
    last = _last_match(text)
    if last is None:
        return None, "unparsable"
    x1, y1, x2, y2 = map(float, last.groups())
    if max(x2, y2) > 1:
        if size is None:
            return None, "unknown_size"
        width, height = size
        x1, y1, x2, y2 = x1 / width, y1 / height, x2 / width, y2 / height
    if x1 < x2 <= 1 and y1 < y2 <= 1:
        return (x1, y1, x2, y2), ""
    return None, "unparsable"


def _last_match(text: str) -> re.Match[str] | None:
    """The last box of the text in either notation."""
    last: re.Match[str] | None = None
    for notation, mark in ((_TAG, "<bbox>"), (_QWEN, '"bbox_2d"')):
        # Most texts lack one of the marks, and finding that out is faster than the pattern.
        if mark not in text:
            continue
        for match in notation.finditer(text):
            if last is None or match.start() > last.start():
                last = match
    return last


def confidence(text: str) -> float | None:
    """The policy's stated confidence, 0..1: ``<confidence>0.9</confidence>``, or 90, or 90%.

    None when it states none.
    """
    matches = _CONFIDENCE.findall(text)
    if not matches:
        return None
    number, percent = matches[-1]
    value = float(number)
    if percent or value > 1:
        value /= 100
    return value if value <= 1 else None


def grounding(answer: Box | None, truth: Box) -> dict[str, float]:
    """The components of an answer: ``iou``, ``click`` and ``format``; all 0 without one.

    ``click`` is 1 when the answer's centre is inside the true box, ``format`` is 1.
    """
    if answer is None:
        return {"iou": 0.0, "click": 0.0, "format": 0.0}
    return {"iou": iou(answer, truth), "click": float(click_hits(answer, truth)), "format": 1.0}


def iou(a: Box, b: Box) -> float:
    """Intersection over union of two boxes, 0..1."""
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    shared = width * height
    union = area(a) + area(b) - shared
    return shared / union if union > 0 else 0.0


def click_hits(answer: Box, truth: Box) -> bool:
    """Whether a click on the centre of ``answer`` lands in ``truth``."""
    x = (answer[0] + answer[2]) / 2
    y = (answer[1] + answer[3]) / 2
    return truth[0] <= x <= truth[2] and truth[1] <= y <= truth[3]


def area(of: Box) -> float:
    """The area of a box, 0..1."""
    return (of[2] - of[0]) * (of[3] - of[1])


class BlindBox:
    """Answers with the box of the highest mean IoU over the training rows of an instruction.

    The candidates are the rows' boxes and their median. With fewer than ``fewest`` rows it takes
    the rows of the page type, else all rows.
    """

    class Settings(SettingsModel):
        fewest: int = 3
        """Training rows that an instruction needs for a separate guess."""
        rows: int = 150
        """Rows that are considered per instruction or page type."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._boxes: dict[tuple[str, ...], list[Box]] = defaultdict(list)
        self._best: dict[tuple[str, ...], Box] = {}

    def fit(self, tasks: Iterable[Task]) -> None:
        """Collect the boxes of the training rows."""
        for task in tasks:
            for key in _keys(task):
                self._boxes[key].append(task.ground_truth)

    def score(self, task: Task) -> Scored:
        """The constant box of the task's instruction against its true box.

        Raises ValueError before ``fit``.
        """
        total = len(self._boxes[()])
        if not total:
            raise ValueError("fit the blind prior on training rows first")
        needed = min(self._settings.fewest, total)
        # The last key is that of all rows, so there always is one.
        key = next(key for key in _keys(task) if len(self._boxes[key]) >= needed)
        if key not in self._best:
            self._best[key] = _best_constant(self._boxes[key][: self._settings.rows])
        components = grounding(self._best[key], task.ground_truth)
        return Scored(components["iou"], components)


def _best_constant(boxes: Sequence[Box]) -> Box:
    """The median box or one of ``boxes``, whichever has the highest mean IoU with them."""
    x1, y1, x2, y2 = (median(side) for side in zip(*boxes, strict=True))

    def mean_overlap(candidate: Box) -> float:
        return mean(iou(candidate, box) for box in boxes)

    return max([(x1, y1, x2, y2), *boxes], key=mean_overlap)


def _keys(task: Task) -> list[tuple[str, ...]]:
    """From the most specific to the most general group of rows that a task belongs to."""
    return [(task.source, str(task.extra["instruction"])), (task.source,), ()]
