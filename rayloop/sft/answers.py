"""The answers that the supervised stage trains on: a class, a plain function, or the rows' own
column of answers.
"""

import inspect
import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rayloop.config.explain import short
from rayloop.config.settings import Component, Role
from rayloop.core.failures import ConfigError, DataFailure
from rayloop.core.threads import own_frames
from rayloop.core.types import Message, Task


class Answers(Protocol):
    """Gives the answer to train on: a text, or a conversation with ``assistant`` messages.

    ``rng`` is for answers that are drawn. A class may have ``tokens``: texts that a tiny model made
    for this stage has as single tokens.
    """

    def answer(self, task: Task, rng: random.Random) -> str | Sequence[Message]:
        """The answer to a task. Raises DataFailure for a row without one."""


class AnswerColumn:
    """The row's own answer: the column that ``data.reader`` reads as the truth, a text or a number."""

    def answer(self, task: Task, rng: random.Random) -> str:
        """Raises DataFailure for a row whose answer is neither."""
        if isinstance(task.ground_truth, str | int | float):
            return str(task.ground_truth)
        raise DataFailure(
            f"task {task.id}",
            f"the answer is {short(task.ground_truth)}, no text. Name the column with"
            " data.reader.with.truth, or write answers: {use: module:function}, a function of"
            " (task) or (task, rng) that returns the text",
        )


class FunctionAnswers:
    """A function of ``task``, or of ``task`` and ``rng``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._draws = function, "rng" in inspect.signature(function).parameters

    def answer(self, task: Task, rng: random.Random) -> Any:
        """What the function returns."""
        return self._function(task=task, rng=rng) if self._draws else self._function(task=task)


def check_function(function: Callable[..., Any], use: str) -> None:
    """Raises ConfigError for a function that takes anything else."""
    try:
        parameters = inspect.signature(function).parameters
        given = {"task": 0, "rng": 0} if "rng" in parameters else {"task": 0}
        inspect.signature(function).bind(**given)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"use: {use!r} gives no answers: {error}. Expected a function of (task) or (task, rng)"
            " that returns the text, or a class with the method answer(self, task, rng)"
        ) from error
    if inspect.iscoroutinefunction(getattr(function, "func", function)):
        raise ConfigError(f"use: {use!r} is a coroutine function; answers are plain functions")


ANSWERS = Role("answers", ("answer",), check_function)


def built(answers: Component) -> Answers:
    """The answers of a configuration."""
    found: Any = answers.build()
    return found if callable(getattr(found, "answer", None)) else FunctionAnswers(found)


def checked(answer: Any, task: Task) -> Sequence[Message]:
    """The answer as messages. Raises DataFailure for anything but a text and messages."""
    if isinstance(answer, str):
        return [Message("assistant", (answer,))]
    if isinstance(answer, Sequence) and answer and all(isinstance(one, Message) for one in answer):
        return answer
    raise DataFailure(
        f"task {task.id}", f"the answer is {short(answer)}, neither a text nor a list of Message"
    )


def try_first(answers: Component, task: Task) -> None:
    """Ask for the first row's answer before anything starts.

    Raises ConfigError with the file and line of what raised.
    """
    try:
        checked(built(answers).answer(task, random.Random(0)), task)
    except DataFailure as failure:
        raise ConfigError(f"answers: {answers.use}: {failure}") from failure
    except Exception as error:  # a person's own code
        raise ConfigError(
            f"answers: {answers.use} raised on task {task.id}:\n{own_frames(error)}"
        ) from error
