"""Scores saved episodes on screens: ``python -m rayloop score arpo FILE.jsonl``."""

from collections.abc import Mapping
from typing import Any

from rayloop.core.types import Task
from rayloop.rewards.saved import OfflineScoring, Saved, name_of, texts_of, trajectory_of

RESULTS = ("env_result", "eval_result", "result", "success")
"""Columns of the environment's result."""


def read(row: Mapping[str, Any], where: str) -> Saved:
    """``{completions, env_result}``, or a line of a run's ``rollouts`` (where it is a component).

    Raises DataFailure.
    """
    components: Any = row.get("components")
    columns = {**components, **row} if isinstance(components, Mapping) else row
    task = Task(name_of(row, where), ())
    return Saved(texts_of(row, where), task, row, trajectory_of(columns, RESULTS))


def answer(saved: Saved, variant: str) -> str | None:
    """The action of the last turn."""
    return saved.texts[-1].rpartition("Action:")[2].strip() or None


SCORING = OfflineScoring(
    use="rayloop.recipes.arpo.reward:ArpoReward",
    variants=("corrected", "original"),
    rewards=("success", "format"),
    read=read,
    aliases={"eval_result": "success", "format_reward": "format"},
    answer=answer,
)
