"""A curriculum: which rows come first (``data.order``). A row's ``tier`` is when its turn is in the first epoch: 0, then 1, ..."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Protocol

from pydantic import Field

from rayloop.config.settings import LocalPath, SettingsModel
from rayloop.core.failures import ConfigError
from rayloop.core.types import Task
from rayloop.run.held_out import read_items


class Order(Protocol):
    """Says of each row of ``data.train`` when its turn is. Rows of a tier come in the order that they would have without."""

    def tier(self, task: Task) -> int: ...


class BySolveRate:
    """First the rows that a policy sometimes solves, which teach most; then those of which nobody knows, then all others.

    ``rates`` is what an evaluation of the training rows left: ``eval CONFIG --data TRAIN --samples 4 --out DIR``.
    """

    class Settings(SettingsModel):
        rates: LocalPath
        """The ``items.jsonl`` of that evaluation."""
        low: float = Field(0.1, ge=0, le=1)
        """Share of right answers from which a row comes first. Raise it to begin with easier rows."""
        high: float = Field(0.9, ge=0, le=1)
        """Share of right answers up to which a row comes first. Lower it when a run pays for what the policy knows."""
        least: float = 1.0
        """Reward from which an answer is right. Lower it for rewards that are seldom full."""

    def __init__(self, settings: BySolveRate.Settings) -> None:
        """Raises ConfigError when there is no such file, or nothing scored in it."""
        answers = defaultdict[str, list[bool]](list)
        for item in read_items(Path(settings.rates)):
            if item.reward is not None:
                answers[item.task].append(item.reward >= settings.least)
        if not answers:
            raise ConfigError(f"data.order: {settings.rates} has no scored answer; it is the items.jsonl of an `eval`")
        self._rates = {task: fmean(right) for task, right in answers.items()}
        self._settings = settings

    def tier(self, task: Task) -> int:
        if (rate := self._rates.get(task.id)) is None:
            return 1
        return 0 if self._settings.low <= rate <= self._settings.high else 2
