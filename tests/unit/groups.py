"""Groups for tests: members from rewards, with summaries that every filter keeps unless a test says
otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rayloop.core.groups import Group, Member, Outcome, Scored, Unscored, UnscoredKind
from rayloop.core.types import EndReason, Summary, Task, TrajectoryId, Version

LOST = Unscored(UnscoredKind.REWARD_UNAVAILABLE)


def make_member(
    id: TrajectoryId, outcome: Outcome, task_id: str = "task", **changes: Any
) -> Member:
    """A member whose summary has the given fields changed."""
    summary = Summary(
        id=id,
        attempt=0,
        task_id=task_id,
        source="test",
        end_reason=EndReason.DONE,
        length=10,
        sampled_tokens=4,
        turns=1,
        images=1,
        observation_images=1,
        images_consistent=True,
        first_version=Version(0, 0),
        last_version=Version(0, 0),
    )
    return Member(summary=replace(summary, **changes), outcome=outcome)


def make_group(
    number: int, rewards: Sequence[float | None], task_id: str = "task", **changes: Any
) -> Group:
    """One member per reward; None stands for an unscored member.

    ``changes`` apply to every summary.
    """
    outcomes: list[Outcome] = [LOST if reward is None else Scored(reward) for reward in rewards]
    members = tuple(
        make_member(TrajectoryId(number, i), outcome, task_id, **changes)
        for i, outcome in enumerate(outcomes)
    )
    return Group(number=number, task=Task(task_id, ()), members=members)
