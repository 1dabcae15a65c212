"""A reward with penalties for length and repetition."""

import inspect
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from rayloop.config.settings import Component, SettingsModel
from rayloop.core.groups import Outcome, Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import Task, Trajectory
from rayloop.rewards.functions import as_outcome, as_source
from rayloop.rewards.settings import REWARD


class ShapedReward:
    """The reward of ``source`` plus penalties of 0 or less, which are the components ``overlong``,
    ``repetition`` and ``length``; ``unshaped`` is the reward without them. Set ``reward.per:
    group`` with ``length``.
    """

    class Settings(SettingsModel):
        """Keys of ``with``."""

        source: Annotated[Component, REWARD]
        """The reward that the penalties are added to."""
        max_tokens: int = Field(gt=0)
        """Sampled tokens of the longest answer, of all turns: from here on ``overlong`` is -1."""
        overlong: int = Field(0, ge=0)
        """DAPO's soft punishment (arXiv:2503.14476, equation 13): 0 to -1 over so many tokens
        before ``max_tokens``. 0: none.
        """
        repetition: float = Field(0.0, ge=0)
        """The penalty of an answer all of whose word n-grams are the same (arXiv:2502.03373,
        appendix); others have the share of n-grams that repeat an earlier one. 0: none.
        """
        ngram: int = Field(3, ge=1)
        """Words of an n-gram."""
        length: float = Field(0.0, ge=0)
        """The penalty of the longest answer of a group, times the group's mean reward (where that
        is above 0); a shorter answer has its share of those tokens of it. As prime-rl (559b447) has
        it for sampled tokens. 0: none.
        """

        @model_validator(mode="after")
        def _room(self) -> Self:
            if self.overlong > self.max_tokens:
                raise ValueError(
                    f"overlong ({self.overlong}) is a part of max_tokens ({self.max_tokens}); it"
                    " cannot be more"
                )
            return self

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._source: Any = as_source(settings.source.build(), settings.source.use, "trajectory")
        self.infrastructure = getattr(self._source, "infrastructure", False)
        self.transcript = getattr(self._source, "transcript", False)

    async def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        """The outcome of one trajectory, which is a group of its own."""
        return (await self.score_group([trajectory], task, [context]))[0]

    async def _score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        found = self._source.score(trajectory, task, context)
        outcome = as_outcome(await found if inspect.isawaitable(found) else found)
        if not isinstance(outcome, Scored):
            return outcome
        s, penalties = self._settings, dict[str, float]()
        if s.overlong:
            penalties["overlong"] = overlong(sampled(trajectory), s.max_tokens, s.overlong)
        if s.repetition:
            penalties["repetition"] = -s.repetition * repeated(" ".join(context.texts), s.ngram)
        return _with(outcome, penalties)

    async def score_group(
        self, trajectories: Sequence[Trajectory], task: Task, contexts: Sequence[ScoreContext]
    ) -> list[Outcome]:
        """The outcomes of a group, with ``length``."""
        outcomes = [
            await self._score(t, task, context)
            for t, context in zip(trajectories, contexts, strict=True)
        ]
        scored = [
            (t, outcome)
            for t, outcome in zip(trajectories, outcomes, strict=True)
            if isinstance(outcome, Scored)
        ]
        if not self._settings.length or not scored:
            return outcomes
        reward = max(
            0.0,
            statistics.mean(
                outcome.components.get("unshaped", outcome.value) for _, outcome in scored
            ),
        )
        longest = max(1, *(sampled(t) for t, _ in scored))
        most = -self._settings.length * reward
        return [
            (
                _with(outcome, {"length": most * sampled(t) / longest})
                if isinstance(outcome, Scored)
                else outcome
            )
            for outcome, t in zip(outcomes, trajectories, strict=True)
        ]


def sampled(trajectory: Trajectory) -> int:
    """Tokens that the policy sampled."""
    return sum(len(turn.token_ids) for turn in trajectory.sampled_turns)


def overlong(tokens: int, most: int, cache: int) -> float:
    """0 up to ``most - cache`` tokens, -1 above ``most``, linear between (arXiv:2503.14476,
    equation 13).
    """
    return (
        0.0
        if tokens <= most - cache
        else -1.0
        if tokens > most
        else (most - cache - tokens) / cache
    )


def repeated(text: str, n: int) -> float:
    """The share of the text's word n-grams that occurred before, in [0, 1]; 0 for a text without
    one.
    """
    words = text.lower().split()
    found = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return 1 - len(set(found)) / len(found) if found else 0.0


def _with(outcome: Scored, penalties: dict[str, float]) -> Scored:
    before = outcome.components.get("unshaped", outcome.value)
    value = outcome.value + sum(penalties.values())
    return replace(
        outcome, value=value, components={**outcome.components, "unshaped": before, **penalties}
    )
