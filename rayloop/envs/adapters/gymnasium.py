"""Environments of gymnasium: screens as images, the policy's text as an action.

The package is the extra ``gymnasium``.
"""

import importlib
import re
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import model_validator

from rayloop.config.settings import SettingsModel
from rayloop.core.failures import DataFailure, carrying_out
from rayloop.core.protocols import Observation, StepResult
from rayloop.core.types import ImageSource, Message, Task
from rayloop.envs.adapters.packages import RewardedSteps, function, needs, picture, read_by


class GymSettings(SettingsModel):
    """Which environment, and how it is seen and acted in."""

    id: str
    """Its name for ``gymnasium.make``, such as CartPole-v1."""
    imports: tuple[str, ...] = ()
    """Modules that register it when they are imported, such as ale_py or miniwob."""
    options: dict[str, Any] = {}
    """Further arguments of ``gymnasium.make``."""
    image: Literal["observation", "render", "none"] = "observation"
    """What is shown: the observation, when it is a picture [H, W, 3]; what ``render`` draws; or
    nothing, for ``describe``.
    """
    image_key: str = ""
    """Where the picture is, when observations are dictionaries."""
    describe: str = ""
    """``module:function`` from an observation and its ``info`` to a text that is shown with it.

    Empty: no text.
    """
    act: str = "rayloop.envs.adapters.gymnasium:number"
    """``module:function`` from the policy's text and the action space to an action; a ValueError is
    shown to the policy.
    """
    result: Literal["sum", "last"] = "sum"
    """What ``evaluate`` returns: the sum of the rewards, or the last one where that says whether
    the goal was reached.
    """

    @model_validator(mode="after")
    def _there(self) -> Self:
        needs("gymnasium", "gymnasium")
        for module in self.imports:
            needs(module.partition(".")[0])
        if vector := self.options.keys() & {"num_envs", "vectorization_mode"}:
            how = (
                "an episode has one environment: leave it out, algorithm.group_size and"
                " groups_per_step say how many play at once"
            )
            raise ValueError(f"options.{min(vector)} is of vector environments, and {how}")
        for use in filter(None, (self.act, self.describe)):
            function(use)
        return self


class Gymnasium(RewardedSteps):
    """One episode of a gymnasium environment; the row's columns ``seed`` and ``options`` are given
    to ``reset``.

    ``terminated`` and ``truncated`` both end the episode; the step's ``info`` says which.
    """

    Settings = GymSettings

    def __init__(self, settings: GymSettings) -> None:
        import gymnasium

        super().__init__(settings.result)
        self._settings = settings
        self._act = function(settings.act)
        self._describe = function(settings.describe) if settings.describe else None
        for module in settings.imports:
            importlib.import_module(module)
        drawn = {"render_mode": "rgb_array"} if settings.image == "render" else {}
        self._environment = gymnasium.make(settings.id, **{**drawn, **settings.options})
        if self._act is number and not hasattr(self._environment.action_space, "n"):
            raise TypeError(
                f"{self._environment.action_space} is not Discrete: name a function of your own"
                " under `act`"
            )

    def reset(self, task: Task) -> Observation:
        """Raises DataFailure for a seed or options that are none."""
        seed, options = task.extra.get("seed"), task.extra.get("options")
        if not (seed is None or isinstance(seed, int)) or not (
            options is None or isinstance(options, Mapping)
        ):
            raise DataFailure(
                task.id,
                f"seed {seed!r} and options {options!r}: a whole number and a mapping are expected",
            )
        observed, info = self._environment.reset(
            seed=seed, options=None if options is None else dict(options)
        )
        return Observation((*task.messages, self._seen(observed, info)))

    def step(self, text: str) -> StepResult:
        """Act as ``act`` reads the text; a text that is no action is an error that the policy sees.

        Raises PolicyFailure for an action that breaks the environment.
        """
        try:
            action = read_by(self._act, text, self._environment.action_space)
        except ValueError as error:
            return self._refused(str(error))
        with carrying_out(f"{self._settings.id}: the action"):
            observed, reward, terminated, truncated, info = self._environment.step(action)
            self._reward(reward)
            shown = self._seen(observed, info)
        seen, done = Observation((shown,)), bool(terminated or truncated)
        return StepResult(
            seen, done=done, info={"truncated": bool(truncated)}, reward=self._rewards[-1]
        )

    def close(self) -> None:
        """Close gymnasium's environment."""
        self._environment.close()

    def _seen(self, observed: Any, info: Mapping[str, Any]) -> Message:
        parts: list[str | ImageSource] = []
        if self._settings.image == "render":
            parts.append(picture(self._environment.render()))
        elif self._settings.image == "observation":
            parts.append(
                picture(
                    observed[self._settings.image_key] if self._settings.image_key else observed
                )
            )
        if self._describe is not None:
            parts.append(str(self._describe(observed, info)))
        return self._shown(*parts)


def number(text: str, space: Any) -> int:
    """The last whole number in the text, for a ``Discrete`` space.

    Raises ValueError for another number, or none.
    """
    found = re.findall(r"-?\d+", text)
    first = int(getattr(space, "start", 0))
    allowed = f"a whole number from {first} to {first + int(space.n) - 1}"
    # Before ``contains``: numpy raises for a number that 64 bits do not hold.
    if not found or len(found[-1]) > 18 or not space.contains(int(found[-1])):
        raise ValueError(f"the action is {allowed}")
    return int(found[-1])
