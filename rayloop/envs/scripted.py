"""An environment that follows a script whatever the policy says.

It is for tests, demonstrations and load measurements.
"""

import time

from PIL import Image
from pydantic import Field

from rayloop.config.settings import SettingsModel
from rayloop.core.protocols import Observation, StepResult
from rayloop.core.types import ImageSource, Message, Task
from rayloop.data.images import png


class ScriptedImage(SettingsModel):
    """A generated picture: a horizontal gradient."""

    width: int = Field(56, ge=1)
    """Pixels of the picture from left to right."""
    height: int = Field(56, ge=1)
    """Pixels of the picture from top to bottom."""

    def source(self) -> ImageSource:
        """Return the picture as PNG."""
        gradient = Image.linear_gradient("L").rotate(90)
        picture = gradient.resize((self.width, self.height)).convert("RGB")
        return ImageSource(data=png(picture))


class ScriptedStep(SettingsModel):
    """The answer to one turn."""

    text: str = ""
    """Text that the policy sees after that turn."""
    images: tuple[ScriptedImage, ...] = ()
    """Pictures that come with the text."""
    error: str | None = None
    """Report the action as unusable, with this text."""
    done: bool = False
    """End the episode after it, before the script's end."""
    seconds: float = Field(0.0, ge=0)
    """How long the step takes, to test deadlines."""


class ScriptedTool:
    """Answers the k-th turn with the k-th step of the script.

    The episode is done at the end of the script.
    """

    class Settings(SettingsModel):
        """The script."""

        steps: tuple[ScriptedStep, ...] = ()
        """The answers, one a turn, in order."""
        role: str = "user"
        """The role of the observations in the chat: some templates have no tool."""
        result: float | None = None
        """What the environment reports as the episode's result."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._steps = iter(settings.steps)

    def reset(self, task: Task) -> Observation:
        """Show the task's messages, and begin the script."""
        self._steps = iter(self._settings.steps)
        return Observation(task.messages)

    def step(self, text: str) -> StepResult:
        """Return the next answer of the script."""
        step = next(self._steps, None)
        if step is None:
            return StepResult(done=True)
        time.sleep(step.seconds)
        texts = (step.text,) if step.text else ()
        images = (image.source() for image in step.images)
        message = Message(self._settings.role, (*texts, *images))
        return StepResult(Observation((message,)), step.done, step.error)

    def evaluate(self) -> float | None:
        """Return ``result``."""
        return self._settings.result

    def close(self) -> None:
        """Do nothing: it holds no resources."""
