"""The text that a chat template writes around an assistant's turn.

A template may write the last answer of a conversation differently from earlier ones (an empty
thought before it, an end of text after it), and earlier ones without their thoughts. So the text
after an answer is taken from conversations in which a message follows, with a mark in place of the
answer. No sampled answer is rendered again.
"""

import re
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2

from rayloop.chat.template import ChatTemplate
from rayloop.core.failures import ConfigError

Chat = list[dict[str, Any]]
QUESTION: Chat = [{"role": "user", "content": "question"}]
CALL_ID = "call00000"
"""Nine letters and digits, as the templates of Mistral require."""


class Turns:
    """The texts around an assistant's turn in one chat template.

    ``special`` matches the tokenizer's special tokens. ``typed``: the template takes contents as
    lists of parts only. ``end``: the special token that ends a turn or, where the template closes
    none, begins the next one (GLM). ``closed``: the token in its place in an earlier turn
    (gpt-oss). ``asked``: the dummy question up to the assistant's header; ``opening``: the text
    between that and an answer. Raises ConfigError for a template that fails on a plain
    conversation, or whose turns end without a special token.
    """

    def __init__(self, template: ChatTemplate, special: re.Pattern[str], folder: Path) -> None:
        self._template = template
        self._special = special
        self._mark = f"answer{uuid.uuid4().hex}"
        self._conversations: dict[tuple[str, str], Chat] = {}
        # ``_shows`` reads ``typed`` itself, so it runs with False first.
        self.typed = False
        self.typed = not self._shows(self._mark)

        answer = {"role": "assistant", "content": self._mark}
        self._answered: Chat = [*QUESTION, answer]
        try:
            self.asked = self._text(QUESTION, generation=True)
            last = self._text(self._answered, generation=False)
            following = self._tail([*self._answered, *QUESTION])
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"{folder}: the chat template fails on a plain conversation: {error}"
            ) from error

        header, mark, closing = last.partition(self._mark)
        self.opening = ""
        if mark and header.startswith(self.asked):
            self.opening = header.removeprefix(self.asked)

        last_end = special.match(closing.lstrip())
        earlier_end = special.match(following)
        if earlier_end is None:
            raise ConfigError(
                f"{folder}: the chat template ends a turn with {following[:80]!r}, expected a"
                " special token"
            )
        self.end = (last_end or earlier_end)[0]
        self.closed = earlier_end[0]

    def written(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with its content in the form that the template takes."""
        content = message["content"]
        if self.typed and isinstance(content, str):
            return {**message, "content": [{"type": "text", "text": content}]}
        return message

    def following(self, messages: Chat) -> str:
        """The text that the template writes after an answer that ``messages`` follow.

        It is the end of the answer's turn, the messages and the assistant's header. Raises
        jinja2.TemplateError when the template refuses the messages, or leaves out their role there.
        """
        role = ""
        name = ""
        if messages:
            role = str(messages[0].get("role") or "")
            name = str(messages[0].get("name") or "")
        conversation = self._conversations.get((role, name))
        if conversation is None:
            conversation = self._conversation(role, name)
            self._conversations[role, name] = conversation
        if conversation is not self._answered:
            messages = [
                {"tool_call_id": CALL_ID, **message} if message["role"] == role else message
                for message in messages
            ]
        return self._tail([*conversation, *messages])

    def _conversation(self, role: str, name: str) -> Chat:
        """A conversation up to an answer after which the template shows a message of this role.

        Some templates show the result of a tool only after a call (gpt-oss, Gemma 4): then the
        answer is a call.
        """
        if not role:
            return self._answered
        reasons = []
        content = f"shown{uuid.uuid4().hex}"
        for conversation in self._candidates(name):
            message = {"role": role, "content": content}
            if name:
                message["name"] = name
            if conversation is not self._answered:
                message["tool_call_id"] = CALL_ID
            try:
                if content in self._tail([*conversation, message]):
                    return conversation
                reasons.append(
                    f"it shows nothing of a message of the role {role!r} behind an answer"
                )
            except jinja2.TemplateError as error:
                reasons.append(str(error))
        raise jinja2.TemplateError(
            f"{reasons[0]}. Another role may be shown, such as user (ToolCalls: role)"
        )

    def _candidates(self, name: str) -> Iterator[Chat]:
        """Conversations that end with an answer, then with a call in two forms."""
        yield self._answered
        contents_and_arguments: list[tuple[str | None, Any]] = [
            ("", {"mark": self._mark}),
            (None, f'{{"mark": "{self._mark}"}}'),
        ]
        for content, arguments in contents_and_arguments:
            call = {
                "id": CALL_ID,
                "type": "function",
                "function": {"name": name or "tool", "arguments": arguments},
            }
            yield [*QUESTION, {"role": "assistant", "content": content, "tool_calls": [call]}]

    def _tail(self, messages: Chat) -> str:
        """The text after the mark, from the first special token that may end the turn.

        The rest of a call belongs to the answer.
        """
        _, mark, rest = self._text(messages, generation=True).partition(self._mark)
        if not mark:
            raise jinja2.TemplateError("it leaves out an earlier answer")
        if "tool_calls" not in messages[len(QUESTION)]:
            return rest.lstrip()
        call_alone = self._text(messages[: len(QUESTION) + 1], generation=False)
        _, _, closing = call_alone.partition(self._mark)
        tail_start = closing.find(self.end)
        if tail_start < 0:
            tail_start = max(
                (match.start() for match in self._special.finditer(closing)), default=0
            )
        if rest[:tail_start] != closing[:tail_start]:
            raise jinja2.TemplateError(
                "it writes a call of a tool differently once a message follows"
            )
        return rest[tail_start:]

    def _text(self, messages: Sequence[dict[str, Any]], generation: bool) -> str:
        chat = [self.written(message) for message in messages]
        return self._template(chat, generation=generation)

    def _shows(self, question: str) -> bool:
        """Whether the template shows a content that is a plain text."""
        try:
            return question in self._text([{"role": "user", "content": question}], generation=True)
        except jinja2.TemplateError:
            return False
