"""The measures of the chart benchmarks, and the blind prior of charts.

The measures are relaxed accuracy, exact match and ChartQAPro's rule.
"""

import ast
import asyncio
import dataclasses
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from itertools import product
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
from rayloop.rewards.saved import EMPTY_TRAJECTORY, Saved

EXACT_KINDS = ("Fact Checking", "Multi Choice")
"""ChartQAPro's types of question whose answers must be met exactly."""
MOST_DISTANCE = 0.5
"""Share of changed characters from which a text earns nothing (ANLS)."""


class ChartAnswer:
    """Pays the share of the answer that is right by the benchmark's rule.

    Components: ``accuracy``, ``relaxed`` and ``exact``. The answer is the content of the tag
    ``answer``, else the whole text. ChartQAPro needs ``keep: [kind, year]`` of ChartRows. Rows with
    the ``reasoning`` of ``data prepare chart_chains`` also show ``type`` (0 or 1) and ``table``,
    the share of right cells.
    """

    class Settings(SettingsModel):
        rule: Literal["relaxed", "chartbench", "chartqapro", "chartqapro_published"] = "relaxed"
        """relaxed: within 5 % of a number, else the same text (ChartQA and most others).

        chartbench: also without regard to per cent signs. chartqapro: ChartQAPro's rule.
        chartqapro_published: Chart-RVR's evaluation instead, within 100 %; to compare with its
        printed figures.
        """

    def __init__(self, settings: Settings) -> None:
        self._rule = settings.rule

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        """The answer by the benchmark's rule, 0..1."""
        said = evaluated_answer(context.texts[-1])
        true = str(task.ground_truth)
        relaxed = relaxed_accuracy(said, true)
        match self._rule:
            case "relaxed":
                accuracy = relaxed
            case "chartbench":
                accuracy = max(relaxed, chartbench(said, true))
            case "chartqapro":
                kind = str(task.extra.get("kind"))
                accuracy = chartqapro(said, true, kind, task.extra.get("year"))
            case "chartqapro_published":
                accuracy = relaxed_accuracy(said, true, tolerance=1.0)
        components = {
            "accuracy": accuracy,
            "relaxed": relaxed,
            "exact": exact_match(said, true),
            **_chart_components(context.texts[-1], task),
        }
        return Scored(accuracy, components)


def _chart_components(text: str, task: Task) -> dict[str, float]:
    """How well the chart itself was read, for a row that describes it.

    Raises DataFailure for a row's table that is not one.
    """
    sample = ChartSample.of(text, task)
    if not sample.reasoning:
        return {}
    completion = parts(text)
    true = true_table(sample)
    components = {"type": type_reward(completion.type, sample.chart_type)}
    if true is not None:
        said = as_table(parsed_table(completion.table))
        _, cells = shares(said, true) if said else (0.0, 0.0)
        components["table"] = cells
    return components


def chartbench(said: str, true: str) -> float:
    """1 for a number within 5 % of the label without regard to per cent signs.

    30 and 30% are right for ``30.0%``. Source: relaxed_correctness in stat_all_metric.py of
    IDEA-FinAI/ChartBench, which takes 0.3 for it too, as the relaxed rule does.
    """
    number, truth = (as_number(text.strip().removesuffix(".").rstrip("%")) for text in (said, true))
    if number is None or truth is None:
        return 0.0
    return _within_5_percent(number, truth)


def accuracy_plus(saved: Iterable[Saved]) -> list[bool]:
    """Acc+ (arXiv:2312.15915): for each pair of assertions whether both are judged right.

    One of them is right (label Yes), one wrong (No). ``data prepare chartbench`` names its rows
    ``PAIR-LABEL``. A pair of which one answer is missing does not count. An answer without "yes"
    says no, as in accuracy_plus in stat_all_metric.py of IDEA-FinAI/ChartBench.
    """
    pairs = defaultdict[str, dict[str, bool]](dict)
    for entry in saved:
        pair, _, label = entry.task.id.rpartition("-")
        said = evaluated_answer(entry.texts[-1])
        pairs[pair][label] = ("yes" in said.lower()) == (label == "Yes")
    return [all(judged.values()) for judged in pairs.values() if judged.keys() == {"Yes", "No"}]


def _within_5_percent(number: float, truth: float) -> float:
    return float(abs(number - truth) <= 0.05 * abs(truth))


def chartqapro(said: str, true: str, kind: str, year: Any = None) -> float:
    """Relaxed correctness as ChartQAPro defines it, 0..1.

    Lists are compared item by item, and one too many or too few counts 0. Years, fact checking and
    multiple choice must be met exactly, numbers within 5 % without regard to per cent signs, other
    texts by ANLS. ``year``: "YES" for each item of the answer that is a year; one entry stands for
    all, and in a conversation the last counts. Source: evaluate_predictions.py of
    vis-nlp/ChartQAPro, and its paper, which alone asks for exact answers to ``EXACT_KINDS``.
    """
    said_items = _items(said)
    true_items = _items(true)
    scores = []
    year_flags = _year_flags(kind, year, len(true_items))
    for item, true_item, is_year in zip(said_items, true_items, year_flags, strict=False):
        if is_year or kind in EXACT_KINDS:
            scores.append(float(item.lower() == true_item.lower()))
        else:
            scores.append(_similarity(item, true_item))
    return sum(scores) / max(len(said_items), len(true_items))


def _year_flags(kind: str, year: Any, count: int) -> list[bool]:
    """Whether each of at least ``count`` items of an answer is a year."""
    entries = year if isinstance(year, list | tuple) else [year]
    if kind == "Conversational":
        entries = entries[-1:]
    flags = [str(entry).upper() == "YES" for entry in entries] or [False]
    return flags * count if len(flags) < count else flags


def _items(text: str) -> list[str]:
    """The items of an answer that is a list; the answer itself otherwise."""
    text = text.strip().strip(".").strip()
    if not (text.startswith("[") and text.endswith("]")):
        return [text]
    with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
        value = ast.literal_eval(text)
        if isinstance(value, list) and value:
            return [str(item).strip(" '") for item in value]
    return [item.strip(" '\"") for item in text[1:-1].split(",")]


def _similarity(said: str, true: str) -> float:
    said = said.strip().strip("%").strip()
    true = true.strip().strip("%").strip()
    number = as_number(said)
    truth = as_number(true)
    if number is not None and truth is not None:
        return _within_5_percent(number, truth)
    return anls(" ".join(said.lower().split()), " ".join(true.lower().split()))


def anls(said: str, true: str) -> float:
    """Normalised Levenshtein similarity, 1 for equal texts.

    It is 0 from a distance of half the longer text on.
    """
    longest = max(len(said), len(true))
    if not longest:
        return 1.0
    share = distance(said, true) / longest
    return 1.0 - share if share < MOST_DISTANCE else 0.0


def distance(a: Sequence[str], b: Sequence[str]) -> int:
    """Fewest insertions, deletions and substitutions that turn one into the other."""
    # row[j]: the distance of a's first i elements from b's first j.
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        diagonal = row[0]
        row[0] = i
        for j, y in enumerate(b, start=1):
            substitution = diagonal + (x != y)
            diagonal = row[j]
            row[j] = min(row[j] + 1, row[j - 1] + 1, substitution)
    return row[-1]


TIMEOUT_S = 600.0
"""Seconds for one search of a constant completion, or one payment."""


class BlindChart:
    """Writes the completion with the highest mean reward over the training rows of a question.

    The candidates are the rows' supervised answers, and the most frequent value of each place. With
    fewer than ``fewest`` rows it takes all rows.
    """

    class Settings(SettingsModel):
        reward: Annotated[Component, Role("reward source", ("score",))]
        """The run's reward, which pays the constant completion too.

        Copy it from ``reward.source``.
        """
        fewest: int = Field(8, ge=1)
        """Training rows that a question needs for a separate completion.

        Lower it for few rows.
        """
        rows: int = Field(40, ge=1)
        """Rows that are considered per question; the search takes its square of payments."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._reward = settings.reward.build()
        self._rows: dict[str, list[Task]] = defaultdict(list)
        self._best: dict[str, str] = {}

    def fit(self, tasks: Iterable[Task]) -> None:
        """Collect the training rows.

        Those without a rationale have no supervised answer, and are left out.
        """
        for task in tasks:
            if all(task.extra.get(name) for name in ("chart_type", "table", "reasoning")):
                for key in ("", task.extra["query"]):
                    self._rows[key].append(task)

    def score(self, task: Task) -> Scored:
        """The score of the constant completion.

        Raises ValueError before ``fit``, and RuntimeError when the reward is unscored.
        """
        if not self._rows[""]:
            raise ValueError(
                "fit the blind prior on training rows with type, table and reasoning first"
            )
        question = task.extra["query"]
        key = question if len(self._rows.get(question, ())) >= self._settings.fewest else ""
        if key not in self._best:
            self._best[key] = self._best_completion(self._rows[key][: self._settings.rows])
        (score,) = self._scores([(self._best[key], task)])
        return score

    def _best_completion(self, rows: Sequence[Task]) -> str:
        """The candidate with the highest mean reward over the rows; the first of equal ones."""
        texts = list(dict.fromkeys([_answer(_usual(rows)), *map(_answer, rows)]))
        # All rows of a text, then all of the next: one call shares the embedder's batches.
        scores = self._scores(list(product(texts, rows)))
        means = {}
        for i, text in enumerate(texts):
            means[text] = fmean(
                score.value for score in scores[i * len(rows) : (i + 1) * len(rows)]
            )
        return max(means, key=lambda text: means[text])

    def _scores(self, pairs: Sequence[tuple[str, Task]]) -> list[Scored]:
        outcomes: list[Outcome] = call_within(TIMEOUT_S, asyncio.run, _all(self._reward, pairs))
        scores = []
        for outcome in outcomes:
            if not isinstance(outcome, Scored):
                raise RuntimeError(f"the reward paid the blind prior nothing: {outcome}")
            scores.append(outcome)
        return scores


async def _all(reward: Any, pairs: Sequence[tuple[str, Task]]) -> list[Outcome]:
    """The reward's outcomes of completions, in their order."""

    async def score(text: str, task: Task) -> Outcome:
        outcome: Outcome | Awaitable[Outcome] = reward.score(
            EMPTY_TRAJECTORY, task, ScoreContext(0, [text])
        )
        return await outcome if isinstance(outcome, Awaitable) else outcome

    return await asyncio.gather(*(score(text, task) for text, task in pairs))


def _answer(task: Task) -> str:
    return ChartAnswers().answer(task, random.Random(0))


def _usual(rows: Sequence[Task]) -> Task:
    """A row with the most frequent value in each cell, over the most frequent size of table."""
    tables = [row.extra["table"] for row in rows]
    size = _most(map(_size, tables))
    tables = [table for table in tables if _size(table) == size]
    # Each entry holds the same row of all tables.
    stacked_rows = zip(*(table["rows"] for table in tables), strict=True)
    table = {
        "columns": _most_of_each(table["columns"] for table in tables),
        "rows": list(map(_most_of_each, stacked_rows)),
    }
    extra = {
        **rows[0].extra,
        "chart_type": _most(row.extra["chart_type"] for row in rows),
        "reasoning": _most(row.extra["reasoning"] for row in rows),
        "table": table,
    }
    truth = _most(row.ground_truth for row in rows)
    return dataclasses.replace(rows[0], ground_truth=truth, extra=extra)


def _most_of_each(lists: Iterable[Sequence[Any]]) -> list[Any]:
    """The most frequent value at each place of lists of the same length."""
    return [_most(values) for values in zip(*lists, strict=True)]


def _size(table: Any) -> tuple[int, ...]:
    return len(table["columns"]), *map(len, table["rows"])


def _most(values: Iterable[Any]) -> Any:
    return Counter(values).most_common(1)[0][0]
