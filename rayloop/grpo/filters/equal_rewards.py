"""The group filter: groups that teach nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from rayloop.config.settings import SettingsModel
from rayloop.core.groups import Group


class EqualRewards(SettingsModel):
    """Group filter: rewards that are all equal teach nothing. Counted as all_right, all_wrong or all_equal."""

    kind: Literal["equal_rewards"] = "equal_rewards"
    tolerance: float = Field(0.0, ge=0)
    """Rewards count as equal when they differ by no more than this: above 0 for noisy graders."""
    right: float = 1.0
    """An equal group at or above this value counts as all_right."""
    wrong: float = 0.0
    """An equal group at or below this value counts as all_wrong."""

    def refused(self, group: Group) -> Mapping[int, str]:
        """All kept members, or none. A lone sample has nothing to be equal to, and stays."""
        rewards = [member.reward for member in group.kept]
        if len(rewards) < 2 or max(rewards) - min(rewards) > self.tolerance:
            return {}
        reason = "all_wrong" if max(rewards) <= self.wrong else "all_equal"
        if min(rewards) >= self.right:
            reason = "all_right"
        return {i: reason for i, member in enumerate(group.members) if member.kept}
