"""The base of environments with a screen.

It has their settings, the prompts of rows, a turn's actions, and the first observation.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rayloop.config.settings import SettingsModel
from rayloop.core.failures import DataFailure
from rayloop.core.protocols import Observation, StepResult
from rayloop.core.types import ImageSource, Message, Task
from rayloop.data.images import probe
from rayloop.data.resizing import smart_resize
from rayloop.envs.grammar.actions import Action, Mistake, Point, Scroll, Sleep
from rayloop.envs.grammar.arpo import Broken, ScreenSize, acts
from rayloop.envs.grammar.basic import BasicActions
from rayloop.envs.grammar.choice import OriginalSpeaks
from rayloop.envs.grammar.family import (
    ANY_MODEL,
    INSTRUCTION,
    LANGUAGE,
    LanguageChoice,
    LanguageFile,
)
from rayloop.envs.grammar.language import spoken_format
from rayloop.envs.grammar.rules import Extent

COORDINATE_RANGE = 1000
FRACTION_DIGITS = 4
"""Digits behind the point of a coordinate from 0 to 1."""


class Pointing(SettingsModel):
    """Coordinates of a model's actions."""

    coordinates: Literal["absolute", "relative", "fraction"] = "absolute"
    """Pixels of the resized screenshot, relative (0 to 1000) or fraction (0 to 1).

    As the model was trained: Qwen2.5-VL and UI-TARS 1.5 write pixels, UI-TARS 1.0 and Qwen3-VL
    relative numbers, Aguvis fractions.
    """
    factor: int = Field(28, ge=1)
    """Sides of the resized screenshot are multiples of this many pixels.

    It is 28 for Qwen2-VL and Qwen2.5-VL, 32 for Qwen3-VL.
    """
    min_pixels: int = Field(784, gt=0)
    """Smaller screenshots are enlarged to this many pixels.

    It must be the same number as ``model.min_pixels``, or absolute clicks miss.
    """
    max_pixels: int = Field(1_003_520, gt=0)
    """Larger screenshots are shrunk to this many pixels.

    It must be the same number as ``model.max_pixels``, or absolute clicks miss.
    """

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Return a screen's width and height in the model's unit."""
        if self.coordinates != "absolute":
            largest = COORDINATE_RANGE if self.coordinates == "relative" else 1
            return largest, largest
        rows, columns = smart_resize(height, width, self.factor, self.min_pixels, self.max_pixels)
        return columns, rows

    def on(self, action: Action, width: int, height: int) -> Action:
        """Return the action with its points in whole pixels of a screen, clamped to it.

        The screen has ``width`` x ``height`` pixels.
        """
        columns, rows = self.size(width, height)

        def to_pixels(point: Point) -> Point:
            x = round(point.x * width / columns)
            y = round(point.y * height / rows)
            return Point(min(max(x, 0), width - 1), min(max(y, 0), height - 1))

        return with_points(action, to_pixels)

    def written(self, action: Action, width: int, height: int) -> Action:
        """Return the action with its points as the model would write them, for demonstrations.

        The points of ``action`` are in pixels of the screen.
        """
        columns, rows = self.size(width, height)
        digits = FRACTION_DIGITS if self.coordinates == "fraction" else None

        def to_unit(point: Point) -> Point:
            x = round(point.x * columns / width, digits)
            return Point(x, round(point.y * rows / height, digits))

        return with_points(action, to_unit)


def with_points(action: Action, convert: Callable[[Point], Point]) -> Action:
    """Return the action with each of its points converted."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(action):
        value = getattr(action, field.name)
        if field.name == "path":
            values[field.name] = tuple(map(convert, value))
        else:
            values[field.name] = convert(value) if isinstance(value, Point) else value
    kind: Callable[..., Action] = type(action)
    return kind(**values)


class ScreenSettings(OriginalSpeaks):
    """How a policy's turns reach a screen, and how it is shown to the policy."""

    language: Annotated[LanguageChoice, LANGUAGE] = ANY_MODEL
    """How the policy writes its actions, and the prompt of rows that only say the task.

    A run fills in ``environment.language``. ``pointing`` takes the language's coordinates unless
    the settings name others.
    """
    pointing: Pointing = Pointing()
    """How the model's coordinates become pixels.

    It must fit what the model was trained on and ``model.max_pixels``.
    """
    role: str = "user"
    """The role under which the chat template shows screens: some templates have no ``tool``."""
    max_actions: int = Field(8, ge=1)
    """Actions in one turn with ``corrected``; a turn with more is answered with an error.

    Raise it for models that write longer plans.
    """
    variant: Literal["corrected", "original"] = "corrected"
    """original: ARPO's rules, for models that it trained.

    Turns are read by its rules, mistakes included; one that cannot be read ends the episode; the
    first screen is a separate message.
    """
    most_actions: int | None = Field(None, ge=1)
    """Actions of an episode with ``original`` (15 in ARPO), after which it ends.

    It can end within a turn, whose last actions ARPO would still carry out.
    """

    @model_validator(mode="before")
    @classmethod
    def _point_as_the_language(cls, data: Any) -> Any:
        """Add the language's coordinates to ``pointing`` where it does not say them."""
        if not isinstance(data, Mapping):
            return data
        pointing = data.get("pointing", {})
        choice = data.get("language")
        if not isinstance(choice, str) or not isinstance(pointing, Mapping):
            return data
        usual: dict[str, Any] = getattr(spoken_format(choice), "pointing", {})
        if not usual:
            return data
        defaults = cls.model_fields["pointing"].default.model_dump()
        return {**data, "pointing": {**defaults, **usual, **pointing}}


class ScreenEnvironment:
    """What environments with a screen share: it reads turns, and shows what follows.

    It also checks the number of a turn's actions. In subclasses ``_carry_out`` does actions,
    ``reset`` returns ``_first``, and ``screen_size`` gives the size.
    """

    SCREEN = "computer"
    """The kind of screen, by which a language has its prompt: a key of ``prompts``."""

    def __init__(self, settings: ScreenSettings) -> None:
        self._screen = settings
        self._format = spoken_format(settings.language)
        self._action_count = 0
        self._basic: BasicActions | None = None

    def step(self, text: str) -> StepResult:
        """Carry out a turn.

        A text that is not a turn, or asks for what the screen cannot do, is an error that the
        policy sees.
        """
        if self._screen.variant == "original":
            return self._original(text)
        unit = self._screen.pointing.size(*self.screen_size())
        turn = self._format.read(text, Extent(*unit))
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

    def basic(self, action: Action) -> tuple[Action, ...]:
        """Return the basic actions that an action stands for, with points in pixels.

        Raises ValueError, in words for the policy, for what no screen can do.
        """
        width, height = self.screen_size()
        pointing = self._screen.pointing
        if isinstance(action, Scroll) and action.amount is None:
            action = dataclasses.replace(action, **getattr(self._format, "scroll", {}))
        if self._basic is None:
            columns, rows = pointing.size(width, height)
            self._basic = BasicActions(columns, rows, touch=self.SCREEN == "phone")
        return tuple(pointing.on(part, width, height) for part in self._basic.of(action))

    def _original(self, text: str) -> StepResult:
        """Carry out a turn as ARPO reads it.

        A call that does nothing still takes the time of an action, after which the screen is shown.
        """
        width, height = self.screen_size()
        columns, rows = self._screen.pointing.size(width, height)
        try:
            calls = acts(text, ScreenSize((columns, rows), (width, height)))
        except Broken as error:
            return StepResult(error=f"this is not a turn: {error}", done=True)
        limit = self._screen.most_actions
        if limit is not None:
            calls = calls[: max(0, limit - self._action_count)]
        self._action_count += len(calls)

        def to_unit(point: Point) -> Point:
            return Point(point.x * columns / width, point.y * rows / height)

        actions = [with_points(action, to_unit) for action in chain.from_iterable(calls)]
        try:
            step = self._carry_out(actions or [Sleep()])
        except ValueError as error:
            step = self._refused(str(error))
        if limit is None or self._action_count < limit:
            return step
        return dataclasses.replace(step, done=True)

    def screen_size(self) -> tuple[int, int]:
        """Return width and height of the screen, in pixels."""
        raise NotImplementedError

    def _carry_out(self, actions: Sequence[Action]) -> StepResult:
        """``actions``: as the model wrote them. Raises ValueError, in words for the policy."""
        raise NotImplementedError

    def _shown(self, *parts: str | ImageSource) -> Observation:
        return Observation((Message(self._screen.role, parts),))

    def _refused(self, reason: str, *screens: ImageSource) -> StepResult:
        return StepResult(self._shown(f"Error: {reason}", *screens), error=reason)

    def _first(self, task: Task, instruction: str, *screen: str | ImageSource) -> Observation:
        """Return the first messages and the screen. Raises DataFailure."""
        self._action_count = 0
        self._basic = None
        if self._screen.variant == "original":
            shown = Message(self._screen.role, screen)
            return Observation((*_with_instruction(task, instruction), shown))
        beginning = Beginning(self._screen, self.SCREEN, self.screen_size())
        return Observation(tuple(beginning.messages(task, instruction, *screen)))


@dataclass(frozen=True)
class Beginning:
    """How episodes begin: on a ``screen`` of a kind, of ``size`` in pixels."""

    settings: ScreenSettings
    screen: str
    size: tuple[int, int]

    def messages(
        self, task: Task, instruction: str, *shown: str | ImageSource
    ) -> Sequence[Message]:
        """Return the row's messages with the instruction in the last one, and what is shown.

        ``instruction`` replaces ``{instruction}``. A row that only says the task gets the prompt of
        the language around it. Raises DataFailure where the language has none.
        """
        *earlier, last = _with_instruction(task, instruction)
        language = spoken_format(self.settings.language)
        if not (task.bare and isinstance(language, LanguageFile)):
            return *earlier, Message(last.role, (*last.parts, *shown))
        unit = Extent(*self.settings.pointing.size(*self.size))
        try:
            return language.messages(self.screen, unit, last.parts, shown)
        except ValueError as error:
            raise DataFailure(task.id, str(error)) from error


def asked_in(language: LanguageChoice, task: Task) -> Task:
    """Return a task whose row has its screen with the language's prompt, if it is bare.

    Raises DataFailure for an image that cannot be read, and for a language without a prompt.
    """
    if not task.bare:
        return task
    if not task.images:
        raise DataFailure(task.id, "the row only says a task, and has no image of the screen")
    _, width, height = probe(task.images[0])
    beginning = Beginning(ScreenSettings(language=language), "computer", (width, height))
    messages = tuple(beginning.messages(task, INSTRUCTION))
    return dataclasses.replace(task, messages=messages, bare=False)


def _with_instruction(task: Task, instruction: str) -> Sequence[Message]:
    """Return the row's messages with ``instruction`` for ``{instruction}`` in the last one."""
    *earlier, last = task.messages
    texts = [
        part.replace(INSTRUCTION, instruction) if isinstance(part, str) else part
        for part in last.parts
    ]
    return *earlier, Message(last.role, tuple(texts))
