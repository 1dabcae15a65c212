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
    """The image that is shown: observation, render or none.

    They are the observation, when it is a picture [H, W, 3], what ``render`` draws, and nothing,
    for ``describe``.
    """
    image_key: str = ""
    """The key of the picture, when observations are dictionaries."""
    describe: str = ""
    """``module:function`` from an observation and its ``info`` to a text that is shown with it.

    Empty: no text.
    """
    act: str = "rayloop.envs.adapters.gymnasium:number"
    """``module:function`` from the policy's text and the action space to an action.

    The policy sees its ValueError.
    """
    result: Literal["sum", "last"] = "sum"
    """What ``evaluate`` returns: the sum of the rewards, or the last one.

    Take the last one where it says whether the goal was reached.
    """

    @model_validator(mode="after")
    def _check_installed(self) -> Self:
        needs("gymnasium", "gymnasium")
        for module in self.imports:
            needs(module.partition(".")[0])
        vector_options = self.options.keys() & {"num_envs", "vectorization_mode"}
        if vector_options:
            raise ValueError(
                f"options.{min(vector_options)} is of vector environments, and an episode has one"
                " environment: leave it out, algorithm.group_size and groups_per_step say how many"
                " play at once"
            )
        for use in filter(None, (self.act, self.describe)):
            function(use)
        return self


class Gymnasium(RewardedSteps):
    """One episode of a gymnasium environment.

    The row's columns ``seed`` and ``options`` are given to ``reset``. ``terminated`` and
    ``truncated`` both end the episode; the step's ``info`` says which.
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
        options = dict(settings.options)
        if settings.image == "render":
            options.setdefault("render_mode", "rgb_array")
        self._environment = gymnasium.make(settings.id, **options)
        if self._act is number and not hasattr(self._environment.action_space, "n"):
            raise TypeError(
                f"{self._environment.action_space} is not Discrete: name a custom function under"
                " `act`"
            )

    def reset(self, task: Task) -> Observation:
        """Begin an episode. Raises DataFailure for a seed or options of the wrong type."""
        seed = task.extra.get("seed")
        options = task.extra.get("options")
        has_seed = seed is None or isinstance(seed, int)
        has_options = options is None or isinstance(options, Mapping)
        if not has_seed or not has_options:
            raise DataFailure(
                task.id,
                f"seed {seed!r} and options {options!r}: a whole number and a mapping are expected",
            )
        observation, info = self._environment.reset(
            seed=seed, options=None if options is None else dict(options)
        )
        return Observation((*task.messages, self._seen(observation, info)))

    def step(self, text: str) -> StepResult:
        """Take the action that ``act`` reads in the text.

        A text without an action is an error that the policy sees. Raises PolicyFailure for an
        action that breaks the environment.
        """
        try:
            action = read_by(self._act, text, self._environment.action_space)
        except ValueError as error:
            return self._refused(str(error))
        with carrying_out(f"{self._settings.id}: the action"):
            observation, reward, terminated, truncated, info = self._environment.step(action)
            self._reward(reward)
            message = self._seen(observation, info)
        return StepResult(
            Observation((message,)),
            done=bool(terminated or truncated),
            info={"truncated": bool(truncated)},
            reward=self._rewards[-1],
        )

    def close(self) -> None:
        """Close gymnasium's environment."""
        self._environment.close()

    def _seen(self, observation: Any, info: Mapping[str, Any]) -> Message:
        parts: list[str | ImageSource] = []
        key = self._settings.image_key
        if self._settings.image == "render":
            parts.append(picture(self._environment.render()))
        elif self._settings.image == "observation":
            parts.append(picture(observation[key] if key else observation))
        if self._describe is not None:
            parts.append(str(self._describe(observation, info)))
        return self._shown(*parts)


def number(text: str, space: Any) -> int:
    """Return the last whole number in the text, for a ``Discrete`` space.

    Raises ValueError for another number, or none.
    """
    numbers = re.findall(r"-?\d+", text)
    first = int(getattr(space, "start", 0))
    last = first + int(space.n) - 1
    # The length comes before ``contains``: numpy raises for a number that 64 bits do not hold.
    if not numbers or len(numbers[-1]) > 18 or not space.contains(int(numbers[-1])):
        raise ValueError(f"the action is a whole number from {first} to {last}")
    return int(numbers[-1])
