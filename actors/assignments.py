"""The share of a step that each rank of the policy trains on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rayloop.core.groups import Credit, Group, Member, Ref
from rayloop.core.types import Trajectory, TrajectoryId, Version
from rayloop.grpo.balance import MemberLength, mini_batches, shares
from rayloop.grpo.settings import UpdateSettings
from rayloop.grpo.staleness import lag


@dataclass(frozen=True)
class Assignment:
    """One trajectory to train on. ``payload`` and ``ref_logprobs`` are object references."""

    id: TrajectoryId
    payload: Ref[Trajectory]
    credit: Credit
    ref_logprobs: Ref[Any] | None = None
    on_policy: bool = False
    lag: int = 0
    group_tokens: int = 0


def assignments(
    groups: Sequence[Group],
    ranks: int,
    update: UpdateSettings,
    seed: int,
    version: Version,
    nominal: int,
    *,
    treat_as_on_policy: bool,
    together: int = 1,
) -> list[list[list[Assignment]]]:
    """The kept members of the groups that each rank trains on, for each update of a step.

    Mini-batches are cut at group boundaries and shuffled by seed and step; whole groups are spread
    over the ranks (``shares``). ``nominal``: trajectories of a full step. ``together``: consecutive
    ranks that have one share, and split its rows.
    """

    def assignment(member: Member, group_tokens: int) -> Assignment:
        assert member.credit is not None
        assert member.payload is not None
        return Assignment(
            member.summary.id,
            member.payload,
            member.credit,
            member.ref_logprobs,
            on_policy=member.replayed and treat_as_on_policy,
            lag=lag(member.summary.first_version, version),
            group_tokens=group_tokens,
        )

    plan: list[list[list[Assignment]]] = [[] for _ in range(ranks)]
    sizes = [len(group.kept) for group in groups]
    for batch in mini_batches(sizes, update, seed, version.step, nominal):
        members_by_group = [groups[index].kept for index in batch]
        lengths = [_lengths(members) for members in members_by_group]
        tokens = [_sampled_tokens(members) for members in members_by_group]
        for number, share in enumerate(shares(lengths, ranks // together)):
            for rank in range(number * together, (number + 1) * together):
                rank_share = [
                    assignment(members_by_group[group][member], tokens[group])
                    for group, member in share
                ]
                plan[rank].append(rank_share)
    return plan


def _lengths(members: Sequence[Member]) -> list[MemberLength]:
    return [MemberLength.of(member.summary) for member in members]


def _sampled_tokens(members: Sequence[Member]) -> int:
    return sum(member.summary.sampled_tokens for member in members)
