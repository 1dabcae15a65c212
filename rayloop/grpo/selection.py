"""Dynamic sampling with partial groups (DAPO, arXiv:2503.14476; docs/algorithm.md, section 4):
filter, rank, refill.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from rayloop.core.failures import GenerationBudgetSpent
from rayloop.core.groups import Group, Status, TrajectoryState, Unscored, UnscoredKind
from rayloop.grpo.alarms import reasons
from rayloop.grpo.filters import Filter
from rayloop.grpo.settings import FilteringSettings
from rayloop.grpo.staleness import began

CUT = Status(TrajectoryState.SURPLUS, "cut")


def apply_filters(group: Group, filters: Sequence[Filter]) -> Group:
    """Returns the group; every kept member that a filter refuses is ``filtered[reason]``, with the
    first filter's reason. All filters see the members kept on entry. Raises ValueError for members
    without a reward or an advantage, FilterBroken.
    """
    reasons: dict[int, str] = {}
    for one in filters:
        reasons = {**one.refused(group), **reasons}
    filtered = {i: Status(TrajectoryState.FILTERED, reason) for i, reason in reasons.items()}
    return group.map(
        {i: replace(group.members[i], status=status) for i, status in filtered.items()}
    )


@dataclass(frozen=True, slots=True)
class Selection:
    """``train`` (request order): the groups of this step.

    ``left_over`` (request order): whole groups that did not fit.
    """

    train: tuple[Group, ...]
    left_over: tuple[Group, ...]


def select(
    ready: Sequence[Group], target: int, settings: FilteringSettings, *, oldest_first: bool = False
) -> Selection:
    """Keeps the first ``target`` trajectories in rank order, whatever the order of ``ready``: by
    std, descending, ties in request order; or by request order alone. With ``oldest_first`` the
    version that began a group counts before the rank, so that no skipped group grows stale. Members
    beyond the target become ``surplus[cut]``. Groups without kept members are left out. Raises
    ValueError for a group without std.
    """
    train, left_over, room = list[Group](), list[Group](), target
    age = began if oldest_first else lambda group: 0.0
    for group in sorted((g for g in ready if g.kept), key=lambda g: (age(g), *_rank(g, settings))):
        if room <= 0:
            left_over.append(group)
            continue
        kept = [i for i, member in enumerate(group.members) if member.kept]
        # The last group is trained in part: its members keep the advantages of the whole group.
        train.append(group.map({i: replace(group.members[i], status=CUT) for i in kept[room:]}))
        room -= len(kept)
    return Selection(
        *(tuple(sorted(groups, key=lambda group: group.number)) for groups in (train, left_over))
    )


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
    """Whether a step trains on ``survivors`` trajectories after ``used`` generation batches, or
    starts another batch. A full target trains; else another batch follows while the budget lasts;
    else the smaller batch trains when at least ``min_fraction`` of the target survived. Raises
    GenerationBudgetSpent otherwise, with ``counts`` (the statuses of this step's trajectories) and
    the most frequent reasons of those that are ``lost``, without a reward. ``cut``: how many
    answers ended at a limit of tokens.
    """
    if survivors >= target:
        return True
    if used < settings.max_generation_batches:
        return False
    if survivors > 0 and survivors >= settings.min_fraction * target:
        return True
    where = ", ".join(f"{reason} {n}" for reason, n in sorted(counts.items())) or "none counted"
    advice = (
        "Raise max_generation_batches, loosen filters, or choose tasks that the policy sometimes"
        " solves"
    )
    if 2 * cut > (played := sum(counts.values())) > 0:
        advice = (
            f"{'All' if cut == played else cut} of these {played} answers were cut at a limit of"
            " tokens, so that few can be right: raise rollout.sampling.max_tokens (of a turn) or"
            " environment.episode.max_tokens; `try` shows where answers are cut"
        )
    if 2 * len(lost) > played:
        advice = "Most have no reward, which is not the policy's doing: repair that first"
    if (
        2 * (gone := counts.get(f"{TrajectoryState.EXCLUDED}[{UnscoredKind.PAYLOAD_LOST}]", 0))
        > played
    ):
        advice = (
            f"{gone} were lost with the nodes that held them, which is no filter's doing: see"
            " payload_lost in events.jsonl"
        )
    why = f". Why {len(lost)} have no reward: {'; '.join(reasons(lost))}" if lost else ""
    raise GenerationBudgetSpent(
        f"{survivors} of {target} trajectories survived {used} generation batches, fewer than"
        f" min_fraction {settings.min_fraction} asks for. Where they went: {where}{why}. {advice}."
    )
