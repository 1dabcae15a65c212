"""Requests for chat completions: the part of OpenAI's and vLLM's that a sampled policy can honour."""

import base64
import binascii
import functools
import json
import secrets
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal, Self

from jsonschema import Draft202012Validator, SchemaError
from jsonschema.validators import validator_for
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rayloop.chat.calls import bodies, called, without_calls, written
from rayloop.core.failures import DataFailure
from rayloop.core.types import ImageSource, Message
from rayloop.web import ImagePart, TextPart

IGNORED = {
    "store",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "reasoning_effort",
    "verbosity",
}
"""Keys that change nothing here: the policy has no reasoning effort, and everything is kept while
the conversation lives.
"""
DISTRIBUTION: dict[str, list[Any]] = {
    "top_p": [1],
    "top_k": [-1, 0],
    "min_p": [0],
    "frequency_penalty": [0],
    "presence_penalty": [0],
    "repetition_penalty": [1],
    "logit_bias": [{}],
    "response_format": [{"type": "text"}],
    "tool_choice": ["auto", "none"],
    "top_logprobs": [0],
    "skip_special_tokens": [True],
    "ignore_eos": [False],
}
"""Keys that would change the distribution that is sampled, and so the log-probs, or what is shown
of it, and the values with which they do not; null does not either.
"""


MOST_CALLS = 64
"""Of one answer."""


class CalledFunction(BaseModel):
    """The function of a call in OpenAI's form: ``arguments`` is JSON in a text."""

    name: str = Field(max_length=256)
    arguments: str = Field("{}", max_length=1_000_000)


class ToolCall(BaseModel):
    """A call of a tool in an assistant's message."""

    id: str = Field("", max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    """One message.

    Keys that clients copy from an answer (``refusal``, ``audio``, ...) are accepted when they are
    empty.
    """

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Annotated[TextPart | ImagePart, Field(discriminator="type")]] | None = None
    tool_calls: list[ToolCall] | None = Field(None, max_length=MOST_CALLS)
    tool_call_id: str | None = None
    name: str | None = None

    @model_validator(mode="after")
    def _honoured(self) -> Self:
        if extra := [key for key, value in (self.model_extra or {}).items() if value]:
            raise ValueError(f"{extra[0]} of a message is not supported")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls of a {self.role} message: only the assistant calls tools")
        if self.content is None and not self.tool_calls:
            raise ValueError("a message without content; give a text, or parts")
        return self


class ToolFunction(BaseModel):
    """The function that a tool offers; ``parameters`` is a JSON schema."""

    model_config = ConfigDict(extra="allow")
    name: str = Field(min_length=1, max_length=256)
    description: str = ""
    parameters: dict[str, Any] = {}

    @model_validator(mode="after")
    def _is_a_schema(self) -> Self:
        try:
            text = json.dumps(self.parameters)
            why = (_no_schema if len(text) <= KEPT else _no_schema.__wrapped__)(text)
        except RecursionError:
            why = "it is nested too deeply"
        if why:
            raise ValueError(f"parameters of {self.name} are no JSON schema: {why}")
        return self


KEPT = 1 << 14
"""Characters of a schema whose check is remembered: 512 of them stay."""


@functools.lru_cache(512)
def _no_schema(parameters: str) -> str:
    """Why that is no JSON schema; "" when it is one."""
    schema = json.loads(parameters)
    try:
        validator_for(schema, Draft202012Validator).check_schema(schema)
    except SchemaError as error:
        return f"{error.json_path}: {error.message}"
    return ""


class OfferedTool(BaseModel):
    """A tool that the policy may call."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["function"]
    function: ToolFunction


class StreamOptions(BaseModel):
    """Options of a stream. ``include_usage``: the last chunk has the usage."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class ChatRequest(BaseModel):
    """A request for a chat completion.

    ``distribution`` has the ``DISTRIBUTION`` keys with values that would change something: its
    reader refuses or ignores them.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    model: str = Field(max_length=256)
    messages: list[ChatMessage] = Field(min_length=1, max_length=16_384)
    distribution: dict[str, Any] = Field({}, exclude=True)
    temperature: float | None = Field(None, ge=0, le=2)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    stop: (
        str | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)] | None
    ) = None
    seed: int | None = Field(None, ge=0, lt=2**63)
    n: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    stream: bool | None = None
    """Answer with server-sent events, which come together once the answer is whole."""
    stream_options: StreamOptions | None = None
    tools: list[OfferedTool] | None = Field(None, max_length=128)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    return_token_ids: bool | None = None
    """As vLLM: ``prompt_token_ids`` of the answer, ``token_ids`` of each choice."""
    return_tokens_as_token_ids: bool | None = None
    """As vLLM: tokens in ``logprobs`` are written ``token_id:N``, so that they are unambiguous."""
    include_stop_str_in_output: bool | None = None
    """As vLLM: leave the stop string in the text. It is in the token ids either way."""
    continues: str | None = Field(None, max_length=128)
    """The answer (``<id>/<choice>``) that the last assistant message is, where texts alone could be
    ambiguous.
    """

    @model_validator(mode="after")
    def _streamed(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options without stream: true")
        return self

    @model_validator(mode="before")
    @classmethod
    def _neutral(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        if "distribution" in body:
            raise ValueError("distribution is no key of a request")
        read_elsewhere = IGNORED | DISTRIBUTION.keys() - {"tool_choice"}
        kept = {key: value for key, value in body.items() if key not in read_elsewhere}
        changed = {
            key: body[key]
            for key, values in DISTRIBUTION.items()
            if body.get(key) not in [None, *values]
        }
        return {**kept, "distribution": changed}

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, none of them empty."""
        return (self.stop,) if isinstance(self.stop, str) and self.stop else tuple(self.stop or ())


def message_of(message: ChatMessage, calls: bool = True) -> Message:
    """The message in our form; with ``calls`` its calls of tools become text.

    Raises DataFailure for bad base64 or arguments.
    """
    content = message.content
    parts: list[str | ImageSource] = (
        [content] if isinstance(content, str) else [_part(part) for part in content or ()]
    )
    if calls:
        parts += [_written(call.function) for call in message.tool_calls or ()]
    return Message("system" if message.role == "developer" else message.role, tuple(parts))


def answer_of(text: str, offered: Collection[str]) -> ChatMessage:
    """The assistant's message, to a client that ``offered`` tools of these names.

    Calls are taken out of the text, unless a client could not take one of them: no JSON, arguments
    that are no object, a name that was not offered, too many or too long ones. Many clients end
    with an error on such a call, and so the whole answer stays a text.
    """
    try:
        calls = _calls(text, offered) if offered else []
    except ValueError:
        calls = []
    if not calls:
        return ChatMessage(role="assistant", content=text)
    return ChatMessage(role="assistant", content=without_calls(text) or None, tool_calls=calls)


def _calls(text: str, offered: Collection[str]) -> list[ToolCall]:
    """Raises ValueError when one of them is none."""
    found = bodies(text)
    if len(found) > MOST_CALLS:
        raise ValueError(f"{len(found)} calls in one answer, {MOST_CALLS} are allowed")
    calls: list[ToolCall] = []
    for body in found:
        name, arguments = called(body)
        if name not in offered:
            raise ValueError(f"there is no tool {name!r}")
        function = CalledFunction(
            name=name, arguments=json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        )
        calls.append(ToolCall(id=f"call_{secrets.token_hex(8)}", function=function))
    return calls


def _written(function: CalledFunction) -> str:
    try:
        arguments = json.loads(function.arguments)
    except (ValueError, RecursionError) as error:
        raise DataFailure(
            "tool_calls", f"the arguments of {function.name} are no JSON: {error}"
        ) from error
    if not isinstance(arguments, dict):
        raise DataFailure("tool_calls", f"the arguments of {function.name} are no JSON object")
    return written(function.name, arguments)


def _part(part: TextPart | ImagePart) -> str | ImageSource:
    if isinstance(part, TextPart):
        return part.text
    _, _, data = part.image_url.url.partition(",")
    try:
        return ImageSource(data=base64.b64decode(data, validate=True))
    except binascii.Error as error:
        raise DataFailure("image_url", f"its data are no base64: {error}") from error


def images_of(messages: Sequence[ChatMessage]) -> int:
    """The number of images in the messages."""
    shown = [message.content for message in messages if isinstance(message.content, list)]
    return sum(isinstance(part, ImagePart) for content in shown for part in content)
