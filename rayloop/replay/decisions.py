"""What the algorithm decides of a recorded step: advantages, filters, and the groups it trains."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rayloop.core.groups import (
    Group,
    Member,
    Outcome,
    Scored,
    Status,
    TrajectoryState,
    UnscoredKind,
)
from rayloop.grpo.advantage import build_advantage, over_step, with_advantages
from rayloop.grpo.filters import build_filters
from rayloop.grpo.selection import CUT, apply_filters, select
from rayloop.grpo.settings import AlgorithmSettings
from rayloop.replay.rewards import Place
from rayloop.rollout.step_record import RecordedStep


@dataclass(frozen=True)
class Decisions:
    """All groups by number as the step leaves them, and those that it trains, in order."""

    groups: Mapping[int, Group]
    trained: tuple[Group, ...]


def recorded(step: RecordedStep) -> Decisions:
    """The decisions on record."""
    groups = {group.number: group for group in step.groups}
    return Decisions(groups, tuple(groups[number] for number in step.trained))


def decide(
    step: RecordedStep, algorithm: AlgorithmSettings, outcomes: Mapping[Place, Outcome]
) -> Decisions:
    """Decide again, by the functions that the driver uses.

    Where groups are carried over to later steps (``max_staleness`` > 0), those that were ready
    besides are not on record: the groups of the step stay the same ones.
    """
    advantage = build_advantage(algorithm.advantage)
    filters = build_filters(algorithm.filtering.filters)
    groups: dict[int, Group] = {}
    for on_record in step.groups:
        members = []
        for place, member in enumerate(on_record.members):
            outcome = outcomes[on_record.number, place]
            members.append(
                replace(member, outcome=outcome, credit=None, status=None, ref_logprobs=None)
            )
        group = replace(on_record, members=tuple(members), mean=None, std=None)
        group = with_advantages(group, advantage)
        group = apply_filters(group, filters)
        groups[on_record.number] = _with_facts(group, on_record, algorithm)

    if algorithm.synchronous:
        chosen = select(list(groups.values()), algorithm.target, algorithm.filtering).train
    else:
        chosen = tuple(groups[number] for number in step.trained if groups[number].kept)
    trained = over_step(chosen, advantage)
    return Decisions(groups | {group.number: group for group in trained}, trained)


def _with_facts(group: Group, on_record: Group, algorithm: AlgorithmSettings) -> Group:
    """The group with the ends on record that the functions above do not decide.

    A payload was lost, a trajectory grew stale, or a step that carries groups over cut it.
    """
    changes: dict[int, Member] = {}
    for place, (member, then) in enumerate(zip(group.members, on_record.members, strict=True)):
        status = then.status
        if status is None or not member.kept:
            continue
        is_cut = status == CUT and not algorithm.synchronous
        if _is_lost(then) or status.state is TrajectoryState.STALE or is_cut:
            changes[place] = replace(member, status=status)
    return group.map(changes)


def _is_lost(member: Member) -> bool:
    """Whether a scored member was lost before it could be trained."""
    lost = Status(TrajectoryState.EXCLUDED, str(UnscoredKind.PAYLOAD_LOST))
    return member.status == lost and isinstance(member.outcome, Scored)
