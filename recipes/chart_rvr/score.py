"""Scores saved answers to chart questions: ``python -m rayloop score chart_rvr FILE.jsonl``."""

from collections.abc import Mapping, Sequence
from typing import Any

from rayloop.core.types import Task
from rayloop.data.rows import parsed
from rayloop.recipes.chart_rvr.rewards.original import (
    evaluated_answer,
    exact_match,
    relaxed_accuracy,
)
from rayloop.recipes.chart_rvr.rewards.reading import PUBLISHED, SEVEN, parts
from rayloop.rewards.saved import OfflineScoring, Saved, name_of, texts_of, truth_of

LABELS = ("label", "gold", "ground_truth", "truth", "answer")
"""Columns of the true answer."""
EXTRACTED = "extracted_answer"
"""Column of the answer that the file's own evaluation read."""
SHOWN = 20


def read(row: Mapping[str, Any], where: str) -> Saved:
    """``{completion, label, chart_type?, table?, reasoning?}``, or a line of a run's ``rollouts``.

    Raises DataFailure.
    """
    task = Task(
        name_of(row, where),
        (),
        truth_of(row, LABELS, where),
        extra={**row, "table": parsed(row.get("table"))},
    )
    return Saved(texts_of(row, where), task, row)


def settings(variant: str, reward: str | None) -> dict[str, Any]:
    """The process reward is left out unless it is the one that is asked for: it needs an embedder
    (``--with embedder=...``).
    """
    return {"variant": variant} | ({} if reward == "process" else {"weights": {"process": 0}})


def answer(saved: Saved, variant: str) -> str | None:
    """The answer that the variant reads; None without one."""
    text = saved.texts[-1]
    return evaluated_answer(text) if variant in ("original", "fork") else parts(text).answer or None


def notes(saved: Sequence[Saved], variant: str) -> list[str]:
    """Compares with the file's own extracted answers, and reports their published accuracy."""
    own = [one for one in saved if isinstance(one.row.get(EXTRACTED), str)]
    if not own:
        return []
    others = [one for one in own if (answer(one, variant) or "") != one.row[EXTRACTED]]
    same = len(own) - len(others)
    pairs = [(one.row[EXTRACTED], str(one.task.ground_truth)) for one in own]
    relaxed = sum(relaxed_accuracy(said, true) for said, true in pairs) / len(pairs)
    exact = sum(exact_match(said, true) for said, true in pairs) / len(pairs)
    shown = [
        f"  {one.task.id}: read {answer(one, variant)!r:.60}, {EXTRACTED}"
        f" {one.row[EXTRACTED]!r:.60}"
        for one in others[:SHOWN]
    ]
    more = [f"  and {len(others) - SHOWN} more"] if len(others) > SHOWN else []
    return [
        f"{EXTRACTED} as published: relaxed {relaxed:.4f}, exact {exact:.4f}",
        f"answers equal to {EXTRACTED}: {same} of {len(own)} ({100 * same / len(own):.2f} %)",
        *shown,
        *more,
    ]


SCORING = OfflineScoring(
    use="rayloop.recipes.chart_rvr.rewards.reward:ChartReward",
    variants=("corrected", "original", "fork", "paper"),
    rewards=(*SEVEN, "relaxed", "exact"),
    settings=settings,
    read=read,
    aliases=PUBLISHED,
    answer=answer,
    notes=notes,
)
