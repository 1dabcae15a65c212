"""Scores saved answers about images: ``python -m rayloop score pyvision FILE.jsonl``."""

from collections.abc import Mapping
from typing import Any

from rayloop.core.types import Message, Task
from rayloop.judge.rules.plain import extract
from rayloop.recipes.pyvision import original
from rayloop.rewards.saved import OfflineScoring, Saved, name_of, texts_of, trajectory_of, truth_of

TRUTHS = ("ground_truth", "answer", "truth", "gold", "label")
"""Columns of the true answer."""
CALLS = ("calls", "tool_turns_executed", "tool_cnt")
"""Columns of the number of turns that ran code."""


def read(row: Mapping[str, Any], where: str) -> Saved:
    """A row ``{completion, answer, question?, data_source?, calls?, transcript?}``.

    It may also be a line of ``rollouts``.

    The original reads ``transcript``: everything after the prompt, tool output included. Raises
    DataFailure.
    """
    question = row.get("question", row.get("prompt"))
    messages = (Message("user", (question,)),) if isinstance(question, str) else ()
    source = str(row.get("data_source") or row.get("source") or row.get("kind") or "")
    task = Task(name_of(row, where), messages, truth_of(row, TRUTHS, where), source, row)
    return Saved(texts_of(row, where), task, row, trajectory_of(row, CALLS))


def answer(saved: Saved, variant: str) -> str | None:
    """The answer that the variant reads; None without one."""
    if variant.endswith("original"):
        transcript = saved.row.get("transcript")
        text = transcript if isinstance(transcript, str) else "".join(saved.texts)
        if variant == "original":
            return original.answer(text)
        return original.deepeyes(text).answer
    return extract(saved.texts[-1], "tagged_box")


DEEPEYES = "rayloop.recipes.pyvision.deepeyes:DeepEyesReward"
SCORING = OfflineScoring(
    use="rayloop.recipes.pyvision.reward:PyVisionReward",
    variants=("corrected", "original", "deepeyes", "deepeyes-original"),
    rewards=("accuracy", "calls", "right", "format", "tool", "looked"),
    settings=lambda variant, reward: {
        "variant": "original" if variant.endswith("original") else "corrected"
    },
    read=read,
    aliases={"acc_score": "accuracy", "is_answer_right": "right"},
    answer=answer,
    others={"deepeyes": DEEPEYES, "deepeyes-original": DEEPEYES},
)
