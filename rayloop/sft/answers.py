"""The answers that the supervised stage trains on.

They come from a class, a plain function, or the rows' column of answers.
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
    """The column that ``data.reader`` reads as the truth, a text or a number."""

    def answer(self, task: Task, rng: random.Random) -> str:
        """The row's answer as a text. Raises DataFailure when it is not a text or a number."""
        if isinstance(task.ground_truth, str | int | float):
            return str(task.ground_truth)
        raise DataFailure(
            f"task {task.id}",
            f"the answer is {short(task.ground_truth)}, not a text. Name the column with"
            " data.reader.with.truth, or write answers: {use: module:function}, a function of"
            " (task) or (task, rng) that returns the text",
        )


class FunctionAnswers:
    """A function of ``task``, or of ``task`` and ``rng``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._takes_rng = "rng" in inspect.signature(function).parameters

    def answer(self, task: Task, rng: random.Random) -> Any:
        """The function's result."""
        if self._takes_rng:
            return self._function(task=task, rng=rng)
        return self._function(task=task)


def check_function(function: Callable[..., Any], use: str) -> None:
    """Check that a function can be called with ``task``, or ``task`` and ``rng``.

    Raises ConfigError.
    """
    try:
        signature = inspect.signature(function)
        arguments = {"task": 0, "rng": 0} if "rng" in signature.parameters else {"task": 0}
        signature.bind(**arguments)
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
    component: Any = answers.build()
    if callable(getattr(component, "answer", None)):
        source: Answers = component
        return source
    return FunctionAnswers(component)


def checked(answer: Any, task: Task) -> Sequence[Message]:
    """The answer as messages. Raises DataFailure for anything but a text and messages."""
    if isinstance(answer, str):
        return [Message("assistant", (answer,))]
    is_list = isinstance(answer, Sequence) and len(answer) > 0
    if is_list and all(isinstance(message, Message) for message in answer):
        messages: Sequence[Message] = answer
        return messages
    raise DataFailure(
        f"task {task.id}", f"the answer is {short(answer)}, neither a text nor a list of Message"
    )


def try_first(answers: Component, task: Task) -> None:
    """Ask for the first row's answer before anything starts.

    Raises ConfigError with the file and line that raised.
    """
    try:
        checked(built(answers).answer(task, random.Random(0)), task)
    except DataFailure as failure:
        raise ConfigError(f"answers: {answers.use}: {failure}") from failure
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(
            f"answers: {answers.use} raised on task {task.id}:\n{own_frames(error)}"
        ) from error
