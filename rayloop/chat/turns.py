"""What a chat template writes around an assistant's turn.

A template may write the last answer of a conversation differently from earlier ones (an empty
thought before it, an end of text behind it), and earlier ones without their thoughts. So what
follows an answer is read from conversations in which it is followed, behind a mark that stands for
the answer. Nothing is rendered again.
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
"""Nine letters and digits, as the templates of Mistral want it."""


class Turns:
    """``special`` matches the tokenizer's special tokens.

    ``typed``: the template takes contents as lists of parts only. ``end``: the special token with
    which a turn ends, or the next one begins where the template closes none (GLM). ``closed``: the
    one that stands in its place once the turn is an earlier one (gpt-oss). ``asked``: the dummy
    question up to the assistant's header; ``opening``: what stands between that and an answer.
    Raises ConfigError for a template that fails on a plain conversation, or whose turns end without
    a special token.
    """

    def __init__(self, template: ChatTemplate, special: re.Pattern[str], folder: Path) -> None:
        self._template, self._special = template, special
        self._mark = f"answer{uuid.uuid4().hex}"
        self._before: dict[tuple[str, str], Chat] = {}
        # ``_shown`` reads ``typed`` itself, so it is asked with False before the answer is known.
        self.typed = False
        self.typed = not self._shown(self._mark)

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

        header, found, closing = last.partition(self._mark)
        self.opening = (
            header.removeprefix(self.asked) if found and header.startswith(self.asked) else ""
        )

        closes = special.match(closing.lstrip())
        follows = special.match(following)
        if follows is None:
            raise ConfigError(
                f"{folder}: the chat template ends a turn with {following[:80]!r}, expected a"
                " special token"
            )
        self.end = (closes or follows)[0]
        self.closed = follows[0] if closes else self.end

    def written(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with its content in the form that the template takes."""
        content = message["content"]
        if self.typed and isinstance(content, str):
            return {**message, "content": [{"type": "text", "text": content}]}
        return message

    def following(self, messages: Chat) -> str:
        """What the template writes behind an answer that ``messages`` follow: the end of its turn,
        the messages, the assistant's header. Raises jinja2.TemplateError when it refuses them, or
        shows nothing of their role there.
        """
        role, name = (
            (str(messages[0].get(key) or "") for key in ("role", "name")) if messages else ("", "")
        )
        before = self._before.get((role, name))
        if before is None:
            before = self._before[role, name] = self._conversation(role, name)
        if before is not self._answered:
            messages = [
                {"tool_call_id": CALL_ID, **message} if message["role"] == role else message
                for message in messages
            ]
        return self._tail([*before, *messages])

    def _conversation(self, role: str, name: str) -> Chat:
        """A conversation up to an answer behind which the template shows a message of this role.

        Some show the result of a tool only behind a call (gpt-oss, Gemma 4): then the answer is
        one.
        """
        if not role:
            return self._answered
        nothing = f"it shows nothing of a message of the role {role!r} behind an answer"
        reasons = list[str]()
        seen = f"shown{uuid.uuid4().hex}"
        for before in self._candidates(name):
            called = {} if before is self._answered else {"tool_call_id": CALL_ID}
            named = {"name": name} if name else {}
            try:
                if seen in self._tail(
                    [*before, {"role": role, "content": seen, **named, **called}]
                ):
                    return before
                reasons.append(nothing)
            except jinja2.TemplateError as error:
                reasons.append(str(error))
        raise jinja2.TemplateError(
            f"{reasons[0]}. Another role may be shown, such as user (ToolCalls: role)"
        )

    def _candidates(self, name: str) -> Iterator[Chat]:
        yield self._answered
        for content, arguments in (
            ("", {"mark": self._mark}),
            (None, f'{{"mark": "{self._mark}"}}'),
        ):
            call = {
                "id": CALL_ID,
                "type": "function",
                "function": {"name": name or "tool", "arguments": arguments},
            }
            yield [*QUESTION, {"role": "assistant", "content": content, "tool_calls": [call]}]

    def _tail(self, messages: Chat) -> str:
        """What follows the mark, from the first special token that may end the turn: the rest of a
        call belongs to the answer.
        """
        _, found, rest = self._text(messages, generation=True).partition(self._mark)
        if not found:
            raise jinja2.TemplateError("it leaves out an earlier answer")
        if "tool_calls" not in messages[len(QUESTION)]:
            return rest.lstrip()
        _, _, closing = self._text(messages[: len(QUESTION) + 1], generation=False).partition(
            self._mark
        )
        ends = closing.find(self.end)
        begins = (
            ends
            if ends >= 0
            else max((found.start() for found in self._special.finditer(closing)), default=0)
        )
        if rest[:begins] != closing[:begins]:
            raise jinja2.TemplateError(
                "it writes a call of a tool differently once a message follows"
            )
        return rest[begins:]

    def _text(self, messages: Sequence[dict[str, Any]], generation: bool) -> str:
        return self._template(
            [self.written(message) for message in messages], generation=generation
        )

    def _shown(self, question: str) -> bool:
        try:
            return question in self._text([{"role": "user", "content": question}], generation=True)
        except jinja2.TemplateError:
            return False
