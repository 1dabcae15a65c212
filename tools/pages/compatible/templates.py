"""Chat templates as they are published: what is asked, trained and continued here, beside
transformers' rendering of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError

from rayloop.chat.rendering import Renderer
from rayloop.config.model import ModelSettings
from rayloop.core.failures import ConfigError, DataFailure
from rayloop.core.types import Message
from tools.pages.compatible.artefacts import PUBLISHED, Published, folder_of

DATE = "2026-01-31"
EQUAL, SAME_TEXT, DIFFERS, REFUSED = "✓", "same text", "differs", "–"
"""``REFUSED``: the template itself refuses it, or shows nothing of it."""
MARK = "the0answer"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Reports the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Where."}},
            "required": ["city"],
        },
    },
}
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Rome"}},
}
ASKED = {"role": "user", "content": "What is 2 + 2?"}
ANSWERED = {"role": "assistant", "content": MARK}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
WRITTEN = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}],
}
"""The same call with its arguments as text (OpenAI, DeepSeek)."""
RESULT = {"role": "tool", "name": "weather", "tool_call_id": CALL["id"], "content": "20 degrees"}
NEXT = {"role": "user", "content": "And 3 + 3?"}
CONVERSATIONS: dict[str, Sequence[Sequence[dict[str, Any]]]] = {
    "prompts": (
        [ASKED],
        [{"role": "system", "content": "Be brief."}, ASKED],
        [ASKED, ANSWERED, NEXT],
    ),
    "calls": ([ASKED, CALLED, RESULT], [ASKED, WRITTEN, RESULT]),
}
COLUMNS = ("prompts", "tools", "calls", "answers", "next user", "tool results")
HEADER = """## Chat templates

Each template as its models are published with it, on a tokenizer of their form with their special
tokens.

- prompts: the tokens of a question, of one behind a system message, and of one behind an answer
  equal transformers'
- tools, calls: the same for a prompt with tools, and with a call and its result in the history
- answers: a supervised answer has the tokens that it has in the whole conversation; *same text*
  where its first characters would be one token with the header's last ones, which a policy that is
  asked cannot sample
- next user, tool results: what is appended to a sampled answer is what the template writes behind
  one. Where results of tools are refused, `role: user` of `ToolCalls` shows them """


def section() -> Iterator[str]:
    """The section of the page."""
    yield HEADER
    yield "| template | models | `model_type` | " + " | ".join(COLUMNS) + " |"
    yield "|---" * (3 + len(COLUMNS)) + "|"
    for one in PUBLISHED:
        kinds = ", ".join(f"`{kind}`" for kind in one.kinds) or REFUSED
        yield f"| {one.name} | {one.models} | {kinds} | " + " | ".join(tried(one).values()) + " |"


def tried(one: Published) -> dict[str, str]:
    """How each column comes out for a template."""
    with folder_of(one) as (folder, theirs):
        ours = Renderer(
            ModelSettings(path=str(folder), chat_template_kwargs={"strftime_now": DATE})
        )
        beside = _Beside(ours, theirs)
        return {
            "prompts": _all(beside.prompt(chat) for chat in CONVERSATIONS["prompts"]),
            "tools": beside.prompt([ASKED], [TOOL]),
            "calls": _all(beside.prompt(chat, needs="Rome") for chat in CONVERSATIONS["calls"]),
            "answers": beside.answer(),
            "next user": beside.following([ASKED, ANSWERED], NEXT, MARK),
            "tool results": _all(
                beside.following([ASKED, called], RESULT, "Rome") for called in (CALLED, WRITTEN)
            ),
        }


class _Beside:
    """A renderer and transformers' tokenizer of one folder."""

    def __init__(self, ours: Renderer, theirs: Any) -> None:
        self.ours, self.theirs = ours, theirs

    def prompt(
        self, chat: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = (), needs: str = ""
    ) -> str:
        """Whether the prompt's tokens are equal.

        ``needs``: what the template must show of it, or it does not support it.
        """
        text = self.text(chat, tools=tools)
        if text is None or needs not in text or (tools and text == self.text(chat)):
            return REFUSED
        return _same(
            lambda: self.ours.prompt([_message(one) for one in chat], tools).token_ids,
            self.ids(text),
        )

    def answer(self) -> str:
        """Whether a supervised answer continues the prompt as in the whole conversation, where that
        begins with the prompt.
        """
        header, whole = self.text([ASKED]), self.text([ASKED, ANSWERED], generation=False)
        if header is None or whole is None or not whole.startswith(header):
            return REFUSED
        prompt = self.ours.prompt([_message(ASKED)]).token_ids
        made = (*prompt, *self.ours.answer(MARK, opening=True))
        expected = self.ids(whole)
        if expected[: len(prompt)] == prompt:
            return _same(
                lambda: made[: len(expected)], expected[: len(made)]
            )  # GLM: the next turn has what ends this one
        text = self.theirs.decode(made)
        return SAME_TEXT if self.theirs.decode(expected).startswith(text) else DIFFERS

    def following(
        self, before: Sequence[dict[str, Any]], message: dict[str, Any], mark: str
    ) -> str:
        """Whether what follows an answer is what transformers writes behind it in the whole
        conversation.
        """
        text = self.text([*before, message])
        if text is None or message["content"] not in text.rpartition(mark)[2]:
            return REFUSED
        expected = self.ids(text)
        found = _made(lambda: self.ours.observation([_message(message)], ()).token_ids)
        return DIFFERS if found is None else _same(lambda: found, expected[-len(found) :])

    def text(
        self,
        chat: Sequence[dict[str, Any]],
        *,
        generation: bool = True,
        tools: Sequence[dict[str, Any]] = (),
    ) -> str | None:
        """transformers' rendering, with our date and in the form of contents that the template
        takes; None when it refuses.
        """
        typed = self.ours._turns.written
        try:
            return str(
                self.theirs.apply_chat_template(
                    [typed(dict(one)) for one in chat],
                    tools=list(tools) or None,
                    add_generation_prompt=generation,
                    tokenize=False,
                    strftime_now=datetime.fromisoformat(DATE).strftime,
                )
            )
        except (TemplateError, TypeError):
            return None

    def ids(self, text: str) -> tuple[int, ...]:
        """transformers' tokens of a rendered text."""
        return tuple(self.theirs(text, add_special_tokens=False)["input_ids"])


def _message(one: dict[str, Any]) -> Message:
    others = {key: value for key, value in one.items() if key not in ("role", "content")}
    text = one["content"]
    return (
        Message(one["role"], (), {"content": None, **others})
        if text is None
        else Message(one["role"], (text,), others)
    )


def _same(made: Callable[[], Sequence[int]], expected: Sequence[int]) -> str:
    return EQUAL if _made(made) == tuple(expected) else DIFFERS


def _made(made: Callable[[], Sequence[int]]) -> tuple[int, ...] | None:
    try:
        return tuple(made())
    except (ConfigError, DataFailure):
        return None


def _all(found: Iterable[str]) -> str:
    """One word for several: what differs counts first; what a template refuses is left out, unless
    it refuses all.
    """
    words = {*found}
    return DIFFERS if DIFFERS in words else EQUAL if EQUAL in words else REFUSED
