"""Conversations that are remembered, so that they continue with the tokens that were sampled.

A client sends its whole history as texts each time, which may render to other tokens than the
policy sampled. A known history continues as an episode does: its tokens, then the new messages as
an observation. An unknown one is rendered whole, and the answer has ``exact: false``.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from rayloop.chat.openai.api import ChatMessage, message_of
from rayloop.chat.rendering import Rendered, Renderer, common_prefix
from rayloop.core.failures import DataFailure
from rayloop.core.threads import Cache
from rayloop.core.traces import Trace
from rayloop.core.types import Completion, ImageSource, PromptImage, Sampling, TokenIds, Turn


@dataclass(frozen=True)
class Conversation:
    """A conversation up to a prompt or an answer.

    It has turns, images in order, and the name of the answer that it ``continues``. ``exact``: its
    assistant's tokens are the tokens that were sampled here; if not, ``why`` says where they
    differ. ``key`` is the digest of its first ``messages`` messages. ``name``: the name of its last
    answer.
    """

    turns: tuple[Turn, ...]
    images: tuple[PromptImage, ...]
    key: bytes
    messages: int
    continues: str = ""
    exact: bool = True
    why: str = ""
    sampling: Sampling | None = None
    name: str = ""

    @property
    def token_ids(self) -> TokenIds:
        """The tokens of all turns."""
        return tuple(token for turn in self.turns for token in turn.token_ids)

    def answered(self, completion: Completion, sampling: Sampling) -> Self:
        """The conversation with one more sampled turn."""
        return replace(self, turns=(*self.turns, completion.turn), sampling=sampling)

    def trace(self) -> Trace:
        """The conversation as a trace.

        Raises DataFailure unless it is ``exact``: then its tokens were not all sampled here.
        """
        if not self.exact:
            raise DataFailure("conversation", self.why)
        images = {image.ref.sha256: image.data for image in self.images if image.data is not None}
        return Trace.of(self.turns, images)

    @property
    def bytes(self) -> int:
        """The memory that it takes, roughly."""
        # A sampled token has a log-prob too.
        tokens = sum(len(turn.token_ids) * (2 if turn.sampled else 1) for turn in self.turns)
        return 1024 + 40 * tokens + sum(len(image.data or b"") for image in self.images)


class Histories:
    """The given answers, by the messages before them and by name.

    ``limit`` is in bytes; the oldest answers are forgotten first.
    """

    def __init__(self, renderer: Renderer, limit: int) -> None:
        self._renderer = renderer
        self._by_key: Cache[bytes, str] = Cache(1 << 16)
        self._by_name: Cache[str, Conversation] = Cache(
            limit, lambda conversation: conversation.bytes
        )

    def prompt(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        continues: str | None,
    ) -> Conversation:
        """The conversation to answer.

        Raises DataFailure for messages that cannot be rendered, and for messages that differ from
        the messages before the answer ``continues``.
        """
        keys = _keys(messages, tools)
        if messages[-1].role == "assistant":
            raise DataFailure(
                "messages", "the last one is the assistant's: there is nothing to answer"
            )
        answer_key = None
        for message, key in zip(messages, keys[1:], strict=True):
            if message.role == "assistant":
                answer_key = key
        if continues is not None:
            conversation = self._remembered(continues, answer_key)
            return self._continued(conversation, continues, messages, keys[-1])
        name = self._by_key.get(answer_key) if answer_key else None
        remembered = self._by_name.get(name) if name else None
        if name and remembered is not None:
            return self._continued(remembered, name, messages, keys[-1])

        rendered = self._renderer.prompt([message_of(message) for message in messages], tools)
        turns = (_turn("prompt", rendered),)
        conversation = Conversation(turns, rendered.images, keys[-1], len(messages))
        if answer_key is None:
            return conversation
        reason = self._why_not_exact(messages, keys, rendered.token_ids)
        return replace(conversation, exact=False, why=reason)

    def remember(self, name: str, conversation: Conversation, answer: ChatMessage) -> Conversation:
        """Keep a conversation with its answer.

        It is found by the answer's ``name``, and by the messages that a client will send with that
        answer.
        """
        key = _key(conversation.key, answer)
        answered = replace(conversation, key=key, messages=conversation.messages + 1, name=name)
        self._by_name.put(name, answered)
        self._by_key.put(key, name)
        # Also by the messages without the answer: ``_why_not_exact`` then finds which answer a
        # client changed.
        self._by_key.put(b"after" + conversation.key, name)
        return answered

    def named(self, name: str) -> Conversation | None:
        """The conversation up to this answer, None when it is not known (any more)."""
        return self._by_name.get(name)

    def _remembered(self, name: str, key: bytes | None) -> Conversation:
        """The conversation up to the answer ``name``. Raises DataFailure for other messages."""
        conversation = self._by_name.get(name)
        if conversation is None:
            raise DataFailure(
                "continues", f"{name} is not known (any more): leave it out, or begin again"
            )
        if conversation.key != key:
            raise DataFailure(
                "continues", f"the messages up to the last answer are not the ones before {name}"
            )
        return conversation

    def _continued(
        self, conversation: Conversation, name: str, messages: Sequence[ChatMessage], key: bytes
    ) -> Conversation:
        """A conversation with the messages after its answer ``name`` as an observation."""
        new_messages = [message_of(message) for message in messages[conversation.messages :]]
        rendered = self._renderer.observation(new_messages, conversation.turns[-1].token_ids)
        turn = _turn(new_messages[-1].role, rendered)
        return Conversation(
            turns=(*conversation.turns, turn),
            images=conversation.images + rendered.images,
            key=key,
            messages=len(messages),
            continues=name,
            exact=conversation.exact,
            why=conversation.why,
        )

    def _why_not_exact(
        self, messages: Sequence[ChatMessage], keys: Sequence[bytes], tokens: TokenIds
    ) -> str:
        """The message and the token at which a history with answers differs from the known ones."""
        for number in reversed(range(len(messages))):
            name = self._by_key.get(b"after" + keys[number])
            conversation = self._by_name.get(name) if name else None
            if conversation is not None:
                equal = common_prefix(tokens, conversation.token_ids)
                return (
                    f"messages[{number}] is not the answer that was given to the {number} before it"
                    f" ({name}); rendered again, the first {equal} tokens are equal to the known"
                    " ones"
                )
        return (
            "these answers were not given here, or are forgotten (limits.history): the history was"
            " rendered again"
        )


def _turn(role: str, rendered: Rendered) -> Turn:
    return Turn(role, rendered.token_ids, tuple(image.ref for image in rendered.images))


def _keys(messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """``keys[i]``: the digest of the tools and of the first i messages."""
    keys = [_digest(json.dumps(list(tools), sort_keys=True).encode())]
    for message in messages:
        keys.append(_key(keys[-1], message))
    return keys


def _key(before: bytes, message: ChatMessage) -> bytes:
    """The digest of one more message.

    A text and a text as the only part are the same; images count by their bytes, the arguments of a
    call by the value of their JSON: some clients write it again.
    """
    parts = []
    are_texts = []
    for part in message_of(message, calls=False).parts:
        if isinstance(part, ImageSource):
            parts.append(hashlib.sha256(part.data or b"").hexdigest())
            are_texts.append(False)
        elif part:
            parts.append(part)
            are_texts.append(True)
    calls = [
        [call.id, call.function.name, _canonical(call.function.arguments)]
        for call in message.tool_calls or ()
    ]
    content = json.dumps([message.role, parts, are_texts, calls])
    return _digest(before + content.encode(errors="surrogatepass"))


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _canonical(arguments: str) -> str:
    """The same text for equal JSON. JavaScript has one kind of number: it writes 1.0 as 1."""
    try:
        return json.dumps(json.loads(arguments, parse_int=float), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
