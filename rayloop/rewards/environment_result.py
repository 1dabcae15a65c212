"""The reward of environments that score their episodes themselves."""

from rayloop.core.groups import Outcome, Scored, Unscored, UnscoredKind
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import Task, Trajectory


class EnvironmentResult:
    """The result of the environment's ``evaluate``. An episode without such a result has no reward."""

    compares = False

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        """The result as a reward."""
        if trajectory.env_result is None:
            return Unscored(UnscoredKind.INVALID_REWARD, "the environment's evaluate returned None, so there is no result to take")
        return Scored(trajectory.env_result)
