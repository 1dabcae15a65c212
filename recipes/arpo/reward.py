"""ARPO's reward: the environment's result, less half a point for a last turn without an action."""

import math
from typing import Annotated, Literal

from rayloop.core.groups import Outcome, Scored, Unscored, UnscoredKind
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import Task, Trajectory
from rayloop.envs.grammar.actions import Mistake
from rayloop.envs.grammar.arpo import Broken, parsed
from rayloop.envs.grammar.choice import OriginalSpeaks
from rayloop.envs.grammar.family import ANY_MODEL, LANGUAGE, LanguageChoice
from rayloop.envs.grammar.language import spoken_format
from rayloop.envs.grammar.rules import Extent


class ArpoReward:
    """``result + format_weight * format`` (dvlab-research/ARPO at 7489ae3).

    ``result`` is that of ``evaluate``, 0 to 1; ``format`` is -1 when the last turn cannot be read
    in the action grammar, else 0. Components: ``success`` and ``format``; flag ``unparsable``, in
    the original with the name of its error. An episode without a result has no reward; in the
    original it is 0, with the flag ``no_result``.
    """

    compares = False

    class Settings(OriginalSpeaks):
        variant: Literal["corrected", "original"] = "corrected"
        """corrected: turns are read by the grammar that acts, and only a result is a reward.

        original: turns are read by ARPO's parser with its mistakes (README.md), and no result is 0,
        to repeat a published run.
        """
        language: Annotated[LanguageChoice, LANGUAGE] = ANY_MODEL
        """How the policy writes its actions. A run sets it to ``environment.language``."""
        format_weight: float = 0.5
        """The cost of a last turn that is not an action.

        Raise it while the policy still writes such turns.
        """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._format = spoken_format(settings.language)

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        """Unscored without a result of the environment."""
        original = self._settings.variant == "original"
        result = trajectory.env_result
        if result is None and not original:
            return Unscored(
                UnscoredKind.INVALID_REWARD,
                "the environment's evaluate returned None: there is no result",
            )
        turn = context.texts[-1]
        flags = _original_flags(turn) if original else self._flags(turn)
        components = {"success": result or 0.0, "format": -1.0 if flags else 0.0}
        value = components["success"] + self._settings.format_weight * components["format"]
        if result is None:
            flags = (*flags, "no_result")
        return Scored(value, components, flags)

    def _flags(self, turn: str) -> tuple[str, ...]:
        """The flag of a turn that the action grammar cannot read."""
        # The screen's size is not known here: a click outside of it is an action.
        found = self._format.read(turn, Extent(math.inf, math.inf))
        return ("unparsable",) if isinstance(found, Mistake) else ()


def _original_flags(turn: str) -> tuple[str, ...]:
    """The flags of a turn that ARPO's parser cannot read."""
    try:
        parsed(turn)
    except Broken as error:
        return "unparsable", str(error)
    return ()
