"""Scores saved answers to grounding tasks: ``python -m cluster score arc_vision FILE.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayloop.core.types import Task
from rayloop.rewards.saved import Saved, Scoring, parsed, texts_of, truth_of
from recipes.arc_vision.reward import READ

TRUTHS = ("ground_truth", "bbox", "truth", "gold", "label")
"""Columns of the true box."""


def read(row: Mapping[str, Any], where: str) -> Saved:
    """``{completion, ground_truth: [x1, y1, x2, y2]}``, or a line of a run's ``rollouts``. Raises DataFailure."""
    name = str(row.get("id", row.get("task", f"row {where.rpartition(':')[2]}")))
    task = Task(name, (), parsed(truth_of(row, TRUTHS, where)), extra=row)
    return Saved(texts_of(row, where), task, row)


def settings(variant: str, reward: str | None) -> dict[str, Any]:
    """The originals know one word for looking closer."""
    return {"variant": variant} | ({} if variant == "strict" else {"closer": ["zoom"]})


def answer(saved: Saved, variant: str) -> str | None:
    found = READ[variant]("\n".join(saved.texts) if variant != "strict" else saved.texts[-1])
    return None if found is None else "[" + ",".join(f"{value:g}" for value in found) + "]"


SCORING = Scoring(
    use="recipes.arc_vision.reward:ArcVisionReward",
    variants=("strict", "original", "library"),
    rewards=("iou", "click", "format", "r_task", "r_tool", "r_gate", "tools", "known_tools", "penalties"),
    settings=settings,
    read=read,
    aliases={},
    answer=answer,
)
