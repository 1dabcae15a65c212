"""Games of textarena for one player: the policy's text is the move.

The package is the extra ``textarena``.
"""

import math
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from pydantic import Field, model_validator

from rayloop.config.settings import SettingsModel
from rayloop.core.failures import DataFailure, PolicyFailure, carrying_out
from rayloop.core.protocols import Observation, StepResult
from rayloop.core.types import Message, Task
from rayloop.envs.adapters.packages import needs

_random_lock = threading.Lock()
"""Held while the module ``random`` has an episode's state.

Games draw from that module, which all episodes of a process share.
"""


class TextArena:
    """One episode of a game; the row's column ``seed`` starts it.

    ``evaluate`` returns the reward that the game gives at its end. The game counts invalid moves,
    and ends at the number that it allows.
    """

    class Settings(SettingsModel):
        """Which game."""

        id: str
        """Its name for ``textarena.make``, such as GuessTheNumber-v0.

        Games for several players are refused.
        """
        options: dict[str, Any] = Field(default_factory=dict)
        """Further arguments of ``textarena.make``."""

        @model_validator(mode="after")
        def _check_installed(self) -> Self:
            needs("textarena", "textarena")
            import textarena

            if self.id not in textarena.envs.registration.ENV_REGISTRY:
                raise ValueError(
                    f"textarena has no game {self.id!r}; textarena.pprint_registry_detailed() lists"
                    " them"
                )
            return self

    def __init__(self, settings: Settings) -> None:
        import textarena

        self._name = settings.id
        self._game = textarena.make(settings.id, **settings.options)
        self._random_state = random.getstate()
        self._last_observation = ""
        self._result = 0.0

    def reset(self, task: Task) -> Observation:
        """Begin a game.

        Raises DataFailure for a seed that is not a number, and for a game that one player cannot
        play.
        """
        seed = task.extra.get("seed")
        if not isinstance(seed, int):
            raise DataFailure(task.id, f"seed {seed!r}: the row needs a whole number")
        self._random_state = random.Random(seed).getstate()
        with self._own_random_state():
            try:
                self._game.reset(num_players=1, seed=seed)
            except (AssertionError, ValueError) as error:
                raise DataFailure(
                    task.id, f"{self._name} is not a game for one player: {error}"
                ) from error
        return Observation((*task.messages, self._seen()))

    def step(self, text: str) -> StepResult:
        """Make the move. Raises PolicyFailure for one that breaks the game."""
        with carrying_out(f"{self._name}: the move"), self._own_random_state():
            done, _ = self._game.step(action=text)
            if not done:
                return StepResult(Observation((self._seen(),)))
            rewards, info = self._game.close()
        self._result = float((rewards or {}).get(0, 0.0))
        if not math.isfinite(self._result):
            raise PolicyFailure(f"{self._name} was ended with the reward {self._result}")
        reason = str(info.get(0, {}).get("reason", ""))
        return StepResult(None, done=True, info={"reason": reason}, reward=self._result)

    def evaluate(self) -> float:
        """Return the game's reward; 0 for a game that the episode's limits ended."""
        return self._result

    def close(self) -> None:
        """Do nothing: it holds no resources."""

    def _seen(self) -> Message:
        """Return what is new: many games show the whole history each time."""
        previous = self._last_observation
        self._last_observation = str(self._game.get_observation()[1])
        return Message("user", (self._last_observation.removeprefix(previous),))

    @contextmanager
    def _own_random_state(self) -> Iterator[None]:
        with _random_lock:
            shared_state = random.getstate()
            random.setstate(self._random_state)
            try:
                yield
            finally:
                self._random_state = random.getstate()
                random.setstate(shared_state)
