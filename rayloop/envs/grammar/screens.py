"""The base of environments with a screen: settings, prompts of rows, a turn's actions, and the
first observation.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from rayloop.config.settings import SettingsModel
from rayloop.core.protocols import Observation, StepResult
from rayloop.core.types import ImageSource, Message, Task
from rayloop.data.resizing import smart_resize
from rayloop.envs.grammar.actions import Action, Mistake, Point, Sleep
from rayloop.envs.grammar.arpo import Broken, ScreenSize, acts
from rayloop.envs.grammar.scanner import read

INSTRUCTION = "{instruction}"
"""In a row's prompt: where what the task asks for goes."""
_TEXT = (Path(__file__).parent / "prompts" / "ui_tars.txt").read_text(encoding="utf-8").rstrip()
UI_TARS = _TEXT.replace("{call_user}", "")
"""Source: bytedance/UI-TARS 582f3a7 (Apache-2.0), prompts of UI-TARS 1.5 for computers."""
UI_TARS_OR_FAIL = _TEXT.replace("{call_user}", "call_user() # When the task cannot be done.\n")
"""The same for tasks some of which cannot be done, as in OSWorld."""


THOUSAND = 1000


class Pointing(SettingsModel):
    """Coordinates of a model's actions."""

    coordinates: Literal["absolute", "relative"] = "absolute"
    """As trained: pixels of the resized screenshot (Qwen2.5-VL, UI-TARS 1.5), or relative: 0 to
    1000 (UI-TARS 1.0, Qwen3-VL).
    """
    factor: int = Field(28, ge=1)
    """Sides of the resized screenshot are multiples of this many pixels: 28 for Qwen2-VL and
    Qwen2.5-VL, 32 for Qwen3-VL.
    """
    min_pixels: int = Field(784, gt=0)
    """Smaller screenshots are enlarged to this many pixels: the same number as
    ``model.min_pixels``, or absolute clicks miss.
    """
    max_pixels: int = Field(1_003_520, gt=0)
    """Larger screenshots are shrunk to this many pixels: the same number as ``model.max_pixels``,
    or absolute clicks miss.
    """

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height in the model's unit, of a screen in pixels."""
        if self.coordinates == "relative":
            return THOUSAND, THOUSAND
        rows, columns = smart_resize(height, width, self.factor, self.min_pixels, self.max_pixels)
        return columns, rows

    def on(self, action: Action, width: int, height: int) -> Action:
        """The action with its points in whole pixels of a screen of ``width`` x ``height``, clamped
        to it.
        """
        columns, rows = self.size(width, height)

        def place(point: Point) -> Point:
            x, y = round(point.x * width / columns), round(point.y * height / rows)
            return Point(min(max(x, 0), width - 1), min(max(y, 0), height - 1))

        return _moved(action, place)

    def written(self, action: Action, width: int, height: int) -> Action:
        """The other way, for demonstrations: an action in pixels of the screen with its points as
        the model would write them.
        """
        columns, rows = self.size(width, height)
        return _moved(
            action,
            lambda point: Point(round(point.x * columns / width), round(point.y * rows / height)),
        )


def _moved(action: Action, place: Callable[[Point], Point]) -> Action:
    found: dict[str, Any] = {
        field.name: getattr(action, field.name) for field in dataclasses.fields(action)
    }
    made: Callable[..., Action] = type(action)
    return made(**{name: place(it) if isinstance(it, Point) else it for name, it in found.items()})


class ScreenSettings(SettingsModel):
    """How a policy's turns reach a screen, and how it is shown to the policy."""

    pointing: Pointing = Pointing()
    """How the model's coordinates become pixels; must fit what the model was trained on and
    ``model.max_pixels``.
    """
    role: str = "user"
    """The role under which the chat template shows screens: some templates know no ``tool``."""
    max_actions: int = Field(8, ge=1)
    """Of ``corrected``: actions in one turn; a turn with more is answered with an error.

    Raise it for models that plan ahead.
    """
    variant: Literal["corrected", "original"] = "corrected"
    """original: as in ARPO, for models that it trained.

    Turns are read by its own rules, mistakes included; one that cannot be read ends the episode;
    the first screen is a message of its own.
    """
    most_actions: int | None = Field(None, ge=1)
    """Of ``original``: actions of an episode (15 in ARPO), after which it ends, within a turn too,
    which ARPO carries out.
    """


class ScreenEnvironment:
    """What environments with a screen share: reads a turn, checks its number of actions, and shows
    what follows. In what derives from it ``_carry_out`` does actions, ``reset`` returns ``_first``,
    and ``variant: original`` asks for ``screen_size``.
    """

    def __init__(self, settings: ScreenSettings) -> None:
        self._screen, self._acted = settings, 0

    def step(self, text: str) -> StepResult:
        """Carry out a turn.

        A text that is no turn, or asks for what the screen cannot do, is an error that the policy
        sees.
        """
        if self._screen.variant == "original":
            return self._original(text)
        turn = read(text)
        if isinstance(turn, Mistake):
            return self._refused(str(turn))
        if len(turn.actions) > self._screen.max_actions:
            return self._refused(
                f"{len(turn.actions)} actions in one turn, {self._screen.max_actions} are allowed"
            )
        try:
            return self._carry_out(turn.actions)
        except ValueError as error:
            return self._refused(str(error))

    def _original(self, text: str) -> StepResult:
        """A call that does nothing still takes the time of an action, after which the screen is
        shown.
        """
        wide, high = self.screen_size()
        columns, rows = self._screen.pointing.size(wide, high)
        try:
            done = acts(text, ScreenSize((columns, rows), (wide, high)))
        except Broken as error:
            return StepResult(error=f"this is no turn: {error}", done=True)
        most = self._screen.most_actions
        done = done if most is None else done[: max(0, most - self._acted)]
        self._acted += len(done)
        unit = [
            _moved(one, lambda at: Point(at.x * columns / wide, at.y * rows / high))
            for call in done
            for one in call
        ]
        try:
            step = self._carry_out(unit or [Sleep()])
        except ValueError as error:
            step = self._refused(str(error))
        return step if most is None or self._acted < most else dataclasses.replace(step, done=True)

    def screen_size(self) -> tuple[int, int]:
        """Width and height of the screen, in pixels."""
        raise NotImplementedError

    def _carry_out(self, actions: Sequence[Action]) -> StepResult:
        """``actions``: as the model wrote them. Raises ValueError, in words for the policy."""
        raise NotImplementedError

    def _shown(self, *parts: str | ImageSource) -> Observation:
        return Observation((Message(self._screen.role, parts),))

    def _refused(self, why: str, *seen: ImageSource) -> StepResult:
        return StepResult(self._shown(f"Error: {why}", *seen), error=why)

    def _first(self, task: Task, instruction: str, *seen: str | ImageSource) -> Observation:
        """The row's messages with ``instruction`` in place of ``{instruction}`` in the last one,
        and what is ``seen`` behind it.
        """
        self._acted = 0
        *before, last = with_instruction(task, instruction)
        if self._screen.variant == "original":
            return Observation((*before, last, Message(self._screen.role, seen)))
        return Observation((*before, Message(last.role, (*last.parts, *seen))))


def with_instruction(task: Task, instruction: str) -> Sequence[Message]:
    """The row's messages with ``instruction`` in place of ``{instruction}`` in the last one."""
    *before, last = task.messages
    texts = [
        part.replace(INSTRUCTION, instruction) if isinstance(part, str) else part
        for part in last.parts
    ]
    return *before, Message(last.role, tuple(texts))
