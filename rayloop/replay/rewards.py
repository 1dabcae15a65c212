"""The rewards of a recorded step, computed again from its trajectories and texts."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from rayloop.config.settings import without_foreign_code
from rayloop.core.failures import ConfigError
from rayloop.core.groups import Group, Member, Outcome, Scored, Unscored, UnscoredKind
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import Trajectory
from rayloop.replay.settings import foreign
from rayloop.rewards.scoring import RewardScoring
from rayloop.rewards.settings import RewardSettings
from rayloop.rewards.verdicts import Verdicts
from rayloop.rollout.step_record import RecordedStep

Place = tuple[int, int]
"""A member: the number of its group, and its index in the group."""
OF_THE_SOURCE = (
    UnscoredKind.INVALID_REWARD,
    UnscoredKind.GRADER_ERROR,
    UnscoredKind.NOT_APPLICABLE,
)
"""Kinds that the reward source decided; the others are failures of what was around it."""


@dataclass
class Rewards:
    """The outcomes by place. ``as_recorded``: places that were not computed, and why not."""

    outcomes: dict[Place, Outcome] = field(default_factory=dict)
    as_recorded: dict[Place, str] = field(default_factory=dict)

    @property
    def computed(self) -> int:
        """The number of outcomes that were computed."""
        return len(self.outcomes) - len(self.as_recorded)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why some outcomes were not computed, each reason once."""
        return tuple(sorted(set(self.as_recorded.values())))


@dataclass(frozen=True)
class ScoredEpisode:
    """A member that was played and whose reward its source decided."""

    place: Place
    member: Member
    trajectory: Trajectory
    texts: Sequence[str] | None


async def rewards(
    step: RecordedStep, settings: RewardSettings, *, trusted: bool, asks: bool = False
) -> Rewards:
    """The outcomes of all members.

    ``trusted``: the reward may be code outside of rayloop. ``asks``: a judge is asked, in place of
    the verdicts on record; raises ConfigError when it does not answer.
    """
    result = Rewards()
    scoring: RewardScoring | None = None
    reason = ""
    try:
        scoring = _scoring(settings, trusted)
    # The source is the user's code, whose constructor may raise anything.
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
    for group in step.groups:
        for place, member in enumerate(group.members):
            result.outcomes[group.number, place] = member.outcome
            result.as_recorded[group.number, place] = reason or "its episode has no reward"
    if scoring is None:
        return result
    calls = []
    for group in step.groups:
        played = list(_played(step, group))
        parts = [played] if settings.per == "group" else [[entry] for entry in played]
        calls += [_score(scoring, settings, group, part, result, asks) for part in parts if part]
    await asyncio.gather(*calls)
    return result


def _scoring(settings: RewardSettings, trusted: bool) -> RewardScoring:
    """The reward's source. Raises ConfigError, and whatever the source raises."""
    names = list(foreign(settings.model_dump(mode="json", by_alias=True)))
    if names and not trusted:
        raise ConfigError(f"{names[0]} is not a part of rayloop (--trust runs it)")
    with nullcontext() if trusted else without_foreign_code():
        scoring = RewardScoring(settings)
    if getattr(scoring.source, "transcript", False):
        raise ConfigError("the reward reads the transcript, which is not on record")
    return scoring


def _played(step: RecordedStep, group: Group) -> Iterator[ScoredEpisode]:
    """The members of a group whose reward its source decided for this step."""
    trajectories = [member.payload for member in group.members if member.payload is not None]
    texts: Sequence[Sequence[str] | None] = step.texts.get(group.number, ())
    if len(texts) != len(trajectories):
        texts = [None] * len(trajectories)
    remaining_texts = iter(texts)
    for place, member in enumerate(group.members):
        trajectory = member.payload
        if not isinstance(trajectory, Trajectory):
            continue
        member_texts = next(remaining_texts)
        outcome = member.outcome
        by_source = isinstance(outcome, Scored) or outcome.kind in OF_THE_SOURCE
        # A stored success keeps the reward of the step that played it.
        if by_source and not member.replayed:
            yield ScoredEpisode((group.number, place), member, trajectory, member_texts)


async def _score(
    scoring: RewardScoring,
    settings: RewardSettings,
    group: Group,
    part: Sequence[ScoredEpisode],
    result: Rewards,
    asks: bool,
) -> None:
    """Score members together, and put their outcomes into ``result``."""
    texts = [entry.texts for entry in part if entry.texts is not None]
    if len(texts) < len(part):
        for entry in part:
            result.as_recorded[entry.place] = "its texts are not on record"
        return
    contexts = [ScoreContext(group.step, turns, settings.timeout, None, asks) for turns in texts]
    saved: list[Mapping[str, Any]] = []
    for entry in part:
        if isinstance(entry.member.outcome, Scored):
            saved += entry.member.outcome.verdicts
    verdicts = None if asks else Verdicts(saved)
    trajectories = [entry.trajectory for entry in part]
    outcomes = await scoring.score_together(trajectories, group.task, contexts, verdicts)
    for entry, outcome in zip(part, outcomes, strict=True):
        if verdicts is not None and verdicts.missing:
            result.as_recorded[entry.place] = "the judge's verdict is not on record"
            continue
        is_absent = isinstance(outcome, Unscored) and outcome.kind not in OF_THE_SOURCE
        if asks and is_absent:
            raise ConfigError(f"--judge: {outcome.reason}")
        result.outcomes[entry.place] = outcome
        del result.as_recorded[entry.place]
