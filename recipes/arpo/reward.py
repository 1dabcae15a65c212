"""ARPO's reward: what the environment found, and half a point less when the last turn was no action."""

from __future__ import annotations

from rayloop.config.settings import SettingsModel
from rayloop.core.groups import Outcome, Scored, Unscored, UnscoredKind
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import Task, Trajectory
from rayloop.envs.grammar.actions import Mistake
from rayloop.envs.grammar.scanner import read


class ArpoReward:
    """``result + format_weight * format`` (dvlab-research/ARPO at 7489ae3): ``result`` is what ``evaluate`` returned, from 0 to 1,
    and ``format`` -1 when the last turn cannot be read in the action grammar, else 0.

    Components: ``success`` (the result) and ``format``; flag ``unparsable``. An episode without a result has no reward: a desktop
    that could not be asked says nothing about the policy (the original counts 0).
    """

    class Settings(SettingsModel):
        format_weight: float = 0.5
        """How much a last turn that is no action costs. Raise it while the policy still writes such turns."""

    def __init__(self, settings: ArpoReward.Settings) -> None:
        self._settings = settings

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        if trajectory.env_result is None:
            return Unscored(UnscoredKind.INVALID_REWARD, "the environment's evaluate returned None: there is no result")
        wrong = isinstance(read(context.texts[-1]), Mistake)
        components = {"success": trajectory.env_result, "format": -1.0 if wrong else 0.0}
        value = trajectory.env_result + self._settings.format_weight * components["format"]
        return Scored(value, components, ("unparsable",) if wrong else ())
