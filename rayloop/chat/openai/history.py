"""Conversations that are remembered, so that they go on with the very tokens that were sampled. A client sends its whole
history as texts each time, which may render to other tokens than the policy sampled. A known history continues as an episode does:
its tokens, then the new messages as an observation. An unknown one is rendered whole, and the answer has ``exact: false``.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from rayloop.chat.openai.api import ChatMessage, message_of
from rayloop.chat.rendering import Rendered, Renderer
from rayloop.core.failures import DataFailure
from rayloop.core.threads import Cache
from rayloop.core.traces import Trace
from rayloop.core.types import (
    Completion,
    ImageSource,
    Message,
    PromptImage,
    Sampling,
    TokenIds,
    Turn,
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation up to a prompt or an answer: its turns, its images in order, and the answer
    that it ``continues``. ``exact``: its sampled tokens are those that were sampled here; if not,
    ``why`` says where they differ. ``key`` is the digest of its first ``messages`` messages.
    ``name``: of the answer that it ends with.
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
        return Trace.of(
            self.turns,
            {image.ref.sha256: image.data for image in self.images if image.data is not None},
        )

    @property
    def bytes(self) -> int:
        """The memory that it takes, roughly."""
        tokens = sum(len(turn.token_ids) * (2 if turn.sampled else 1) for turn in self.turns)
        return 1024 + 40 * tokens + sum(len(image.data or b"") for image in self.images)


class Histories:
    """The answers that were given, by the messages before them and by name.

    ``limit`` is in bytes; the oldest go first.
    """

    def __init__(self, renderer: Renderer, limit: int) -> None:
        self._renderer = renderer
        self._by_key: Cache[bytes, str] = Cache(1 << 16)
        self._by_name: Cache[str, Conversation] = Cache(limit, lambda known: known.bytes)

    def prompt(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        continues: str | None,
    ) -> Conversation:
        """The conversation to answer.

        Raises DataFailure for what cannot be rendered, and ``continues`` with other messages.
        """
        keys = _keys(messages, tools)
        answered = [
            number for number, message in enumerate(messages, 1) if message.role == "assistant"
        ]
        if messages[-1].role == "assistant":
            raise DataFailure(
                "messages", "the last one is the assistant's: there is nothing to answer"
            )
        if continues is not None:
            return self._continued(
                self._named(continues, keys[answered[-1]] if answered else b""),
                continues,
                messages,
                keys,
            )
        name = self._by_key.get(keys[answered[-1]]) if answered else None
        if name and (known := self._by_name.get(name)) is not None:
            return self._continued(known, name, messages, keys)
        rendered = self._renderer.prompt([message_of(message) for message in messages], tools)
        whole = Conversation((_turn("prompt", rendered),), rendered.images, keys[-1], len(messages))
        return (
            replace(whole, exact=False, why=self._why(messages, keys, rendered.token_ids))
            if answered
            else whole
        )

    def remember(self, name: str, conversation: Conversation, answer: ChatMessage) -> Conversation:
        """Keep a conversation under the answer's ``name``, and under the messages that a client
        will send with that answer.
        """
        key = _key(conversation.key, answer)
        known = replace(conversation, key=key, messages=conversation.messages + 1, name=name)
        self._by_name.put(name, known)
        self._by_key.put(key, name)
        # By the messages without the answer: so ``_why`` can say which answer a client changed.
        self._by_key.put(b"after" + conversation.key, name)
        return known

    def named(self, name: str) -> Conversation | None:
        """The conversation up to this answer, None when it is not known (any more)."""
        return self._by_name.get(name)

    def _named(self, name: str, key: bytes) -> Conversation:
        known = self._by_name.get(name)
        if known is None:
            raise DataFailure(
                "continues", f"{name} is not known (any more): leave it out, or begin again"
            )
        if known.key != key:
            raise DataFailure(
                "continues", f"the messages up to the last answer are not those of {name}"
            )
        return known

    def _continued(
        self, known: Conversation, name: str, messages: Sequence[ChatMessage], keys: Sequence[bytes]
    ) -> Conversation:
        new = [message_of(message) for message in messages[known.messages :]]
        rendered = self._renderer.observation(new, known.turns[-1].token_ids)
        turn = _turn(new[-1].role, rendered)
        return Conversation(
            (*known.turns, turn),
            known.images + rendered.images,
            keys[-1],
            len(messages),
            name,
            known.exact,
            known.why,
        )

    def _why(self, messages: Sequence[ChatMessage], keys: Sequence[bytes], tokens: TokenIds) -> str:
        """The message and the token at which a history with answers leaves the known ones."""
        for number in reversed(range(len(messages))):
            name = self._by_key.get(b"after" + keys[number])
            if name and (known := self._by_name.get(name)) is not None:
                pairs = zip(tokens, known.token_ids, strict=False)
                equal = next(
                    (i for i, (a, b) in enumerate(pairs) if a != b),
                    min(len(tokens), len(known.token_ids)),
                )
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
    keys = [
        hashlib.blake2b(json.dumps(list(tools), sort_keys=True).encode(), digest_size=16).digest()
    ]
    for message in messages:
        keys.append(_key(keys[-1], message))
    return keys


def _key(before: bytes, message: ChatMessage) -> bytes:
    """The digest of one more message.

    A text and a text as the only part are the same; images count by their bytes, the arguments of a
    call by what their JSON says: some clients write them again.
    """
    parts = [
        part if isinstance(part, str) else hashlib.sha256(part.data or b"").hexdigest()
        for part in _parts(message)
    ]
    kinds = [isinstance(part, str) for part in _parts(message)]
    calls = [
        [call.id, call.function.name, _canonical(call.function.arguments)]
        for call in message.tool_calls or ()
    ]
    content = json.dumps([message.role, parts, kinds, calls])
    return hashlib.blake2b(before + content.encode(errors="surrogatepass"), digest_size=16).digest()


def _canonical(arguments: str) -> str:
    """The same text for equal JSON. JavaScript has one kind of number: it writes 1.0 as 1."""
    try:
        return json.dumps(json.loads(arguments, parse_int=float), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _parts(message: ChatMessage) -> tuple[str | ImageSource, ...]:
    plain: Message = message_of(message, calls=False)
    return tuple(part for part in plain.parts if part != "")
