"""The reward of sorting digits: the share of positions that are right."""

from __future__ import annotations

import re

from rayloop.core.groups import Outcome, Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import Task, Trajectory

_ANSWER = re.compile(r"[0-9\s,]*[0-9][0-9\s,]*")


class SortReward:
    """Right positions / max(length of the answer, length of the truth), so that longer answers gain nothing.

    Components: ``exact`` (1 when all is right) and ``format``. An answer that is not just digits, blanks and commas
    scores 0 with the flag ``unparsable``.
    """

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        """The share of right positions, 0..1."""
        text = context.texts[-1].strip()
        if _ANSWER.fullmatch(text) is None:
            return Scored(0.0, {"exact": 0.0, "format": 0.0}, ("unparsable",))
        answer = [int(digit) for digit in re.findall("[0-9]", text)]
        truth: list[int] = task.ground_truth
        right = sum(a == b for a, b in zip(answer, truth, strict=False)) / max(len(answer), len(truth))
        return Scored(right, {"exact": float(answer == truth), "format": 1.0})
