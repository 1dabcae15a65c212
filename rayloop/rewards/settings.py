"""Settings of the reward: its source, the unit that it scores, and its failures.

Imports neither torch nor ray.
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator

from rayloop.config.settings import Component, Role, SettingsModel
from rayloop.core.failures import ConfigError
from rayloop.rewards.functions import METHODS, Per, as_source, infrastructure_errors


@dataclass(frozen=True)
class RewardRole(Role):
    """The role of a reward, whose method depends on whether it scores one trajectory or a group."""

    per: Per = "trajectory"

    def of(self, settings: BaseModel) -> Role:
        """The role of the source in these settings."""
        return ROLES[settings.per] if isinstance(settings, RewardSettings) else self

    def check(self, component: Component) -> None:
        """Check a reward's class.

        Raises ConfigError for a class without the method, or with an unusable ``infrastructure``.
        """
        source = component.resolve()
        expected_method = self.methods[0]
        if isinstance(source, type) and not hasattr(source, expected_method):
            for per, method in METHODS.items():
                if hasattr(source, method):
                    raise ConfigError(
                        f"use: {component.use!r} has {method} and no {expected_method}: set"
                        f" reward.per: {per}"
                    )
        infrastructure_errors(source)
        super().check(component)


ROLES: dict[Per, RewardRole] = {
    per: RewardRole("reward", (method,), partial(as_source, per=per), per)
    for per, method in METHODS.items()
}
REWARD = ROLES["trajectory"]


class RewardSettings(SettingsModel):
    """The reward source, and the treatment of its failures."""

    source: Annotated[Component, REWARD]
    """``{use: module:Class, with: {...}}`` or ``{use: module:function}`` (docs/rewards.md).

    One instance serves all threads.
    """

    @field_validator("source", mode="before")
    @classmethod
    def _one(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            raise ValueError(
                "one reward, not a list, is expected: {use: module:name}. Several functions and"
                " their weights are combined in one function of a few lines: docs/rewards.md,"
                ' "Several rewards in one"'
            )
        return value

    @property
    def compares(self) -> bool:
        """Whether the source reads answers of rows: its attribute ``compares``, by default True."""
        return bool(getattr(self.source.resolve(), "compares", True))

    per: Per = "trajectory"
    """The unit that one call of the source scores: a trajectory or a group.

    A trajectory is scored when the call that played it has ended, the played trajectories of a
    group when the last has ended (``score_group``; TRL's functions then get lists of them). Set
    ``group`` for rewards that compare answers: rankings, pairwise judges, diversity.
    """
    timeout: float = Field(600.0, gt=0)
    """Seconds for scoring one trajectory (or one group), which is unscored after that.

    A run waits that long for a judge that is down: raise it when a judge's replica takes longer to
    come back, lower it for a custom grader that may hang.
    """
    on_error: Literal["exclude"] | Annotated[float, Field(allow_inf_nan=False)] = "exclude"
    """The outcome when a grader raises, or hangs, twice on the same trajectory.

    exclude: leave it out as ``grader_error`` or ``timeout``; a number: that reward, flagged
    ``grader_error`` or ``grader_timeout``: a mistake in the grader is then trained as the policy's.
    Episodes that end with ``tool_deadline`` or ``policy_failure`` get that number too, or 0. Why a
    key: a grader that runs the policy's code must not spare code that hangs it.
    """

    @property
    def scores_failures(self) -> bool:
        """Whether a trajectory that the grader failed on gets ``failing_value``."""
        return self.on_error != "exclude"

    @property
    def failing_value(self) -> float:
        """The reward of what the policy broke, and of grader failures if ``scores_failures``."""
        return 0.0 if self.on_error == "exclude" else self.on_error
