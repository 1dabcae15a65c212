"""The measures of the chart benchmarks (relaxed accuracy, exact match, ChartQAPro's own rule), and
the blind prior of charts.
"""

import ast
import asyncio
import dataclasses
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Annotated, Any, Literal

from pydantic import Field

from rayloop.config.settings import Component, Role, SettingsModel
from rayloop.core.groups import Outcome, Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.threads import call_within
from rayloop.core.types import Task, Trajectory
from rayloop.recipes.chart_rvr.data import ChartAnswers
from rayloop.recipes.chart_rvr.rewards.original import (
    evaluated_answer,
    exact_match,
    relaxed_accuracy,
)
from rayloop.recipes.chart_rvr.rewards.reading import (
    ChartSample,
    as_number,
    as_table,
    parsed_table,
    parts,
)
from rayloop.recipes.chart_rvr.rewards.tables import shares
from rayloop.recipes.chart_rvr.rewards.variants import true_table, type_reward
from rayloop.rewards.saved import PLAYED

EXACTLY = ("Fact Checking", "Multi Choice")
"""ChartQAPro's types of question whose answers must be met exactly."""
SIMILAR = 0.5
"""A text less alike than this earns nothing (ANLS)."""


class ChartAnswer:
    """Pays the share of the answer that is right by the benchmark's rule; components ``accuracy``,
    ``relaxed`` and ``exact``. The answer is the content of the tag ``answer``, else the whole text.
    ChartQAPro needs ``keep: [kind, year]`` of ChartRows. Rows with the ``reasoning`` of ``data
    prepare chart_chains`` also show ``type`` (0 or 1) and ``table``, the share of right cells.
    """

    class Settings(SettingsModel):
        rule: Literal["relaxed", "chartbench", "chartqapro", "chartqapro_published"] = "relaxed"
        """relaxed: within 5 % of a number, else the same text (ChartQA and most others).
        chartbench: also with per cent signs apart. chartqapro: its own rule. chartqapro_published:
        Chart-RVR's evaluation instead, within 100 %; to compare with its printed figures.
        """

    def __init__(self, settings: Settings) -> None:
        self._rule = settings.rule

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        """The answer by the benchmark's rule, 0..1."""
        said, true = evaluated_answer(context.texts[-1]), str(task.ground_truth)
        relaxed = relaxed_accuracy(said, true)
        accuracy = {
            "relaxed": lambda: relaxed,
            "chartbench": lambda: max(relaxed, chartbench(said, true)),
            "chartqapro": lambda: chartqapro(
                said, true, str(task.extra.get("kind")), task.extra.get("year")
            ),
            "chartqapro_published": lambda: relaxed_accuracy(said, true, tolerance=1.0),
        }[self._rule]()
        shown = _read(context.texts[-1], task)
        return Scored(
            accuracy,
            {"accuracy": accuracy, "relaxed": relaxed, "exact": exact_match(said, true), **shown},
        )


def _read(text: str, task: Task) -> dict[str, float]:
    """How the chart itself was read, where the row says what it shows.

    Raises DataFailure for a row's table that is none.
    """
    sample = ChartSample.of(text, task)
    if not sample.reasoning:
        return {}
    found, true = parts(text), true_table(sample)
    said = as_table(parsed_table(found.table))
    cells = {} if true is None else {"table": shares(said, true)[1] if said else 0.0}
    return {"type": type_reward(found.type, sample.chart_type), **cells}


def chartbench(said: str, true: str) -> float:
    """1 for a number within 5 % of the label, per cent signs apart: 30 and 30% for ``30.0%``.

    Source: relaxed_correctness in stat_all_metric.py of IDEA-FinAI/ChartBench, which takes 0.3 for
    it too, as the relaxed rule does.
    """
    number, truth = (as_number(text.strip().removesuffix(".").rstrip("%")) for text in (said, true))
    if number is None or truth is None:
        return 0.0
    return float(abs(number - truth) <= 0.05 * abs(truth))


def chartqapro(said: str, true: str, kind: str, year: Any = None) -> float:
    """Relaxed correctness as ChartQAPro defines it, 0..1: lists item by item, one too many or too
    few counting 0; years, fact checking and multiple choice exactly; numbers within 5 %, per cent
    signs apart; other texts by ANLS. ``year``: "YES" for each item of the answer that is a year;
    one entry stands for all, and of a conversation the last counts. Source: evaluate_predictions.py
    of vis-nlp/ChartQAPro, and its paper, which alone asks for exact answers to ``EXACTLY``.
    """
    mine, theirs = _items(said), _items(true)
    flags = [
        str(flag).upper() == "YES" for flag in (year if isinstance(year, list | tuple) else [year])
    ]
    flags = (flags[-1:] if kind == "Conversational" else flags) or [False]
    flags = flags * len(theirs) if len(flags) < len(theirs) else flags
    scores = [
        float(a.lower() == b.lower()) if is_year or kind in EXACTLY else _alike(a, b)
        for a, b, is_year in zip(mine, theirs, flags, strict=False)
    ]
    return sum(scores) / max(len(mine), len(theirs))


def _items(text: str) -> list[str]:
    text = text.strip().strip(".").strip()
    if not (text.startswith("[") and text.endswith("]")):
        return [text]
    with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
        read = ast.literal_eval(text)
        if isinstance(read, list) and read:
            return [str(item).strip(" '") for item in read]
    return [item.strip(" '\"") for item in text[1:-1].split(",")]


def _alike(said: str, true: str) -> float:
    said, true = said.strip().strip("%").strip(), true.strip().strip("%").strip()
    number, truth = as_number(said), as_number(true)
    if number is not None and truth is not None:
        return float(abs(number - truth) <= 0.05 * abs(truth))
    return anls(" ".join(said.lower().split()), " ".join(true.lower().split()))


def anls(said: str, true: str) -> float:
    """Normalised Levenshtein similarity, 1 for equal texts; 0 from a distance of half the longer
    text on.
    """
    longest = max(len(said), len(true))
    if not longest:
        return 1.0
    share = distance(said, true) / longest
    return 1.0 - share if share < SIMILAR else 0.0


def distance(a: Sequence[str], b: Sequence[str]) -> int:
    """Fewest insertions, deletions and substitutions that make one of the other."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, start=1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


PATIENCE = 600.0
"""Seconds for one search of a constant completion, or one payment."""


class BlindChart:
    """Writes the completion with the highest mean reward over the training rows with the same
    question: one of their supervised answers, or the most frequent value of each place. With fewer
    than ``fewest`` rows it takes all rows.
    """

    class Settings(SettingsModel):
        reward: Annotated[Component, Role("reward source", ("score",))]
        """The run's reward, which pays the constant completion too: write the same as in
        ``reward.source``.
        """
        fewest: int = Field(8, ge=1)
        """Training rows that a question needs for a completion of its own; lower it for few rows.
        """
        rows: int = Field(40, ge=1)
        """Rows that are considered per question; the search takes its square of payments."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._reward = settings, settings.reward.build()
        self._known: dict[str, list[Task]] = defaultdict(list)
        self._best: dict[str, str] = {}

    def fit(self, tasks: Iterable[Task]) -> None:
        """Collect the training rows.

        Those without a rationale have no supervised answer, and are left out.
        """
        for task in tasks:
            if all(task.extra.get(name) for name in ("chart_type", "table", "reasoning")):
                for key in ("", task.extra["query"]):
                    self._known[key].append(task)

    def score(self, task: Task) -> Scored:
        """Raises ValueError before ``fit``, and RuntimeError when the reward cannot be had."""
        if not self._known[""]:
            raise ValueError(
                "fit the blind prior on training rows with type, table and reasoning first"
            )
        question = task.extra["query"]
        key = question if len(self._known.get(question, ())) >= self._settings.fewest else ""
        if key not in self._best:
            rows = self._known[key][: self._settings.rows]
            texts = list(dict.fromkeys([_answer(_usual(rows)), *map(_answer, rows)]))
            paid = iter(self._paid([(text, row) for text in texts for row in rows]))
            # In the order of the pairs: all rows of a text, then those of the next.
            means = {text: fmean(next(paid).value for _ in rows) for text in texts}
            self._best[key] = max(means, key=lambda text: means[text])
        (found,) = self._paid([(self._best[key], task)])
        return found

    def _paid(self, pairs: Sequence[tuple[str, Task]]) -> list[Scored]:
        outcomes: list[Outcome] = call_within(PATIENCE, asyncio.run, _all(self._reward, pairs))
        found = [outcome for outcome in outcomes if isinstance(outcome, Scored)]
        if len(found) < len(pairs):
            failed = next(outcome for outcome in outcomes if not isinstance(outcome, Scored))
            raise RuntimeError(f"the reward paid the blind prior nothing: {failed}")
        return found


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
    table = {
        "columns": columns,
        "rows": [[_most(cell) for cell in zip(*row, strict=True)] for row in cells],
    }
    usual = {name: _most(row.extra[name] for row in rows) for name in ("chart_type", "reasoning")}
    truth = _most(row.ground_truth for row in rows)
    return dataclasses.replace(
        rows[0], ground_truth=truth, extra={**rows[0].extra, **usual, "table": table}
    )


def _size(table: Any) -> tuple[int, ...]:
    return len(table["columns"]), *map(len, table["rows"])


def _most(values: Iterable[Any]) -> Any:
    return Counter(values).most_common(1)[0][0]
