"""The blind prior of chart questions: the best constant completion per question, paid as the policy's would be."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Iterable, Sequence
from statistics import fmean
from typing import Annotated, Any

from pydantic import Field

from rayloop.config.settings import Component, Role, SettingsModel
from rayloop.core.groups import Outcome, Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.threads import call_within
from rayloop.core.types import EndReason, Sampling, Task, Trajectory, TrajectoryId
from rayloop.recipes.chart_rvr.data import ChartAnswers

PLAYED = Trajectory(TrajectoryId(0, 0), 0, "", 0, (), Sampling(), EndReason.DONE)
"""The trajectory of a constant completion, which was not sampled."""
PATIENCE = 600.0
"""Seconds for one search of a constant completion, or one payment."""


class BlindChart:
    """Writes the completion with the highest mean reward over the training rows with the same question.

    Candidates are those rows' own supervised answers, and one of what is most frequent at each place. A question with fewer than
    ``fewest`` rows falls back to all rows.
    """

    class Settings(SettingsModel):
        reward: Annotated[Component, Role("reward source", ("score",))]
        """The run's reward, which pays the constant completion too: write the same as in ``reward.source``."""
        fewest: int = Field(8, ge=1)
        """Training rows that a question needs for a completion of its own; lower it for few rows."""
        rows: int = Field(40, ge=1)
        """Rows that are considered per question; the search takes its square of payments."""

    def __init__(self, settings: BlindChart.Settings) -> None:
        self._settings, self._reward = settings, settings.reward.build()
        self._known: dict[str, list[Task]] = defaultdict(list)
        self._best: dict[str, str] = {}

    def fit(self, tasks: Iterable[Task]) -> None:
        """Collect the training rows. Those without a rationale have no supervised answer, and are left out."""
        for task in tasks:
            if all(task.extra.get(name) for name in ("chart_type", "table", "reasoning")):
                for key in ("", task.extra["query"]):
                    self._known[key].append(task)

    def score(self, task: Task) -> Scored:
        """Raises ValueError before ``fit``, and RuntimeError when the reward cannot be had."""
        if not self._known[""]:
            raise ValueError("fit the blind prior on training rows with type, table and reasoning first")
        question = task.extra["query"]
        key = question if len(self._known.get(question, ())) >= self._settings.fewest else ""
        if key not in self._best:
            rows = self._known[key][: self._settings.rows]
            texts = list(dict.fromkeys([_answer(_usual(rows)), *map(_answer, rows)]))
            paid = iter(self._paid([(text, row) for text in texts for row in rows]))
            means = {text: fmean(next(paid).value for _ in rows) for text in texts}
            self._best[key] = max(means, key=lambda text: means[text])
        (found,) = self._paid([(self._best[key], task)])
        return found

    def _paid(self, pairs: Sequence[tuple[str, Task]]) -> list[Scored]:
        outcomes: list[Outcome] = call_within(PATIENCE, asyncio.run, _all(self._reward, pairs))
        for outcome in outcomes:
            if not isinstance(outcome, Scored):
                raise RuntimeError(f"the reward paid the blind prior nothing: {outcome}")
        return [outcome for outcome in outcomes if isinstance(outcome, Scored)]


async def _all(reward: Any, pairs: Sequence[tuple[str, Task]]) -> list[Outcome]:
    async def one(text: str, task: Task) -> Outcome:
        found: Outcome | Awaitable[Outcome] = reward.score(PLAYED, task, ScoreContext(0, [text]))
        return await found if isinstance(found, Awaitable) else found

    return await asyncio.gather(*(one(text, task) for text, task in pairs))


def _answer(task: Task) -> str:
    return ChartAnswers().answer(task, random.Random(0))


def _usual(rows: Sequence[Task]) -> Task:
    """A row with the most frequent value in each cell, over the tables of the most frequent size."""
    tables = [row.extra["table"] for row in rows]
    size = _most(_size(table) for table in tables)
    tables = [table for table in tables if _size(table) == size]
    columns = [_most(names) for names in zip(*(table["columns"] for table in tables), strict=True)]
    cells = zip(*(table["rows"] for table in tables), strict=True)
    table = {"columns": columns, "rows": [[_most(cell) for cell in zip(*row, strict=True)] for row in cells]}
    usual = {name: _most(row.extra[name] for row in rows) for name in ("chart_type", "reasoning")}
    truth = _most(row.ground_truth for row in rows)
    return dataclasses.replace(rows[0], ground_truth=truth, extra={**rows[0].extra, **usual, "table": table})


def _size(table: Any) -> tuple[int, ...]:
    return len(table["columns"]), *map(len, table["rows"])


def _most(values: Iterable[Any]) -> Any:
    return Counter(values).most_common(1)[0][0]
