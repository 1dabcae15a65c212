"""Scores saved answers to grounding tasks: ``python -m rayloop score arc_vision FILE.jsonl``."""

from collections.abc import Mapping
from typing import Any

from rayloop.core.types import Task
from rayloop.data.rows import parsed
from rayloop.recipes.arc_vision.boxes import answered
from rayloop.recipes.arc_vision.reward import ORIGINALS, ArcVisionReward, size_of
from rayloop.rewards.saved import OfflineScoring, Saved, name_of, texts_of, trajectory_of, truth_of

TRUTHS = ("ground_truth", "bbox", "truth", "gold", "label")
"""Columns of the true box."""


def read(row: Mapping[str, Any], where: str) -> Saved:
    """``{completion, ground_truth: [x1, y1, x2, y2], image_size?, step?}``, or a ``rollouts`` line.

    Raises DataFailure.
    """
    task = Task(name_of(row, where), (), parsed(truth_of(row, TRUTHS, where)), extra=row)
    return Saved(texts_of(row, where), task, row, trajectory_of(row), int(row.get("step") or 0))


def answer(saved: Saved, variant: str) -> str | None:
    """The box that the variant reads, as text; None without one."""
    if variant in ORIGINALS:
        box = ORIGINALS[variant]("\n".join(saved.texts))
    else:
        size = size_of(saved.trajectory, saved.task, ArcVisionReward.Settings())
        box, _ = answered(saved.texts[-1], size)
    if box is None:
        return None
    sides = ",".join(f"{side:g}" for side in box)
    return f"[{sides}]"


SCORING = OfflineScoring(
    use="rayloop.recipes.arc_vision.reward:ArcVisionReward",
    variants=("corrected", "original", "library"),
    rewards=(
        "iou",
        "click",
        "format",
        "r_task",
        "r_tool",
        "r_gate",
        "tools",
        "asked",
        "known_tools",
        "penalties",
    ),
    read=read,
    answer=answer,
)
