"""OpenAI's ``responses`` as chat completions and back: the part of it that a sampled policy can
honour.
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
        known = _IGNORED | DISTRIBUTION.keys()
        if extra := [
            key for key, value in (self.model_extra or {}).items() if value and key not in known
        ]:
            raise ValueError(f"{extra[0]} is not supported")
        return self


def chat_of(asked: ResponsesRequest, before: Sequence[ChatMessage]) -> ChatRequest:
    """The chat completion that answers it; ``before``: the messages of the response that it
    continues. Raises DataFailure.
    """
    items = (
        [{"role": "user", "content": asked.input}] if isinstance(asked.input, str) else asked.input
    )
    system = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    kept = [
        message.model_dump(exclude_none=True)
        for message in before
        if not (system and message.role == "system")
    ]
    tools = [{"type": tool.get("type"), "function": _function(tool)} for tool in asked.tools or ()]
    body: dict[str, Any] = {
        "model": asked.model,
        "messages": [*system, *kept, *_messages(items)],
        "tools": tools or None,
    }
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
        raise DataFailure(".".join(map(str, first["loc"])) or "request", first["msg"]) from error


def response_of(answer: Mapping[str, Any], asked: ResponsesRequest) -> dict[str, Any]:
    """The response that a chat completion with one choice is."""
    (choice,) = answer["choices"]
    message, usage, name = (
        choice["message"],
        answer["usage"],
        answer["id"].removeprefix("chatcmpl-"),
    )
    cut = choice["finish_reason"] == "length"
    output: list[dict[str, Any]] = []
    if message["content"] is not None:
        part = {
            "type": "output_text",
            "text": message["content"],
            "annotations": [],
            "logprobs": [],
        }
        output.append(
            {
                "type": "message",
                "id": f"msg_{name}",
                "status": "completed",
                "role": "assistant",
                "content": [part],
            }
        )
    for call in message.get("tool_calls", ()):
        output.append(
            {
                "type": "function_call",
                "id": f"fc_{call['id']}",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
                "status": "completed",
            }
        )
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": answer["created"],
        "model": answer["model"],
        "output": output,
        "status": "incomplete" if cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
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


def events(response: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A whole response as OpenAI's stream of events."""
    begun = {
        **response,
        "status": "in_progress",
        "output": [],
        "usage": None,
        "incomplete_details": None,
    }
    made: list[dict[str, Any]] = [
        {"type": f"response.{word}", "response": begun} for word in ("created", "in_progress")
    ]
    for index, item in enumerate(response["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        text = item["type"] == "message"
        empty = {
            **item,
            "status": "in_progress",
            **({"content": []} if text else {"arguments": ""}),
        }
        made.append({"type": "response.output_item.added", "output_index": index, "item": empty})
        if text:
            (part,) = item["content"]
            at["content_index"] = 0
            made.append({"type": "response.content_part.added", **at, "part": {**part, "text": ""}})
            made.append(
                {"type": "response.output_text.delta", **at, "delta": part["text"], "logprobs": []}
            )
            made.append(
                {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []}
            )
            made.append({"type": "response.content_part.done", **at, "part": part})
        else:
            made.append(
                {"type": "response.function_call_arguments.delta", **at, "delta": item["arguments"]}
            )
            done = {"arguments": item["arguments"], "name": item["name"]}
            made.append({"type": "response.function_call_arguments.done", **at, **done})
        made.append({"type": "response.output_item.done", "output_index": index, "item": item})
    made.append({"type": f"response.{response['status']}", "response": dict(response)})
    return ({**event, "sequence_number": number} for number, event in enumerate(made))


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None
    }


def _messages(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Items as chat messages: calls that follow one another, and a text before them, are one
    message of the assistant.
    """
    made: list[dict[str, Any]] = []
    for item in items:
        match item.get("type", "message"):
            case "message":
                made.append({"role": item.get("role"), "content": _content(item.get("content"))})
            case "function_call":
                if not (made and made[-1]["role"] == "assistant"):
                    made.append({"role": "assistant"})
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                made[-1].setdefault("tool_calls", []).append(
                    {"id": item.get("call_id"), "function": function}
                )
            case "function_call_output":
                output = item.get("output")
                content = output if isinstance(output, str) else _content(output)
                made.append(
                    {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
                )
            case "reasoning":
                continue
            case other:
                raise DataFailure(
                    "input", f"items of type {json.dumps(other)[:64]} are not supported"
                )
    return made


def _content(content: Any) -> Any:
    """The parts of a message: one text of an answer is a plain text, as the chat completion had it."""
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        kind = _PARTS.get(str(part.get("type"))) if isinstance(part, Mapping) else None
        if kind is None:
            raise DataFailure("input", f"a part of type {json.dumps(part)[:64]} is not supported")
        parts.append(
            {
                "type": kind,
                kind: part.get("text") if kind == "text" else {"url": part.get("image_url")},
            }
        )
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts
