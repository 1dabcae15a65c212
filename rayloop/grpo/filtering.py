"""Partial dynamic filtering (docs/algorithm.md, section 4): oversample, filter, rank, and when to stop refilling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from rayloop.core.failures import GenerationBudgetSpent
from rayloop.core.groups import Fate, Group, Member, TrajectoryState, Unscored, UnscoredKind
from rayloop.grpo.alarms import reasons
from rayloop.grpo.settings import (
    EqualRewards,
    Filter,
    FilteringSettings,
    ImagesConsistent,
    KeepEndReasons,
    MaxLength,
    PositiveNegativeAdvantage,
    ToolImage,
)
from rayloop.grpo.staleness import began

CUT = Fate(TrajectoryState.SURPLUS, "cut")


def apply_filters(group: Group, filters: Sequence[Filter]) -> Group:
    """Give every kept member that a filter refuses a ``filtered[reason]`` fate; the first filter in order counts.

    Group filters look at the members kept on entry, wherever they stand in the list. Nothing is ever taken back, and
    advantages stay as they are. Raises ValueError when members were not scored or have no advantage yet.
    """
    rewards = [member.reward for member in group.kept]
    for rule in filters:
        kept = {i: member for i, member in enumerate(group.members) if member.kept}
        if isinstance(rule, EqualRewards):
            reason = _equal(rewards, rule)
            refused = kept if reason else {}
        else:
            reason = rule.kind
            refused = {i: member for i, member in kept.items() if not _keeps(rule, member)}
        group = group.map({i: replace(m, fate=Fate(TrajectoryState.FILTERED, reason)) for i, m in refused.items()})
    return group


def _equal(rewards: Sequence[float], rule: EqualRewards) -> str:
    """Why rewards that are all equal are refused, or "". A lone sample has nothing to be equal to, and stays."""
    if len(rewards) < 2 or max(rewards) - min(rewards) > rule.tolerance:
        return ""
    if min(rewards) >= rule.right:
        return "all_right"
    return "all_wrong" if max(rewards) <= rule.wrong else "all_equal"


def _keeps(
    rule: ToolImage | ImagesConsistent | MaxLength | KeepEndReasons | PositiveNegativeAdvantage, member: Member
) -> bool:
    match rule:
        case ToolImage():
            return member.summary.observation_images > 0
        case ImagesConsistent():
            return member.summary.images_consistent
        case MaxLength():
            return member.summary.length <= rule.tokens
        case KeepEndReasons():
            return member.summary.end_reason in rule.keep
        case PositiveNegativeAdvantage():
            if member.advantage is None:
                raise ValueError(f"trajectory {member.summary.id} has no advantage yet: filters come after advantages")
            return not (member.reward > rule.right_above and member.advantage < 0)


@dataclass(frozen=True, slots=True)
class Selection:
    """``train`` (issue order): the groups of this step. ``left_over`` (issue order): whole groups that did not fit."""

    train: tuple[Group, ...]
    left_over: tuple[Group, ...]


def select(
    ready: Sequence[Group], target: int, settings: FilteringSettings, *, oldest_first: bool = False
) -> Selection:
    """Keep the first ``target`` trajectories in rank order, whatever the order of ``ready``.

    Ranking decides who gets in: by group std, descending, ties in issue order; or by issue order alone. With
    ``oldest_first`` (what is left over is carried over) the version that began a group comes before its rank: of a supply
    that is bounded by the staleness, none then grows stale by being passed over. What the cut takes off a group of
    ``train`` becomes ``surplus[cut]``. Groups with nothing kept appear in neither part. Raises ValueError when a group to
    be ranked has no std.
    """
    train: list[Group] = []
    left_over: list[Group] = []
    room = target
    age = began if oldest_first else lambda group: 0.0
    for group in sorted((g for g in ready if g.kept), key=lambda g: (age(g), *_rank(g, settings))):
        if room <= 0:
            left_over.append(group)
            continue
        kept = [i for i, member in enumerate(group.members) if member.kept]
        train.append(group.map({i: replace(group.members[i], fate=CUT) for i in kept[room:]}))
        room -= len(kept)
    return Selection(_in_issue_order(train), _in_issue_order(left_over))


def _rank(group: Group, settings: FilteringSettings) -> tuple[float, int]:
    if settings.ranking == "issue":
        return 0.0, group.issue
    if group.std is None:
        raise ValueError(f"group {group.issue} has no std: advantages come before ranking")
    return -group.std, group.issue


def _in_issue_order(groups: Sequence[Group]) -> tuple[Group, ...]:
    return tuple(sorted(groups, key=lambda group: group.issue))


class Enough(StrEnum):
    """What a step does next: start another generation batch, or train what survived."""

    MORE = "more"
    TRAIN = "train"


def generation_verdict(
    survivors: int, target: int, batches_used: int, settings: FilteringSettings, counts: Mapping[str, int],
    unscored: Sequence[Unscored] = (),
) -> Enough:  # fmt: skip
    """Decide once ``batches_used`` generation batches have ended with ``survivors`` trajectories to train.

    A full target trains; else another batch follows while the budget lasts; else the smaller batch trains when at
    least ``min_fraction`` of the target survived. Raises GenerationBudgetSpent otherwise, with ``counts`` (the fates of
    this step's trajectories) and the most frequent reasons of those that are ``unscored``.
    """
    if survivors >= target:
        return Enough.TRAIN
    if batches_used < settings.max_generation_batches:
        return Enough.MORE
    if survivors > 0 and survivors >= settings.min_fraction * target:
        return Enough.TRAIN
    where = ", ".join(f"{reason} {n}" for reason, n in sorted(counts.items())) or "none counted"
    advice = "Raise max_generation_batches, loosen filters, or choose tasks that the policy sometimes solves"
    if 2 * len(unscored) > sum(counts.values()):
        advice = "Most have no reward, which is not the policy's doing: repair that first"
    if 2 * (lost := counts.get(f"{TrajectoryState.EXCLUDED}[{UnscoredKind.PAYLOAD_LOST}]", 0)) > sum(counts.values()):
        advice = f"{lost} were lost with the nodes that held them, which is no filter's doing: see payload_lost in events.jsonl"
    why = f". Why {len(unscored)} have no reward: {'; '.join(reasons(unscored))}" if unscored else ""
    raise GenerationBudgetSpent(
        f"{survivors} of {target} trajectories survived {batches_used} generation batches, fewer than min_fraction "
        f"{settings.min_fraction} asks for. Where they went: {where}{why}. {advice}."
    )
