"""Scores saved answers to chart questions: ``python -m rayloop score chart_rvr FILE.jsonl``."""

from collections.abc import Mapping, Sequence
from typing import Any

from rayloop.core.types import Task
from rayloop.data.rows import parsed
from rayloop.recipes.chart_rvr.measure import accuracy_plus
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
SHOWN_ANSWERS = 20


def read(row: Mapping[str, Any], where: str) -> Saved:
    """``{completion, label, chart_type?, table?, reasoning?}``, or a line of a run's ``rollouts``.

    Raises DataFailure.
    """
    extra = {**row, "table": parsed(row.get("table"))}
    task = Task(name_of(row, where), (), truth_of(row, LABELS, where), extra=extra)
    return Saved(texts_of(row, where), task, row)


def settings(variant: str, reward: str | None) -> dict[str, Any]:
    """The settings of a variant, without the process reward unless it is asked for.

    It needs an embedder (``--with embedder=...``).
    """
    if reward == "process":
        return {"variant": variant}
    return {"variant": variant, "weights": {"process": 0}}


def answer(saved: Saved, variant: str) -> str | None:
    """The answer that the variant reads; None without one."""
    text = saved.texts[-1]
    if variant in ("original", "fork"):
        return evaluated_answer(text)
    return parts(text).answer or None


def notes(saved: Sequence[Saved], variant: str) -> list[str]:
    """Acc+ of ChartBench's pairs, and a comparison with the file's own extracted answers.

    The published accuracy of the extracted answers is reported too.
    """
    both_right = accuracy_plus(saved)
    if both_right:
        return [f"Acc+ {sum(both_right) / len(both_right):.4f} over {len(both_right)} pairs"]
    rows = [entry for entry in saved if isinstance(entry.row.get(EXTRACTED), str)]
    if not rows:
        return []
    differing = [entry for entry in rows if (answer(entry, variant) or "") != entry.row[EXTRACTED]]
    same = len(rows) - len(differing)
    pairs = [(entry.row[EXTRACTED], str(entry.task.ground_truth)) for entry in rows]
    relaxed = sum(relaxed_accuracy(said, true) for said, true in pairs) / len(pairs)
    exact = sum(exact_match(said, true) for said, true in pairs) / len(pairs)
    lines = [
        f"{EXTRACTED} as published: relaxed {relaxed:.4f}, exact {exact:.4f}",
        f"answers equal to {EXTRACTED}: {same} of {len(rows)} ({100 * same / len(rows):.2f} %)",
    ]
    lines += [
        f"  {entry.task.id}: read {answer(entry, variant)!r:.60}, {EXTRACTED}"
        f" {entry.row[EXTRACTED]!r:.60}"
        for entry in differing[:SHOWN_ANSWERS]
    ]
    if len(differing) > SHOWN_ANSWERS:
        lines.append(f"  and {len(differing) - SHOWN_ANSWERS} more")
    return lines


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
