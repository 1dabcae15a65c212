"""Scores saved sortings of digits: ``python -m rayloop score digits FILE.jsonl``."""

from collections.abc import Mapping
from typing import Any

from rayloop.core.failures import DataFailure
from rayloop.core.types import Task
from rayloop.data.rows import parsed
from rayloop.rewards.saved import OfflineScoring, Saved, name_of, texts_of, truth_of

TRUTHS = ("ground_truth", "truth", "gold", "label")
"""Columns of the digits in order."""


def read(row: Mapping[str, Any], where: str) -> Saved:
    """``{completion, ground_truth: [1, 2, 3]}``, or a line of a run's ``rollouts``.

    Raises DataFailure.
    """
    truth = parsed(truth_of(row, TRUTHS, where))
    is_list = isinstance(truth, list) and len(truth) > 0
    if not is_list or not all(isinstance(digit, int) for digit in truth):
        raise DataFailure(where, f"the truth must be a list of digits, not {truth!r:.100}")
    return Saved(texts_of(row, where), Task(name_of(row, where), (), truth), row)


SCORING = OfflineScoring(
    use="rayloop.recipes.digits.data:SortReward",
    variants=("corrected",),
    rewards=("exact", "format"),
    settings=lambda variant, reward: {},
    read=read,
)
