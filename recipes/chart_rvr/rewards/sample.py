"""The input of the rewards: a completion with the row's truth; and the interface of a variant."""

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
"""A text of the policy, and the true text to compare with."""


@dataclass(frozen=True, slots=True)
class ChartSample:
    """``text`` is the raw completion; ``tokens`` the number of sampled tokens, None when unknown.

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
    def of(cls, text: str, task: Task, tokens: int | None = None) -> ChartSample:
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
    """The texts that the process reward embeds: ``pairs``, none when there is nothing to compare; ``flags`` give the reason."""

    pairs: Sequence[Pair] = ()
    flags: tuple[str, ...] = ()


class Variant(Protocol):
    """One definition of the rewards."""

    components: tuple[str, ...]
    """The components of ``SEVEN`` that it defines."""

    def rules(self, samples: Sequence[ChartSample]) -> list[Paid]:
        """The components that need no embedder, and the measures ``relaxed`` and ``exact``. Raises DataFailure."""
        ...

    def process(self, sample: ChartSample) -> Process:
        """The pairs of texts that the process reward compares."""
        ...

    def conformity(self, pairs: Sequence[Pair], cosines: Sequence[float]) -> float:
        """The process reward from ``process``'s pairs, of which there is at least one, and their cosines."""
        ...

    def answer(self, text: str) -> str | None:
        """The answer as this variant reads it, None without one."""
        ...
