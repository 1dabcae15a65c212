"""The reward of environments that judge by themselves."""

from __future__ import annotations

from rayloop.core.groups import Outcome, Scored, Unscored, UnscoredKind
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import Task, Trajectory


class EnvironmentResult:
    """What the environment's ``evaluate`` returned. An episode without such a result has no reward."""

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        if trajectory.env_result is None:
            return Unscored(UnscoredKind.INVALID_REWARD, "the environment's evaluate returned None, so there is no result to take")
        return Scored(trajectory.env_result)
