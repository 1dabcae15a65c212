"""The contexts of an episode: what its history shows, in the token ids that the engine sampled."""

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from rayloop.chat.rendering import Rendered, Renderer, common_prefix
from rayloop.core.failures import EnvironmentFailed
from rayloop.core.types import Message, TokenIds, Turn
from rayloop.envs.grammar.family import LanguageChoice
from rayloop.envs.history.past import AnswerReader, History, Past, PastAnswer, Shown

ASSISTANT = "assistant"


class Continuation(NamedTuple):
    """What the engine is shown after an answer.

    ``observation`` follows the present context. If ``context`` is not None, it replaces that one
    first. ``alone``: the observation as it would follow the answer; None if it is shown so.
    """

    observation: Rendered
    context: Rendered | None = None
    alone: Rendered | None = None


class Contexts:
    """The contexts of one episode.

    A context that begins with the whole one before it continues it. Any other begins a new
    segment: answers that are shown unchanged keep their sampled ids, and the rest is rendered.
    """

    def __init__(self, renderer: Renderer, history: History, language: LanguageChoice = "") -> None:
        self._renderer = renderer
        self._history = history
        self._reader = AnswerReader(language)
        self._sampled: list[TokenIds] = []
        self._past = Past(())
        self._shown: Shown = ()
        self._tools: Sequence[Mapping[str, Any]] = ()

    def begin(self, past: Past, tools: Sequence[Mapping[str, Any]]) -> Sequence[Message]:
        """Return the messages of the first context. Raises EnvironmentFailed.

        Answers of ``past`` were not sampled: they are tokenized as context.
        """
        self._past = past
        self._tools = tools
        self._sampled = [self._renderer.answer(each.answer.text) for each in past.exchanges]
        self._shown = self._next_shown()
        return [_as_message(message) for message in self._shown]

    def after(self, text: str, sampled: TokenIds, messages: Sequence[Message]) -> Continuation:
        """Return what follows the answer ``sampled``, whose ``text`` the environment got.

        ``messages`` are its observation. Raises EnvironmentFailed, and as ``Renderer.observation``.
        """
        answer = self._reader.answer(len(self._sampled), text)
        self._sampled.append(sampled)
        self._past = self._past.followed_by(answer, messages)
        continued = [*self._shown, answer, *messages]
        self._shown = self._next_shown()
        own = self._renderer.observation(messages, sampled)
        if self._shown == continued:
            return Continuation(own)

        head, parts = self._parts()
        rendered = self._renderer.prompt(head, self._tools)
        if not parts:
            context, observation = self._cut(rendered, own)
            return Continuation(observation, context, own)
        pieces = [rendered]
        for ids, following in parts:
            pieces += [Rendered(ids), self._renderer.observation(following, ids)]
        # What follows the newest answer is the observation; the context is all before it.
        *earlier, observation = pieces
        _, last_messages = parts[-1]
        changed = last_messages != list(messages)
        return Continuation(observation, _joined(earlier), own if changed else None)

    def _next_shown(self) -> Shown:
        """Return what the history shows now. Raises EnvironmentFailed for what cannot be shown."""
        name = type(self._history).__name__
        try:
            shown = list(self._history.shown(self._past))
        except Exception as error:
            raise EnvironmentFailed(
                f"the history {name} raised {type(error).__name__}: {error}", bug=True
            ) from error
        answers = [exchange.answer for exchange in self._past.exchanges]
        unchanged = [message for message in shown if isinstance(message, PastAnswer)]
        expected = [answer for answer in answers if answer in unchanged]
        problem = ""
        if not all(isinstance(message, Message | PastAnswer) for message in shown):
            problem = "something that is neither a Message nor a PastAnswer"
        elif not shown or _is_answer(shown[0]) or _is_answer(shown[-1]):
            problem = "no message of another role than assistant at the beginning and at the end"
        elif unchanged != expected:
            problem = (
                "answers that it was not given, or not in their order: write a changed one as a"
                " Message of the role assistant"
            )
        if problem:
            raise EnvironmentFailed(f"the history {name} shows {problem}", bug=True)
        return shown

    def _parts(self) -> tuple[list[Message], list[tuple[TokenIds, list[Message]]]]:
        """Return the messages before the first answer, and each answer with those after it."""
        head: list[Message] = []
        parts: list[tuple[TokenIds, list[Message]]] = []
        for message in self._shown:
            if _is_answer(message):
                parts.append((self._ids(message), []))
            elif isinstance(message, Message):
                following = parts[-1][1] if parts else head
                following.append(message)
        return head, parts

    def _ids(self, answer: Message | PastAnswer) -> TokenIds:
        if isinstance(answer, PastAnswer):
            return self._sampled[answer.number]
        texts = [part for part in answer.parts if isinstance(part, str)]
        return self._renderer.answer("".join(texts))

    def _cut(self, whole: Rendered, own: Rendered) -> tuple[Rendered, Rendered]:
        """Return a context without answers up to the observation, and the observation.

        ``own`` is the observation by itself. The context reaches up to the last token in which the
        two differ, read from their ends.
        """
        equal = common_prefix(whole.token_ids[::-1], own.token_ids[::-1])
        place = len(whole.token_ids) - equal
        border = max(0, len(whole.images) - len(own.images))
        context = Rendered(whole.token_ids[:place], whole.images[:border])
        observation = Rendered(whole.token_ids[place:], whole.images[border:])

        image_tokens = sum(image.tokens for image in own.refs)
        has_images = observation.token_ids.count(self._renderer.image_token or -1) == image_tokens
        same_images = [image.sha256 for image in observation.refs] == [
            image.sha256 for image in own.refs
        ]
        if has_images and same_images:
            return context, observation
        # An image would be on both sides of the border, or the history shows the observation in
        # another way: then all of it is context.
        return whole, Rendered(())


def _as_message(message: Message | PastAnswer) -> Message:
    if isinstance(message, Message):
        return message
    return Message(ASSISTANT, (message.text,))


def _is_answer(message: Message | PastAnswer) -> bool:
    return isinstance(message, PastAnswer) or message.role == ASSISTANT


def _joined(pieces: Sequence[Rendered]) -> Rendered:
    token_ids = chain.from_iterable(piece.token_ids for piece in pieces)
    images = chain.from_iterable(piece.images for piece in pieces)
    return Rendered(tuple(token_ids), tuple(images))


def context_turn(turns: Sequence[Turn]) -> Turn:
    """Return turns as the one context with which a new segment of a trajectory begins."""
    token_ids = chain.from_iterable(turn.token_ids for turn in turns)
    images = chain.from_iterable(turn.images for turn in turns)
    return Turn("context", tuple(token_ids), tuple(images), restart=True)


def images_replaced(message: Message, words: str) -> Message:
    """Return the message with ``words`` in the place of each image."""
    parts = tuple(part if isinstance(part, str) else words for part in message.parts)
    return dataclasses.replace(message, parts=parts)
