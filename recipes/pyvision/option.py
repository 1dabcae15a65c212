"""The measure of questions with options (V*, HR-Bench): is the option that the answer names the right one?"""

from __future__ import annotations

from rayloop.core.groups import Outcome, Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import Task, Trajectory
from rayloop.judge.answers import extract
from rayloop.recipes.pyvision.verifiers import decided


class OptionReward:
    """1 for the right option, 0 for another, by the judge's rules without a model: a letter, or the option's words in the question.

    The answer stands in the last ``<answer>`` block, in a box in it or not, else in the last line. Components: ``accuracy``, and
    ``format`` (1 with such a block). An answer in which the rules find no option counts as wrong, with the flag ``undecided``.
    """

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        said = context.texts[-1] if context.texts else ""
        tagged = extract(said, "tagged_box")
        answer = tagged or extract(said, "last_line") or ""
        found = decided(str(task.ground_truth), answer, str(task.extra.get("question", "")))
        components = {"accuracy": found.value, "format": float(tagged is not None)}
        return Scored(found.value, components, found.flags)
