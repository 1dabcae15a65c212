"""What the rewards are given: one completion with the row's truth; and what each variant of them is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rayloop.core.types import Task

SEVEN = ("format", "accuracy", "length", "tags", "type", "table", "process")
"""The components that are paid, in the order in which the original lists its functions."""
PUBLISHED = {
    "format_reward": "format",
    "accuracy_reward": "accuracy",
    "length_think_reward": "length",
    "num_token_reward": "tags",
    "chart_type_reward": "type",
    "table_style_reward": "table",
    "process_style_reward": "process",
}
"""The original's name of each."""

Pair = tuple[str, str]
"""A text of the policy's, and the true one that it should resemble."""


@dataclass(frozen=True, slots=True)
class Sample:
    """``text`` is the raw completion; ``tokens`` how many were sampled for it, None when nobody counted.

    ``table`` and ``reasoning`` may be None: the row's rationale could not be parsed when the data was made. ``where``: the row.
    """

    text: str
    label: Any = None
    chart_type: Any = None
    table: Any = None
    reasoning: Any = None
    tokens: int | None = None
    where: str = ""

    @classmethod
    def of(cls, text: str, task: Task, tokens: int | None = None) -> Sample:
        """The last turn's text with the truth of a row that has the data set's columns."""
        extra = task.extra
        return cls(
            text, task.ground_truth, extra.get("chart_type"), extra.get("table"), extra.get("reasoning"), tokens,
            f"task {task.id}",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Paid:
    """Components of one sample before the process reward is added; ``flags`` name what went wrong."""

    components: Mapping[str, float]
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Process:
    """What the process reward asks the embedder: ``pairs`` of texts, none when there is nothing to ask; ``flags`` say why."""

    pairs: Sequence[Pair] = ()
    flags: tuple[str, ...] = ()


class Variant(Protocol):
    """One definition of the rewards."""

    components: tuple[str, ...]
    """Of ``SEVEN`` those that it defines."""

    def rules(self, samples: Sequence[Sample]) -> list[Paid]:
        """The components that need no embedder, and the measures ``relaxed`` and ``exact``. Raises DataFailure."""
        ...

    def process(self, sample: Sample) -> Process: ...

    def conformity(self, pairs: Sequence[Pair], cosines: Sequence[float]) -> float:
        """The process reward from ``process``'s pairs, of which there is at least one, and their cosines."""
        ...

    def answer(self, text: str) -> str | None:
        """The answer as this variant reads it, None without one."""
        ...
