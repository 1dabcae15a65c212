"""A recorded step against what is computed of it now."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rayloop.core.groups import Group, Member, Outcome, Scored
from rayloop.replay.decisions import Decisions
from rayloop.replay.losses import LOSSES, Computed, TokenRecord
from rayloop.replay.rewards import Place, Rewards
from rayloop.rollout.step_record import RecordedStep

GPU_TOLERANCE = 1e-5
"""Largest relative difference of a loss that a GPU computed, whose exponential rounds otherwise."""
MOST_DIFFERENCES = 20


@dataclass
class Count:
    """How many of ``total`` are equal, with a sentence on each of the first that differ."""

    equal: int = 0
    total: int = 0
    differences: list[str] = field(default_factory=list)

    def add(self, equal: bool, difference: str) -> None:
        """Count one more."""
        self.total += 1
        self.equal += equal
        if not equal and len(self.differences) < MOST_DIFFERENCES:
            self.differences.append(difference)

    @property
    def all_equal(self) -> bool:
        """Whether nothing differs."""
        return self.equal == self.total


def decisions(step: RecordedStep, rewards: Rewards, now: Decisions) -> dict[str, Count]:
    """The rewards, statuses and advantages of all members against the record."""
    counts = {name: Count() for name in ("rewards", "statuses", "advantages")}
    for then in step.groups:
        group = now.groups[then.number]
        for place, (before, member) in enumerate(zip(then.members, group.members, strict=True)):
            where = name(then.number, place)
            if (then.number, place) not in rewards.as_recorded:
                counts["rewards"].add(
                    same_outcome(before.outcome, member.outcome),
                    f"{where}: {worth(before.outcome)} on record, {worth(member.outcome)} now",
                )
            counts["statuses"].add(
                before.status == member.status,
                f"{where}: {fate(before)} on record, {fate(member)} now",
            )
            counts["advantages"].add(
                before.credit == member.credit,
                f"{where}: advantage {before.advantage} on record, {member.advantage} now",
            )
    return counts


def losses(step: RecordedStep, record: TokenRecord, now: Computed) -> dict[str, Count]:
    """The losses of tokens and micro-batches against the record."""
    device = step.ranks[0]["device"] if step.ranks else "cpu"
    tolerance = 0.0 if device == "cpu" else GPU_TOLERANCE
    tokens = Count()
    for key, values in record.values.items():
        results = now.tokens.get(key, {})
        equal = torch.ones(len(values["loss"]), dtype=torch.bool)
        for column in LOSSES:
            if column in values:
                then = values[column]
                missing = torch.full_like(then, math.nan)
                equal &= _equal(then, results.get(column, missing), tolerance)
        for position, is_equal in enumerate(equal.tolist()):
            where = f"{name(*key.place)}, token {position} of segment {key.segment}"
            tokens.add(is_equal, where)
    micro_batches = Count()
    for number, ranks in enumerate(now.batch_losses):
        for rank, batches in enumerate(ranks):
            then = torch.tensor(step.ranks[rank]["updates"][number]["tokens"]["batch_loss"])
            equal = _equal(then, torch.tensor(batches, dtype=then.dtype), tolerance)
            for place, is_equal in enumerate(equal.tolist()):
                where = f"update {number}, rank {rank}, micro-batch {place}"
                micro_batches.add(is_equal, f"{where}: {then[place]:g} on record")
    return {"tokens": tokens, "micro-batches": micro_batches}


def _equal(then: torch.Tensor, now: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Where two tensors are equal bit for bit, or within a relative ``tolerance``."""
    if tolerance:
        return torch.isclose(then, now, rtol=tolerance, atol=tolerance, equal_nan=True)
    return (then == now) | (then.isnan() & now.isnan())


def name(group: int, place: int) -> str:
    """A member, as it is called in a sentence."""
    return f"group {group}, sample {place}"


def same_outcome(before: Outcome, now: Outcome) -> bool:
    """Whether two outcomes are worth the same. Reasons may name paths of a machine."""
    if isinstance(before, Scored) and isinstance(now, Scored):
        return before == now
    return (
        not isinstance(before, Scored) and not isinstance(now, Scored) and before.kind == now.kind
    )


def worth(outcome: Outcome) -> str:
    """An outcome in a word."""
    if isinstance(outcome, Scored):
        return repr(outcome.value)
    return f"no reward ({outcome.kind})"


def fate(member: Member) -> str:
    """What a step did with a member, in a word."""
    status = member.status
    if status is None:
        return "kept"
    return f"{status.state}[{status.reason}]" if status.reason else str(status.state)


def trained_members(group: Group | None, trained: set[int]) -> int:
    """How many members of a group a step trains."""
    return len(group.kept) if group is not None and group.number in trained else 0


def totals(tokens: Mapping[Any, Mapping[str, torch.Tensor]]) -> dict[Place, float]:
    """The weighted loss of each member, over its segments and all updates."""
    sums: dict[Place, float] = {}
    for key, values in tokens.items():
        sums[key.place] = sums.get(key.place, 0.0) + float(values["loss"].double().sum())
    return sums
