"""Scores saved answers to reasoning-gym: ``python -m rayloop score reasoning FILE.jsonl``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayloop.core.types import Task
from rayloop.envs.adapters.reasoning_gym import ReasoningGymRows
from rayloop.rewards.saved import OfflineScoring, Saved, texts_of


def read(row: Mapping[str, Any], where: str) -> Saved:
    """``{completion, task, seed, index, size, config}``. Raises DataFailure."""
    task: Task = ReasoningGymRows(ReasoningGymRows.Settings(system="")).task(row, where, Path())
    return Saved(texts_of(row, where), task, row)


SCORING = OfflineScoring(
    use="rayloop.envs.adapters.reasoning_gym:ReasoningGymScore",
    variants=("whole", "tag"),
    rewards=("exact", "answered"),
    settings=lambda variant, reward: {"whole": variant == "whole"},
    read=read,
)
