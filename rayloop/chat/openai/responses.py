"""OpenAI's ``responses`` as chat completions and back.

It is the part of that API that a sampled policy can honour.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rayloop.chat.openai.api import DISTRIBUTION, IGNORED, ChatMessage, ChatRequest
from rayloop.core.failures import DataFailure

_PARTS = {"input_text": "text", "output_text": "text", "input_image": "image_url"}
_IGNORED = {*IGNORED, "include", "reasoning", "truncation", "top_logprobs"}


class ResponsesRequest(BaseModel):
    """A request for a response.

    Keys that are not here are refused unless they are empty or change nothing.
    """

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    model: str = Field(max_length=256)
    input: str | list[dict[str, Any]] = Field(min_length=1)
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = Field(None, max_length=128)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    metadata: dict[str, str] | None = None
    stream: bool | None = None
    text: dict[str, Any] | None = None
    user: str | None = None

    @model_validator(mode="after")
    def _honoured(self) -> Self:
        supported = _IGNORED | DISTRIBUTION.keys()
        for key, value in (self.model_extra or {}).items():
            if value and key not in supported:
                raise ValueError(f"{key} is not supported")
        return self


def chat_of(asked: ResponsesRequest, before: Sequence[ChatMessage]) -> ChatRequest:
    """The chat completion that answers a request for a response.

    ``before``: the messages of the response that it continues. Raises DataFailure.
    """
    messages: list[dict[str, Any]] = []
    if asked.instructions:
        messages.append({"role": "system", "content": asked.instructions})
    for message in before:
        # New instructions replace the instructions of the earlier response.
        if not (asked.instructions and message.role == "system"):
            messages.append(message.model_dump(exclude_none=True))
    if isinstance(asked.input, str):
        messages.append({"role": "user", "content": asked.input})
    else:
        messages += _messages(asked.input)

    tools = [{"type": tool.get("type"), "function": _function(tool)} for tool in asked.tools or ()]
    body: dict[str, Any] = {"model": asked.model, "messages": messages, "tools": tools or None}
    body |= {key: value for key, value in (asked.model_extra or {}).items() if key in DISTRIBUTION}
    body |= {
        "max_tokens": asked.max_output_tokens,
        "temperature": asked.temperature,
        "tool_choice": asked.tool_choice,
    }
    body["response_format"] = (asked.text or {}).get("format")
    try:
        return ChatRequest.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "request"
        raise DataFailure(key, first["msg"]) from error


def response_of(answer: Mapping[str, Any], asked: ResponsesRequest) -> dict[str, Any]:
    """The response for a chat completion with one choice."""
    (choice,) = answer["choices"]
    usage = answer["usage"]
    name = answer["id"].removeprefix("chatcmpl-")
    is_cut = choice["finish_reason"] == "length"
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": answer["created"],
        "model": answer["model"],
        "output": _output_items(choice["message"], name),
        "status": "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": asked.instructions,
        "metadata": asked.metadata or {},
        "tools": asked.tools or [],
        "tool_choice": asked.tool_choice or "auto",
        "parallel_tool_calls": True,
        "temperature": asked.temperature,
        "top_p": None,
        "previous_response_id": asked.previous_response_id,
        "text": {"format": {"type": "text"}},
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
        "weight_version": answer["weight_version"],
        "rayloop": answer["rayloop"],
    }


def _output_items(message: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """The message of the assistant, if it has a text, and its calls."""
    items: list[dict[str, Any]] = []
    if message["content"] is not None:
        part = {
            "type": "output_text",
            "text": message["content"],
            "annotations": [],
            "logprobs": [],
        }
        items.append(
            {
                "type": "message",
                "id": f"msg_{name}",
                "status": "completed",
                "role": "assistant",
                "content": [part],
            }
        )
    for call in message.get("tool_calls", ()):
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{call['id']}",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
                "status": "completed",
            }
        )
    return items


def events(response: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A complete response as OpenAI's stream of events."""
    for number, event in enumerate(_unnumbered_events(response)):
        yield {**event, "sequence_number": number}


def _unnumbered_events(response: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    without_output = {
        **response,
        "status": "in_progress",
        "output": [],
        "usage": None,
        "incomplete_details": None,
    }
    yield {"type": "response.created", "response": without_output}
    yield {"type": "response.in_progress", "response": without_output}
    for index, item in enumerate(response["output"]):
        yield from _item_events(index, item)
    yield {"type": f"response.{response['status']}", "response": dict(response)}


def _item_events(index: int, item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of one message or call, which comes whole in one delta."""
    is_message = item["type"] == "message"
    empty_content: dict[str, Any] = {"content": []} if is_message else {"arguments": ""}
    empty_item = {**item, "status": "in_progress", **empty_content}
    yield {"type": "response.output_item.added", "output_index": index, "item": empty_item}
    position = {"output_index": index, "item_id": item["id"]}
    if is_message:
        (part,) = item["content"]
        text = part["text"]
        position["content_index"] = 0
        yield {"type": "response.content_part.added", **position, "part": {**part, "text": ""}}
        yield {"type": "response.output_text.delta", **position, "delta": text, "logprobs": []}
        yield {"type": "response.output_text.done", **position, "text": text, "logprobs": []}
        yield {"type": "response.content_part.done", **position, "part": part}
    else:
        arguments = item["arguments"]
        yield {
            "type": "response.function_call_arguments.delta",
            **position,
            "delta": arguments,
        }
        yield {
            "type": "response.function_call_arguments.done",
            **position,
            "arguments": arguments,
            "name": item["name"],
        }
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("name", "description", "parameters")
    return {key: tool[key] for key in keys if tool.get(key) is not None}


def _messages(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Items as chat messages.

    Consecutive calls, and a text before them, are one message of the assistant.
    """
    messages: list[dict[str, Any]] = []
    for item in items:
        match item.get("type", "message"):
            case "message":
                content = _content(item.get("content"))
                messages.append({"role": item.get("role"), "content": content})
            case "function_call":
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant"})
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                output = item.get("output")
                messages.append(
                    {
                        "role": "tool",
                        "tool_call_id": item.get("call_id"),
                        "content": output if isinstance(output, str) else _content(output),
                    }
                )
            case "reasoning":
                continue
            case other:
                raise DataFailure(
                    "input", f"items of type {json.dumps(other)[:64]} are not supported"
                )
    return messages


def _content(content: Any) -> Any:
    """The parts of a message; a single text is a plain text, as the chat completion had it."""
    if not isinstance(content, list):
        return content
    parts = [_part(part) for part in content]
    if len(parts) == 1 and parts[0]["type"] == "text":
        return parts[0]["text"]
    return parts


def _part(part: Any) -> dict[str, Any]:
    kind = _PARTS.get(str(part.get("type"))) if isinstance(part, Mapping) else None
    if kind is None:
        raise DataFailure("input", f"a part of type {json.dumps(part)[:64]} is not supported")
    if kind == "text":
        return {"type": kind, "text": part.get("text")}
    return {"type": kind, kind: {"url": part.get("image_url")}}
