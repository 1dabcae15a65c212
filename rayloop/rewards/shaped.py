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
    """The reward of ``source`` plus penalties of 0 or less.

    They are the components ``overlong``, ``repetition`` and ``length``; ``unshaped`` is the reward
    without them. Set ``reward.per: group`` with ``length``.
    """

    class Settings(SettingsModel):
        """Keys of ``with``."""

        source: Annotated[Component, REWARD]
        """The reward to which the penalties are added."""
        max_tokens: int = Field(gt=0)
        """Sampled tokens of the longest answer, in all turns; above it ``overlong`` is -1."""
        overlong: int = Field(0, ge=0)
        """DAPO's soft punishment (arXiv:2503.14476, equation 13); 0: none.

        It falls from 0 to -1 over this many tokens before ``max_tokens``.
        """
        repetition: float = Field(0.0, ge=0)
        """The penalty of an answer all of whose word n-grams are the same; 0: none.

        The penalty of other answers is proportional to the share of n-grams that repeat an earlier
        one (arXiv:2502.03373, appendix).
        """
        ngram: int = Field(3, ge=1)
        """Words of an n-gram."""
        length: float = Field(0.0, ge=0)
        """The penalty of the longest answer of a group; 0: none.

        It is multiplied by the group's mean reward (where that is above 0). The penalty of a
        shorter answer is proportional to its sampled tokens, as in prime-rl (559b447).
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
        """The outcome of one trajectory, which is scored as a group of one."""
        (outcome,) = await self.score_group([trajectory], task, [context])
        return outcome

    async def _score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        result = self._source.score(trajectory, task, context)
        if inspect.isawaitable(result):
            result = await result
        outcome = as_outcome(result)
        if not isinstance(outcome, Scored):
            return outcome
        settings = self._settings
        penalties = {}
        if settings.overlong:
            tokens = sampled(trajectory)
            penalties["overlong"] = overlong(tokens, settings.max_tokens, settings.overlong)
        if settings.repetition:
            share = repeated(" ".join(context.texts), settings.ngram)
            penalties["repetition"] = -settings.repetition * share
        return _penalized(outcome, penalties)

    async def score_group(
        self, trajectories: Sequence[Trajectory], task: Task, contexts: Sequence[ScoreContext]
    ) -> list[Outcome]:
        """The outcomes of a group, with ``length``."""
        outcomes = [
            await self._score(trajectory, task, context)
            for trajectory, context in zip(trajectories, contexts, strict=True)
        ]
        if not self._settings.length:
            return outcomes
        rewards = []
        lengths = []
        for trajectory, outcome in zip(trajectories, outcomes, strict=True):
            if isinstance(outcome, Scored):
                rewards.append(_unshaped(outcome))
                lengths.append(sampled(trajectory))
        if not rewards:
            return outcomes
        mean_reward = max(0.0, statistics.mean(rewards))
        longest = max(1, *lengths)
        most = -self._settings.length * mean_reward
        penalized: list[Outcome] = []
        for trajectory, outcome in zip(trajectories, outcomes, strict=True):
            if isinstance(outcome, Scored):
                length_penalty = most * sampled(trajectory) / longest
                penalized.append(_penalized(outcome, {"length": length_penalty}))
            else:
                penalized.append(outcome)
        return penalized


def sampled(trajectory: Trajectory) -> int:
    """The number of tokens that the policy sampled."""
    return sum(len(turn.token_ids) for turn in trajectory.sampled_turns)


def overlong(tokens: int, most: int, cache: int) -> float:
    """DAPO's penalty of a long answer (arXiv:2503.14476, equation 13).

    It is 0 up to ``most - cache`` tokens, -1 above ``most``, and linear between.
    """
    if tokens <= most - cache:
        return 0.0
    if tokens > most:
        return -1.0
    return (most - cache - tokens) / cache


def repeated(text: str, n: int) -> float:
    """The share of the text's word n-grams that repeat an earlier one, in [0, 1].

    It is 0 for a text without n-grams.
    """
    words = text.lower().split()
    ngrams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def _unshaped(outcome: Scored) -> float:
    """The reward without penalties."""
    return outcome.components.get("unshaped", outcome.value)


def _penalized(outcome: Scored, penalties: dict[str, float]) -> Scored:
    value = outcome.value + sum(penalties.values())
    components = {**outcome.components, "unshaped": _unshaped(outcome), **penalties}
    return replace(outcome, value=value, components=components)
