"""The group filter: groups that teach nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from rayloop.config.settings import SettingsModel
from rayloop.core.groups import Group

RIGHT, WRONG = 1.0, 0.0
"""Rewards from which an equal group is counted as all right, and down to which as all wrong. Only the counts differ."""


class EqualRewards(SettingsModel):
    """Group filter: rewards that are all equal teach nothing. Counted as all_right, all_wrong or all_equal."""

    kind: Literal["equal_rewards"] = "equal_rewards"
    tolerance: float = Field(0.0, ge=0)
    """Rewards count as equal when they differ by no more than this: above 0 for noisy graders."""

    def refused(self, group: Group) -> Mapping[int, str]:
        """All kept members, or none. A lone sample has nothing to be equal to, and stays."""
        rewards = [member.reward for member in group.kept]
        reason = equality(rewards, self.tolerance)
        return {i: reason for i, member in enumerate(group.members) if member.kept} if reason else {}


def equality(rewards: Sequence[float], tolerance: float = 0.0) -> str:
    """all_right, all_wrong or all_equal when no two rewards differ by more than ``tolerance``; "" when some do."""
    if len(rewards) < 2 or max(rewards) - min(rewards) > tolerance:
        return ""
    if min(rewards) >= RIGHT:
        return "all_right"
    return "all_wrong" if max(rewards) <= WRONG else "all_equal"
