"""The environment of question and answer.

The prompt is the task's messages, and the first answer ends the episode.
"""

from rayloop.config.settings import SettingsModel
from rayloop.core.protocols import Observation, StepResult
from rayloop.core.types import Task


class SingleTurn:
    """Shows the task's messages; the first answer ends the episode, without a result."""

    immediate = True

    class Settings(SettingsModel):
        """Nothing to set."""

    def __init__(self, settings: Settings) -> None: ...

    def reset(self, task: Task) -> Observation:
        """Show the task's messages."""
        return Observation(task.messages)

    def step(self, text: str) -> StepResult:
        """End the episode."""
        return StepResult(done=True)

    def evaluate(self) -> float | None:
        """Return None: the reward judges the answer."""
        return None

    def close(self) -> None:
        """Do nothing: it holds no resources."""
