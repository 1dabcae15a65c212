"""A curriculum: which rows come first (``data.order``). A row's ``tier`` is when its turn is in the first epoch: 0, then 1, ..."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Protocol

from pydantic import Field

from rayloop.config.settings import LocalPath, SettingsModel
from rayloop.core.failures import ConfigError
from rayloop.core.types import Task
from rayloop.measure.controls import RIGHT, SAMPLED
from rayloop.run.folder import RunFolder
from rayloop.run.held_out import read_items
from rayloop.run.records.jsonl import JsonLines


class Order(Protocol):
    """Says of each row of ``data.train`` when its turn is. Rows of a tier come in the order that they would have without."""

    def tier(self, task: Task) -> int: ...


class BySolveRate:
    """First the rows that a policy sometimes solves, then unknown ones, then all others. ``rates``: the folder of an evaluation of
    the training rows (``eval CONFIG --data TRAIN --samples 4 --out DIR``), or of an earlier run."""

    class Settings(SettingsModel):
        rates: LocalPath
        """The ``items.jsonl`` of that evaluation; or the folder of an earlier run, which costs no evaluation: as many of its
        groups count as its ``keep_rollouts`` has kept of each step."""
        low: float = Field(0.1, ge=0, le=1)
        """Share of right answers from which a row comes first. Raise it to begin with easier rows."""
        high: float = Field(0.9, ge=0, le=1)
        """Share of right answers up to which a row comes first. Lower it when a run pays for what the policy knows."""
        least: float = 1.0
        """Reward from which an answer is right. Lower it for rewards that are seldom full."""

    def __init__(self, settings: BySolveRate.Settings) -> None:
        """Raises ConfigError when there is nothing scored at ``rates``."""
        answers = defaultdict[str, list[bool]](list)
        for task, reward in _rewards(Path(settings.rates)):
            if reward is not None:
                answers[task].append(reward >= settings.least)
        if not answers:
            raise ConfigError(
                f"data.order: {settings.rates} has no scored answer; name the items.jsonl of an `eval`, or the folder of a run "
                "that had keep_rollouts above 0"
            )
        self._rates = {task: fmean(right) for task, right in answers.items()}
        self._settings = settings

    def tier(self, task: Task) -> int:
        if (rate := self._rates.get(task.id)) is None:
            return 1
        return 0 if self._settings.low <= rate <= self._settings.high else 2


def _rewards(path: Path) -> Iterator[tuple[str, float | None]]:
    """Task and reward of each answer to the task's own image, and of what a run has kept, but not of what it replayed."""
    if not path.is_dir():
        yield from ((item.task, item.reward) for item in read_items(path) if item.arm in (RIGHT, SAMPLED))
        return
    for file in RunFolder.at(path).rollouts.files().values():
        yield from ((record["task"], record["reward"]) for record in JsonLines(file) if not record["replayed"])
