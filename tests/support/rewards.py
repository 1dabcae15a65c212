"""A reward for tests: any tokens earn something, and faults, delays and marks fire for the tasks
named in the settings.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rayloop.config.settings import SettingsModel
from rayloop.core.groups import Outcome, Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import Task, Trajectory

Fault = Literal["nan", "inf", "none", "string", "half", "raise"]
VALUES: dict[str, Any] = {
    "nan": float("nan"),
    "inf": float("inf"),
    "none": None,
    "string": "0.7",
    "half": 0.5,
}


class TokenReward:
    """The share of even token ids among the sampled ones: a random policy's groups have a spread,
    whatever it says.
    """

    class Settings(SettingsModel):
        faults: dict[str, Fault] = {}
        """Task id (or ``*`` for every task) -> what is returned instead."""
        fade: int | None = None
        """From this step on everything earns 0: groups fail throughout."""
        seconds: float = 0.0
        """How long scoring takes."""
        marks: str | None = None
        """A folder in which each call leaves a file as it begins."""

    def __init__(self, settings: TokenReward.Settings) -> None:
        self._settings = settings

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Any:
        if self._settings.marks is not None:
            (Path(self._settings.marks) / f"score-{time.time_ns()}").touch()
        time.sleep(self._settings.seconds)
        fault = self._settings.faults.get(task.id, self._settings.faults.get("*"))
        if fault == "raise":
            raise KeyError(f"no column for {task.id}")
        if fault is not None:
            return VALUES[fault]
        if self._settings.fade is not None and context.step >= self._settings.fade:
            return 0.0
        sampled = [token for turn in trajectory.sampled_turns for token in turn.token_ids]
        return sum(token % 2 == 0 for token in sampled) / len(sampled)


class TokenRanking(TokenReward):
    """Ranks the answers of a group by that share: 0 for the least, 1 for the best; each call leaves
    a mark with their number.

    An answer that is alone is scored by itself.
    """

    def score_group(
        self, trajectories: Sequence[Trajectory], task: Task, contexts: Sequence[ScoreContext]
    ) -> list[Outcome]:
        if self._settings.marks is not None:
            (Path(self._settings.marks) / f"group-{time.time_ns()}-{len(trajectories)}").touch()
        shares = [
            self.score(*pair)
            for pair in zip(trajectories, [task] * len(contexts), contexts, strict=True)
        ]
        below = [sum(other < share for other in shares) for share in shares]
        return [
            Scored(rank / max(len(shares) - 1, 1), {"share": share})
            for rank, share in zip(below, shares, strict=True)
        ]


class Peak(TokenReward):
    """Held-out tasks (``eval-...``) earn 0.9 at step 1 and 0.1 at every other; tasks that are
    trained on earn their share.
    """

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Any:
        if task.id.startswith("eval-"):
            return 0.9 if context.step == 1 else 0.1
        return super().score(trajectory, task, context)
