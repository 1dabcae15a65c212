"""Dynamic sampling with partial groups: filter, rank, refill.

DAPO, arXiv:2503.14476; docs/algorithm.md, section 4.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from rayloop.core.failures import GenerationBudgetSpent
from rayloop.core.groups import Group, Member, Status, TrajectoryState, Unscored, UnscoredKind
from rayloop.grpo.alarms import reasons
from rayloop.grpo.filters import Filter
from rayloop.grpo.settings import FilteringSettings
from rayloop.grpo.staleness import began

CUT = Status(TrajectoryState.SURPLUS, "cut")


def apply_filters(group: Group, filters: Sequence[Filter]) -> Group:
    """Returns the group; every kept member that a filter refuses is ``filtered[reason]``.

    The reason is the first filter's. All filters see the members kept on entry. Raises ValueError
    for members without a reward or an advantage, FilterBroken.
    """
    refused: dict[int, str] = {}
    for member_filter in filters:
        # An earlier filter's reason stays.
        refused = {**member_filter.refused(group), **refused}
    members: dict[int, Member] = {}
    for i, reason in refused.items():
        status = Status(TrajectoryState.FILTERED, reason)
        members[i] = replace(group.members[i], status=status)
    return group.map(members)


@dataclass(frozen=True)
class Selection:
    """The groups of a step, and those for which it has no room; both in request order."""

    train: tuple[Group, ...]
    left_over: tuple[Group, ...]
    """Whole groups that did not fit."""


def select(
    ready: Sequence[Group], target: int, settings: FilteringSettings, *, oldest_first: bool = False
) -> Selection:
    """Keeps the first ``target`` trajectories in rank order, whatever the order of ``ready``.

    The rank is by std, descending, ties in request order; or by request order alone. With
    ``oldest_first`` the version that began a group counts before the rank, so that no skipped group
    grows stale. Members beyond the target become ``surplus[cut]``. Groups without kept members are
    left out. Raises ValueError for a group without std.
    """

    def order(group: Group) -> tuple[float, float, int]:
        age = began(group) if oldest_first else 0.0
        return age, *_rank(group, settings)

    train: list[Group] = []
    left_over: list[Group] = []
    room = target
    for group in sorted((group for group in ready if group.kept), key=order):
        if room <= 0:
            left_over.append(group)
            continue
        positions = [i for i, member in enumerate(group.members) if member.kept]
        # The last group is trained in part: its members keep the advantages of the whole group.
        surplus = {i: replace(group.members[i], status=CUT) for i in positions[room:]}
        train.append(group.map(surplus))
        room -= len(positions)
    return Selection(_in_request_order(train), _in_request_order(left_over))


def _in_request_order(groups: Iterable[Group]) -> tuple[Group, ...]:
    return tuple(sorted(groups, key=lambda group: group.number))


def _rank(group: Group, settings: FilteringSettings) -> tuple[float, int]:
    match settings.ranking:
        case "fifo":
            return 0.0, group.number
        case "std":
            if group.std is None:
                raise ValueError(f"group {group.number} has no std: advantages come before ranking")
            return -group.std, group.number
        case unknown:
            assert_never(unknown)


def enough(
    survivors: int,
    target: int,
    used: int,
    settings: FilteringSettings,
    counts: Mapping[str, int],
    lost: Sequence[Unscored] = (),
    cut: int = 0,
) -> bool:
    """Whether a step trains on ``survivors`` trajectories after ``used`` generation batches.

    False: it starts another batch. A full target trains; else another batch follows while the
    budget lasts; else the smaller batch trains when at least ``min_fraction`` of the target
    survived. Raises GenerationBudgetSpent otherwise, with ``counts`` (the statuses of this step's
    trajectories) and the most frequent reasons of the ``lost`` ones, which have no reward. ``cut``:
    number of answers that ended at a limit of tokens.
    """
    if survivors >= target:
        return True
    if used < settings.max_generation_batches:
        return False
    if survivors > 0 and survivors >= settings.min_fraction * target:
        return True
    statuses = ", ".join(f"{status} {n}" for status, n in sorted(counts.items()))
    causes = f". Why {len(lost)} have no reward: {'; '.join(reasons(lost))}" if lost else ""
    raise GenerationBudgetSpent(
        f"{survivors} of {target} trajectories survived {used} generation batches, fewer than"
        f" min_fraction {settings.min_fraction} asks for. Where they went:"
        f" {statuses or 'none counted'}{causes}. {_advice(counts, len(lost), cut)}."
    )


def _advice(counts: Mapping[str, int], unscored: int, cut: int) -> str:
    """A sentence on the reason that more than half of a step's trajectories share."""
    played = sum(counts.values())
    payloads_lost = counts.get(f"{TrajectoryState.EXCLUDED}[{UnscoredKind.PAYLOAD_LOST}]", 0)
    if 2 * payloads_lost > played:
        return (
            f"{payloads_lost} were lost with the nodes that held them, not removed by a filter:"
            " see payload_lost in events.jsonl"
        )
    if 2 * unscored > played:
        return "Most have no reward, which is not the policy's doing: repair that first"
    if 2 * cut > played > 0:
        return (
            f"{'All' if cut == played else cut} of these {played} answers were cut at a limit of"
            " tokens, so that few can be right: raise rollout.sampling.max_tokens (of a turn) or"
            " environment.episode.max_tokens; `try` shows where answers are cut"
        )
    return (
        "Raise max_generation_batches, loosen filters, or choose tasks that the policy sometimes"
        " solves"
    )
