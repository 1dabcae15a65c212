"""A recorded step under other settings: the differences per group and per token."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import torch

from rayloop.core.groups import Group, Scored
from rayloop.grpo.batch import TrainSample
from rayloop.replay.compare import fate, totals, trained_members
from rayloop.replay.decisions import Decisions
from rayloop.replay.losses import Computed, SegmentKey, Shares, TokenRecord
from rayloop.replay.rewards import Rewards
from rayloop.rollout.step_record import RecordedStep

LISTED_TOKENS = 10
"""Tokens that the terminal lists, from the largest change of the loss."""


@dataclass(frozen=True)
class Change:
    """A value on record, and the one that other settings give; None: there is none."""

    then: float | None
    now: float | None

    @property
    def size(self) -> float:
        """The absolute difference, where a missing value counts as 0."""
        return abs((self.now or 0.0) - (self.then or 0.0))


@dataclass(frozen=True)
class GroupChange:
    """A group: mean reward, trained members, largest |advantage|, and its part of the loss."""

    group: int
    task: str
    reward: Change
    trained: Change
    advantage: Change
    loss: Change
    statuses: tuple[str, ...]
    """The members that end otherwise, as ``sample: then -> now``."""


@dataclass(frozen=True)
class TokenChange:
    """A sampled token: its place, advantage and weighted loss.

    ``segment``: its number among those of the trajectory; ``turn`` and ``token`` count sampled
    turns of the segment, and tokens of the turn.
    """

    group: int
    sample: int
    segment: int
    turn: int
    token: int
    advantage: Change
    loss: Change


@dataclass(frozen=True)
class WhatIf:
    """The differences of a step.

    ``loss``: the sum over its updates; ``rewards_as_recorded``: why some were not computed.
    """

    step: int
    loss: Change
    groups: tuple[GroupChange, ...]
    tokens: tuple[TokenChange, ...]
    stand_ins: int
    """Tokens that the run did not train: the engine's log-probs stand for the trainer's."""
    rewards_as_recorded: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def what_if(
    step: RecordedStep,
    rewards: Rewards,
    before: Decisions,
    now: Decisions,
    shares: tuple[Shares, Shares],
    record: TokenRecord,
    computed: Computed,
) -> WhatIf:
    """The differences between the record and what other settings make of the step.

    ``shares``: the samples that were trained, and that would be.
    """
    losses_then = totals(record.values)
    losses_now = totals(computed.tokens)
    trained_then = {group.number for group in before.trained}
    trained_now = {group.number for group in now.trained}
    groups = []
    for number, then in sorted(before.groups.items()):
        group = now.groups[number]
        places = [(number, place) for place in range(len(group.members))]
        statuses = [
            f"{place}: {fate(old)} -> {fate(new)}"
            for place, (old, new) in enumerate(zip(then.members, group.members, strict=True))
            if old.status != new.status
        ]
        groups.append(
            GroupChange(
                number,
                group.task.id,
                Change(_mean_reward(then), _mean_reward(group)),
                Change(trained_members(then, trained_then), trained_members(group, trained_now)),
                Change(_largest_advantage(then), _largest_advantage(group)),
                Change(
                    sum(losses_then.get(place, 0.0) for place in places),
                    sum(losses_now.get(place, 0.0) for place in places),
                ),
                tuple(statuses),
            )
        )
    stand_ins = sum(
        len(values["loss"]) for key, values in computed.tokens.items() if key not in record.values
    )
    return WhatIf(
        step.step,
        Change(sum(losses_then.values()), sum(losses_now.values())),
        tuple(groups),
        tuple(_token_changes(shares, record, computed)),
        stand_ins,
        rewards.reasons,
    )


def _mean_reward(group: Group) -> float | None:
    values = [m.outcome.value for m in group.members if isinstance(m.outcome, Scored)]
    return sum(values) / len(values) if values else None


def _largest_advantage(group: Group) -> float | None:
    advantages: list[float] = []
    for member in group.members:
        if member.credit is not None:
            advantages += member.credit.turns or (member.credit.advantage,)
    return max(map(abs, advantages), default=None)


def _token_changes(
    shares: tuple[Shares, Shares], record: TokenRecord, computed: Computed
) -> list[TokenChange]:
    """The tokens whose loss or advantage differs, from the largest change of the loss."""
    then, now = map(_by_key, shares)
    changes = []
    for key in then | now:
        losses = (record.values.get(key, {}).get("loss"), computed.tokens.get(key, {}).get("loss"))
        advantages = [
            samples[key].advantages if key in samples else None for samples in (then, now)
        ]
        for position, (turn, token) in enumerate(_places((now | then)[key])):
            loss = Change(*(_at(values, position) for values in losses))
            advantage = Change(*(_at(values, position) for values in advantages))
            if loss.size or advantage.size:
                group, sample = key.place
                changes.append(
                    TokenChange(group, sample, key.segment, turn, token, advantage, loss)
                )
    return sorted(changes, key=lambda change: -change.loss.size)


def _by_key(updates: Shares) -> dict[SegmentKey, TrainSample]:
    shares = chain.from_iterable(updates)
    return {segment.key: segment.sample for segment in chain.from_iterable(shares)}


def _places(sample: TrainSample) -> Iterator[tuple[int, int]]:
    """The turn and the place in it of each sampled token."""
    turn = -1
    for token in sample.turn_position.tolist():
        turn += token == 0
        yield turn, token


def _at(values: torch.Tensor | None, position: int) -> float | None:
    return None if values is None else float(values[position])
