"""Settings of the actors that own some. Light: no torch, no ray."""

from __future__ import annotations

from pydantic import Field

from rayloop.core.config import Component, Settings
from rayloop.grpo.unscored import UnscoredAlarm


class RewardSettings(Settings):
    """Which reward source scores episodes, and what happens when it misbehaves."""

    source: Component
    """``{use: module:Class, with: {...}}``: the reward. One instance serves all scoring threads of a reward actor."""
    timeout: float = Field(600.0, gt=0)
    """Seconds for scoring one trajectory; beyond it the trajectory is unscored. A judge that is down is waited for within them:
    raise it when a judge's replica takes longer to come back, lower it for a grader of your own that may hang."""
    failing_value: float = Field(0.0, allow_inf_nan=False)
    """The reward of a trajectory on which the grader crashes reproducibly (flagged ``grader_error``)."""
    alarm: UnscoredAlarm = UnscoredAlarm()
