"""Rules for Chart-RVR's vectors: the seven published rewards, alone, in a batch and together, and
the accuracy of its evaluation.

They ask the reward as a run does, with ``variant: original`` (and ``fork``): what differs is a
mismatch, nothing deviates.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rayloop.core.groups import Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import EndReason, Sampling, Task, Trajectory, TrajectoryId
from rayloop.recipes.chart_rvr.rewards.original import (
    exact_match,
    process_text,
    relaxed_accuracy,
    table_style_rewards,
)
from rayloop.recipes.chart_rvr.rewards.reading import PUBLISHED
from rayloop.recipes.chart_rvr.rewards.reward import ChartReward
from tests.vector_rules.entries import Entry, Rule, Unknown

EMPTY_TRAJECTORY = Trajectory(TrajectoryId(0, 0), 0, "t", 0, (), Sampling(), EndReason.DONE)
WORDS = {"use": "rayloop.recipes.chart_rvr.rewards.embedders:WordEmbedder"}
ABOUT = (
    "note",
    "think_chars",
    "step_markers",
    "answer_in_tags",
    "type_in_tags",
    "table_in_tags",
    "steps",
    "tables",
)
"""What entries say about their completion."""


def _scored(
    texts: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    variant: str = "original",
    **settings: Any,
) -> list[Scored]:
    """What the reward pays for a batch; ``rows`` have the data set's columns."""
    weights = {} if settings.get("embedder") else {"process": 0}
    reward = ChartReward(ChartReward.Settings(variant=variant, **{"weights": weights} | settings))
    tasks = [Task("t", (), row.get("label"), extra=row) for row in rows]
    if len(texts) > 1:
        trajectories, contexts = (
            [EMPTY_TRAJECTORY] * len(texts),
            [ScoreContext(0, [text]) for text in texts],
        )
        assert all(task.extra == tasks[0].extra for task in tasks), "a group has one task"
        found: Any = reward.score_group(trajectories, tasks[0], contexts)
    else:
        found = reward.score(EMPTY_TRAJECTORY, tasks[0], ScoreContext(0, texts))
    if inspect.isawaitable(found):
        found = asyncio.run(_awaited(found))
    outcomes = [found] if isinstance(found, Scored) else list(found)
    assert all(isinstance(outcome, Scored) for outcome in outcomes)
    return outcomes


async def _awaited(found: Any) -> Any:
    return await found


def alone(entry: Entry, file: Sequence[Entry]) -> float:
    """One of the functions that look at the text, and at one column of the row."""
    entry.only("completion", "label", "gold", "chart_type", *ABOUT)
    kind = entry.inputs.get("gold", entry.inputs.get("chart_type"))
    row = {"label": entry.inputs.get("label"), "chart_type": kind}
    (scored,) = _scored([entry.need("completion")], [row])
    return scored.components[PUBLISHED[entry.reward]]


def table(entry: Entry, file: Sequence[Entry]) -> Any:
    """In the shape of what is expected: a number or a list, of the original and of its fork."""
    entry.only("completion", "completions", "gold", "table", *ABOUT)
    texts = (
        entry.inputs["completions"] if "completions" in entry.inputs else [entry.need("completion")]
    )
    if "gold" not in entry.inputs and entry.need("table") is None:  # no such column
        return _shaped(
            {v: table_style_rewards(texts, None, fork=v == "fork") for v in ("original", "fork")},
            entry,
        )
    gold = entry.inputs.get("gold", entry.inputs.get("table"))
    if isinstance(gold, list) and len(gold) == len(texts) > 1 and any(g != gold[0] for g in gold):
        return _shaped(
            {v: table_style_rewards(texts, gold, fork=v == "fork") for v in ("original", "fork")},
            entry,
        )
    gold = gold[0] if isinstance(gold, list) and gold else gold
    rows = [{"table": gold}] * len(texts)
    return _shaped(
        {v: [(s.components["table"], s.flags) for s in _scored(texts, rows, v)] for v in VARIANTS},
        entry,
    )


VARIANTS = ("original", "fork")


def _shaped(paid: Mapping[str, Sequence[tuple[float, Any]]], entry: Entry) -> Any:
    values = {variant: [value for value, _ in found] for variant, found in paid.items()}
    if not isinstance(entry.expected, Mapping):
        return _as(values["fork" if "fork" in entry.reward else "original"], entry.expected)
    return {
        variant: _as(values[variant], expected)
        for variant, expected in entry.expected.items()
        if variant in values
    }


def _as(values: list[float], expected: Any) -> Any:
    return values if isinstance(expected, list) or len(values) > 1 else values[0]


def process(entry: Entry, file: Sequence[Entry]) -> float:
    entry.only("completion", "gold", "reasoning", *ABOUT)
    row = {"reasoning": entry.inputs.get("gold", entry.inputs.get("reasoning"))}
    (scored,) = _scored([entry.need("completion")], [row], embedder=WORDS)
    return scored.components["process"]


def all_seven(entry: Entry, file: Sequence[Entry]) -> Mapping[str, float]:
    """Without a ``reasoning`` the true one is the completion's own."""
    entry.only("completion", "label", "chart_type", "table", "reasoning")
    text = entry.need("completion")
    row = {"reasoning": process_text(text), **entry.inputs}
    (scored,) = _scored([text], [row], embedder=WORDS)
    return {theirs: scored.components[ours] for theirs, ours in PUBLISHED.items()} | {
        "sum": scored.value
    }


def relaxed(entry: Entry, file: Sequence[Entry]) -> float:
    """The name says the tolerance: ``tol .05``, ``tol 1.0``; and whether what cannot be answered
    counts as right.
    """
    entry.only("prediction", "target")
    found = re.search(r"tol\s*=?\s*(\d*\.?\d+)", entry.reward)
    if found is None and "unanswerable" not in entry.reward and "(" in entry.reward:
        raise Unknown(f"no tolerance in {entry.reward!r}")
    unanswerable = "unanswerable=True" in entry.reward
    tolerance = float(found[1]) if found else 0.05
    return relaxed_accuracy(
        entry.need("prediction"), entry.need("target"), tolerance, unanswerable=unanswerable
    )


def exact(entry: Entry, file: Sequence[Entry]) -> float:
    entry.only("prediction", "target")
    return exact_match(entry.need("prediction"), entry.need("target"))


RULES: dict[str, Rule] = {
    r"^(format|accuracy|length_think|num_token|chart_type)_reward$": alone,
    r"^table_style_reward": table,
    r"^process_style_reward": process,
    r"^all 7": all_seven,
    r"^eval relaxed_accuracy": relaxed,
    r"^eval exact_match": exact,
}
