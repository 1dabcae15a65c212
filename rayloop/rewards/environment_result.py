"""The reward of environments that score their episodes themselves."""

from rayloop.core.groups import Outcome, Scored, Unscored, UnscoredKind
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import EndReason, Task, Trajectory

CUT = (EndReason.MAX_TURNS, EndReason.OVER_LENGTH, EndReason.MAX_IMAGES, EndReason.ACTION_ERROR)
"""Ends that come before an agent has a result."""


class EnvironmentResult:
    """The result of the environment's ``evaluate``.

    An episode that came to its end without such a result has no reward. An episode that ended
    early, since the policy broke it or used up a limit, gets 0.
    """

    compares = False

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        """The result as a reward."""
        if trajectory.env_result is None and trajectory.end_reason in CUT:
            return Scored(0.0, flags=("no_result",))
        if trajectory.env_result is None:
            return Unscored(
                UnscoredKind.INVALID_REWARD,
                "the environment's evaluate returned None, so there is no result to take",
            )
        return Scored(trajectory.env_result)
