"""The measures of the chart benchmarks: relaxed accuracy, exact match, and ChartQAPro's own rule."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

from rayloop.config.settings import SettingsModel
from rayloop.core.groups import Outcome, Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import Task, Trajectory
from rayloop.recipes.chart_rvr.rewards.original import evaluated_answer, exact_match, relaxed_accuracy

EXACTLY = ("Fact Checking", "Multi Choice")
"""ChartQAPro's types of question whose answers must be met exactly."""
SIMILAR = 0.5
"""A text less alike than this earns nothing (ANLS)."""


class ChartAnswer:
    """Pays the share of the answer that is right by the benchmark's rule; components ``accuracy``, ``relaxed`` and ``exact``.

    The answer is what the tag ``answer`` holds, or the whole text without one, as the published evaluation reads it. It reads the
    columns ``kind`` (type of the question) and ``year`` of the row for ChartQAPro (``keep: [kind, year]`` of ChartRows).
    """

    class Settings(SettingsModel):
        rule: Literal["relaxed", "chartqapro", "chartqapro_published"] = "relaxed"
        """relaxed: within 5 % of a number, else the same text (ChartQA and most others). chartqapro: its own rule.
        chartqapro_published: Chart-RVR's evaluation instead, within 100 %; to compare with its printed figures."""

    def __init__(self, settings: ChartAnswer.Settings) -> None:
        self._rule = settings.rule

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        """The answer by the benchmark's rule, 0..1."""
        said, true = evaluated_answer(context.texts[-1]), str(task.ground_truth)
        relaxed = relaxed_accuracy(said, true)
        accuracy = {
            "relaxed": lambda: relaxed,
            "chartqapro": lambda: chartqapro(said, true, str(task.extra.get("kind")), task.extra.get("year")),
            "chartqapro_published": lambda: relaxed_accuracy(said, true, tolerance=1.0),
        }[self._rule]()
        return Scored(accuracy, {"accuracy": accuracy, "relaxed": relaxed, "exact": exact_match(said, true)})


def chartqapro(said: str, true: str, kind: str, year: Any = None) -> float:
    """Relaxed correctness as ChartQAPro defines it, 0..1: lists item by item, one too many or too few counting 0; years, fact
    checking and multiple choice exactly; numbers within 5 %, per cent signs apart; other texts by ANLS.

    ``year``: "YES" for each item of the answer that is a year; one entry stands for all. Of a conversation the last is the
    answer's. Source: evaluate_predictions.py of vis-nlp/ChartQAPro, and its paper, which asks for exact answers to ``EXACTLY``
    (the script works that out, and does not use it). A list without quotes is read on both sides.
    """
    mine, theirs = _items(said), _items(true)
    flags = [str(flag).upper() == "YES" for flag in (year if isinstance(year, list | tuple) else [year])]
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
    number, truth = _number(said), _number(true)
    if number is not None and truth is not None:
        return float(abs(number - truth) <= 0.05 * abs(truth))
    return anls(" ".join(said.lower().split()), " ".join(true.lower().split()))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def anls(said: str, true: str) -> float:
    """Normalised Levenshtein similarity, 1 for equal texts; 0 from a distance of half the longer text on."""
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
