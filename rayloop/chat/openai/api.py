"""Requests for chat completions: the part of OpenAI's and vLLM's API that a policy can honour."""

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
"""Keys that change nothing here.

The policy has no reasoning effort, and everything is kept while the conversation lives.
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
"""Keys that would change the sampled distribution, and so the log-probs, or the part that is shown.

With these values, and with null, they change nothing.
"""


MOST_CALLS = 64
"""The most calls of one answer."""


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
        for key, value in (self.model_extra or {}).items():
            if value:
                raise ValueError(f"{key} of a message is not supported")
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
            is_short = len(text) <= CACHED_SCHEMA_CHARACTERS
            check = _schema_error if is_short else _schema_error.__wrapped__
            error = check(text)
        except RecursionError:
            error = "it is nested too deeply"
        if error:
            raise ValueError(f"parameters of {self.name} are not a JSON schema: {error}")
        return self


CACHED_SCHEMA_CHARACTERS = 1 << 14
"""Characters of the longest schema whose check is cached; the cache has 512 of them."""


@functools.lru_cache(512)
def _schema_error(parameters: str) -> str:
    """Why a text is not a JSON schema; "" when it is one."""
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
    """The options of a stream. ``include_usage``: the last chunk has the usage."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class ChatRequest(BaseModel):
    """A request for a chat completion.

    ``distribution`` has the ``DISTRIBUTION`` keys with values that would change something. The code
    that reads it refuses or ignores them.
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
    """Answer with server-sent events, which all come when the answer is complete."""
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
    """The answer (``<id>/<choice>``) of the last assistant message.

    It is needed where the texts alone could be ambiguous.
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
            raise ValueError("distribution is not a key of a request")
        not_fields = IGNORED | DISTRIBUTION.keys() - {"tool_choice"}
        fields = {key: value for key, value in body.items() if key not in not_fields}
        distribution = {
            key: body[key]
            for key, neutral_values in DISTRIBUTION.items()
            if body.get(key) not in [None, *neutral_values]
        }
        return {**fields, "distribution": distribution}

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, none of them empty."""
        if isinstance(self.stop, str):
            return (self.stop,) if self.stop else ()
        return tuple(self.stop or ())


def message_of(message: ChatMessage, calls: bool = True) -> Message:
    """The message in our form; with ``calls`` its calls of tools become text.

    Raises DataFailure for bad base64 or arguments.
    """
    parts: list[str | ImageSource]
    if isinstance(message.content, str):
        parts = [message.content]
    else:
        parts = [_part(part) for part in message.content or ()]
    if calls:
        parts += [_call_text(call.function) for call in message.tool_calls or ()]
    role = "system" if message.role == "developer" else message.role
    return Message(role, tuple(parts))


def answer_of(text: str, offered: Collection[str]) -> ChatMessage:
    """The assistant's message to a client that ``offered`` tools of these names.

    Calls are removed from the text, unless a client could not take one of them: invalid JSON,
    arguments that are not an object, a name that was not offered, too many or too long calls. Many
    clients end with an error on such a call, and so the whole answer stays a text.
    """
    try:
        calls = _calls(text, offered) if offered else []
    except ValueError:
        calls = []
    if not calls:
        return ChatMessage(role="assistant", content=text)
    return ChatMessage(role="assistant", content=without_calls(text) or None, tool_calls=calls)


def _calls(text: str, offered: Collection[str]) -> list[ToolCall]:
    """The calls in a text. Raises ValueError when one of them is invalid."""
    call_bodies = bodies(text)
    if len(call_bodies) > MOST_CALLS:
        raise ValueError(f"{len(call_bodies)} calls in one answer, {MOST_CALLS} are allowed")
    calls: list[ToolCall] = []
    for body in call_bodies:
        name, arguments = called(body)
        if name not in offered:
            raise ValueError(f"unknown tool {name!r}")
        arguments_text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        function = CalledFunction(name=name, arguments=arguments_text)
        calls.append(ToolCall(id=f"call_{secrets.token_hex(8)}", function=function))
    return calls


def _call_text(function: CalledFunction) -> str:
    """A call in the form in which the policy writes it. Raises DataFailure."""
    try:
        arguments = json.loads(function.arguments)
    except (ValueError, RecursionError) as error:
        raise DataFailure(
            "tool_calls", f"the arguments of {function.name} are not JSON: {error}"
        ) from error
    if not isinstance(arguments, dict):
        raise DataFailure("tool_calls", f"the arguments of {function.name} are not a JSON object")
    return written(function.name, arguments)


def _part(part: TextPart | ImagePart) -> str | ImageSource:
    if isinstance(part, TextPart):
        return part.text
    _, _, data = part.image_url.url.partition(",")
    try:
        return ImageSource(data=base64.b64decode(data, validate=True))
    except binascii.Error as error:
        raise DataFailure("image_url", f"its data are not base64: {error}") from error


def images_of(messages: Sequence[ChatMessage]) -> int:
    """The number of images in the messages."""
    count = 0
    for message in messages:
        if isinstance(message.content, list):
            count += sum(isinstance(part, ImagePart) for part in message.content)
    return count
