"""Rewards for UI grounding: how well the answered box covers the true one."""

from __future__ import annotations

import re

from rayloop.core.config import Settings as _Settings
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import Outcome, Scored, Task, Trajectory
from recipes.arc_vision.data import Box

_NUMBER = r"\s*(\d{1,4}(?:\.\d{1,9})?)\s*"
_ANSWER = re.compile(r"<bbox>\s*\[" + ",".join([_NUMBER] * 4) + r"\]\s*</bbox>")


class IoUReward:
    """Intersection over union with the task's box; 0 with the flag ``unparsable`` when the last turn has no valid box.

    Components: ``iou``, ``click`` (1 when the answer's centre lies in the true box), ``format`` (1 for a valid box).
    """

    class Settings(_Settings):
        """Nothing to set."""

    def __init__(self, settings: IoUReward.Settings) -> None:
        del settings

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        answer = parse_box(context.texts[-1])
        if answer is None:
            return Scored(0.0, {"iou": 0.0, "click": 0.0, "format": 0.0}, ("unparsable",))
        truth: Box = task.ground_truth
        overlap = iou(answer, truth)
        return Scored(overlap, {"iou": overlap, "click": float(click_hits(answer, truth)), "format": 1.0})


def parse_box(text: str) -> Box | None:
    """The last ``<bbox>[x1,y1,x2,y2]</bbox>`` of a text; None without one, or when it is no box within 0..1."""
    found = _ANSWER.findall(text)
    if not found:
        return None
    x1, y1, x2, y2 = map(float, found[-1])
    return (x1, y1, x2, y2) if 0 <= x1 < x2 <= 1 and 0 <= y1 < y2 <= 1 else None


def iou(a: Box, b: Box) -> float:
    """Intersection over union of two boxes, 0..1."""
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    shared = width * height
    return shared / (_area(a) + _area(b) - shared)


def click_hits(answer: Box, truth: Box) -> bool:
    """Whether a click on the centre of ``answer`` lands in ``truth``."""
    x, y = (answer[0] + answer[2]) / 2, (answer[1] + answer[3]) / 2
    return truth[0] <= x <= truth[2] and truth[1] <= y <= truth[3]


def _area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])
