"""ARPO's reward: the environment's result, and half a point less when the last turn was no action."""

from typing import Literal

from rayloop.config.settings import SettingsModel
from rayloop.core.groups import Outcome, Scored, Unscored, UnscoredKind
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import Task, Trajectory
from rayloop.envs.grammar.actions import Mistake
from rayloop.envs.grammar.arpo import Broken, parsed
from rayloop.envs.grammar.scanner import read


class ArpoReward:
    """``result + format_weight * format`` (dvlab-research/ARPO at 7489ae3): the result of
    ``evaluate``, 0 to 1, and -1 when the last turn cannot be read in the action grammar, else 0.
    Components: ``success`` and ``format``; flag ``unparsable``, in the original with the name of
    its error. An episode without a result has no reward; in the original 0, flag ``no_result``.
    """

    compares = False

    class Settings(SettingsModel):
        variant: Literal["corrected", "original"] = "corrected"
        """corrected: turns are read by the grammar that acts, and only a result is a reward.
        original: by ARPO's own parser with its mistakes (README.md), and no result is 0, to repeat
        a published run.
        """
        format_weight: float = 0.5
        """How much a last turn that is no action costs.

        Raise it while the policy still writes such turns.
        """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        """Unscored without a result of the environment."""
        original, result = self._settings.variant == "original", trajectory.env_result
        if result is None and not original:
            return Unscored(
                UnscoredKind.INVALID_REWARD,
                "the environment's evaluate returned None: there is no result",
            )
        turn = context.texts[-1]
        wrong = (
            _original_flags(turn) if original else ("unparsable",) * isinstance(read(turn), Mistake)
        )
        components = {"success": result or 0.0, "format": -1.0 if wrong else 0.0}
        value = components["success"] + self._settings.format_weight * components["format"]
        return Scored(value, components, wrong if result is not None else (*wrong, "no_result"))


def _original_flags(turn: str) -> tuple[str, ...]:
    try:
        parsed(turn)
    except Broken as error:
        return "unparsable", str(error)
    return ()
