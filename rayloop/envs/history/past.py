"""An episode so far, as a history policy gets it, and what the policy may make of it."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rayloop.core.types import ImageSource, Message
from rayloop.envs.grammar.family import LanguageChoice

THOUGHT_END = "</think>"


@dataclass(frozen=True)
class PastAnswer:
    """An earlier turn of the policy. Shown as it is, it keeps the token ids that were sampled.

    ``number`` counts from 0. ``action`` is the text without its thought, ``summary`` what the turn
    says that it does, for languages that have such a part; else it is ``action``.
    """

    number: int
    text: str
    action: str
    summary: str


@dataclass(frozen=True)
class Exchange:
    """An answer, and the messages of the observation that followed."""

    answer: PastAnswer
    messages: tuple[Message, ...]


Shown = Sequence[Message | PastAnswer]
"""What the engine is shown, in reading order."""


@dataclass(frozen=True)
class Past:
    """An episode so far: the messages of ``reset``, then each answer with its observation.

    ``task_images``: the images of the task's row, where the environment added others.
    """

    first: tuple[Message, ...]
    exchanges: tuple[Exchange, ...] = ()
    task_images: tuple[ImageSource, ...] = ()

    @property
    def everything(self) -> Shown:
        """Return all messages and answers."""
        shown: list[Message | PastAnswer] = list(self.first)
        for exchange in self.exchanges:
            shown += [exchange.answer, *exchange.messages]
        return shown

    def followed_by(self, answer: PastAnswer, messages: Sequence[Message]) -> "Past":
        """Return the past with one more answer and its observation."""
        exchange = Exchange(answer, tuple(messages))
        return dataclasses.replace(self, exchanges=(*self.exchanges, exchange))


class History(Protocol):
    """Decides what the engine is shown next.

    A class has this method, and ``Settings`` for its ``with``.
    """

    def shown(self, past: Past) -> Shown:
        """Return messages, and answers of the past in their order.

        A pure function: the same past always gives the same. An answer that is returned as it came
        keeps its token ids; one that is to look otherwise is a ``Message`` of the role assistant,
        whose text is tokenized as context and never trained. The first and the last element are
        messages of other roles.
        """
        ...


class AnswerReader:
    """Makes answers of texts, as the environment's ``language`` reads them; "": it has none."""

    def __init__(self, language: LanguageChoice = "") -> None:
        self._action_and_summary: Callable[[str, str], tuple[str, str]] | None = None
        if language:
            # Most environments have no language, and start without the modules that read one.
            from rayloop.envs.history.language_answers import LanguageAnswers

            self._action_and_summary = LanguageAnswers(language).action_and_summary

    def answer(self, number: int, text: str) -> PastAnswer:
        """Return the answer ``number``; a text that the language cannot read is its own action."""
        unread = text.rpartition(THOUGHT_END)[2].lstrip() if THOUGHT_END in text else text
        if self._action_and_summary is None:
            return PastAnswer(number, text, unread, unread)
        return PastAnswer(number, text, *self._action_and_summary(text, unread))
