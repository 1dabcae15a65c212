"""PyVision's reward: a right answer earns 1, and 0.1 more for each turn whose code was executed. A wrong one earns nothing.

The bonus is what keeps a policy from giving up its tool ("interaction collapse"); it is paid for right answers only.
"""

from __future__ import annotations

import inspect
import re
from typing import Annotated

from pydantic import Field

from rayloop.config.settings import Component, Role, SettingsModel
from rayloop.core.groups import Outcome, Scored
from rayloop.core.protocols import RewardSource, ScoreContext
from rayloop.core.types import Task, Trajectory

_ANSWER = re.compile(r"<answer>\s*\\boxed\{(.*)\}\s*</answer>", re.DOTALL)
LONGEST = 1000
"""Characters of an answer; a longer one is wrong, and earns no bonus either."""


def boxed(text: str) -> str | None:
    """What stands in the box of the last turn's answer; None without one, or when an answer or a box is nested in it."""
    found = _ANSWER.findall(text)
    if len(found) != 1 or not 0 < len(found[0].strip()) < LONGEST or "<answer>" in found[0] or "\\boxed" in found[0]:
        return None
    return str(found[0]).strip()


class PyVisionReward:
    """``accuracy + 1[right] * per_call * calls`` of the original. Only the last turn is read, never what code printed.

    ``calls``: turns whose code ran without an error, as the environment counted them (``env_result``). Components: ``accuracy``,
    ``calls``, ``format`` (1 when the answer is in its box).
    """

    class Settings(SettingsModel):
        per_call: float = Field(0.1, ge=0)
        """Paid for each executed turn of a right answer. The original's 0.1; 0 pays for answers alone."""
        right_from: float = Field(0.5, ge=0, le=1)
        """An accuracy from here on counts as right, where a judge gives shares."""
        accuracy: Annotated[Component, Role("reward source", ("score",))] | None = None
        """The reward source that judges the answer, such as ``judge.reward:JudgeReward``. Without one the boxed text must equal the
        ground truth, but for case and blanks."""

    def __init__(self, settings: PyVisionReward.Settings) -> None:
        self._settings = settings
        self._judge: RewardSource | None = settings.accuracy.build() if settings.accuracy else None
        self.infrastructure = getattr(self._judge, "infrastructure", ())

    async def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        answer = boxed(context.texts[-1])
        calls = int(trajectory.env_result or 0)
        components = {"accuracy": 0.0, "calls": float(calls), "format": float(answer is not None)}
        if answer is None:
            return Scored(0.0, components, ("unparsable",))
        if self._judge is None:
            accuracy = float(answer.lower() == str(task.ground_truth).strip().lower())
        else:
            judged = self._judge.score(trajectory, task, context)
            outcome = await judged if inspect.isawaitable(judged) else judged
            if not isinstance(outcome, Scored):
                return outcome
            accuracy = outcome.value
        components["accuracy"] = accuracy
        bonus = self._settings.per_call * calls if accuracy >= self._settings.right_from else 0.0
        return Scored(accuracy + bonus, components)
