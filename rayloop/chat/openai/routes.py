"""The routes of a policy: OpenAI's chat completions and responses, its models, and traces."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from fastapi import FastAPI, Request, Response

from rayloop.chat.openai.answers import Chats
from rayloop.chat.openai.api import ChatMessage, ChatRequest
from rayloop.chat.openai.responses import ResponsesRequest, chat_of, events, response_of
from rayloop.core.failures import OverLongPrompt
from rayloop.web import KEY, documented, problem


class AnswersChats(Protocol):
    """An object that answers the chats of a client."""

    chats: Chats

    def model(self) -> dict[str, Any]:
        """The entry of ``/v1/models``."""

    async def chat(self, asked: ChatRequest) -> dict[str, Any]:
        """A chat completion. Raises DataFailure, OverLongPrompt, InfrastructureFailure."""


_FIRST_CHUNK_KEYS = ("prompt_token_ids", "rayloop")
"""Keys of the answer that only the first chunk has.

Keys of vLLM are where vLLM's stream has them.
"""
_STATUSES = documented(400, 401, 403, 404, 408, 413, 503)


def add_routes(app: FastAPI, find: Callable[[Request], AnswersChats]) -> None:
    """Add all routes of a policy.

    ``find`` returns the object that answers the client of a request, whose key was admitted.
    """

    @app.exception_handler(OverLongPrompt)
    async def too_long(request: Request, error: OverLongPrompt) -> Response:
        return problem(400, "context_length_exceeded", str(error))

    _add_models(app, find)
    _add_chat_completions(app, find)
    _add_responses(app, find)
    _add_traces(app, find)


def _add_models(app: FastAPI, find: Callable[[Request], AnswersChats]) -> None:
    @app.get("/v1/models", responses=documented(401, 403), dependencies=KEY)
    async def models(request: Request) -> dict[str, Any]:
        return {"object": "list", "data": [find(request).model()]}

    @app.get(
        "/v1/models/{name}",
        responses=documented(401, 403, 404),
        dependencies=KEY,
        response_model=dict[str, Any],
    )
    async def model(request: Request, name: str) -> Any:
        entry = find(request).model()
        return entry if name == entry["id"] else _unknown_model(name, entry["id"])


def _add_chat_completions(app: FastAPI, find: Callable[[Request], AnswersChats]) -> None:
    @app.post(
        "/v1/chat/completions", responses=_STATUSES, dependencies=KEY, response_model=dict[str, Any]
    )
    async def chat(request: Request, body: ChatRequest) -> Any:
        policy = find(request)
        if body.model != policy.chats.name:
            return _unknown_model(body.model, policy.chats.name)
        answer = await policy.chat(body)
        if not body.stream:
            return Response(json.dumps(answer), media_type="application/json")
        usage = body.stream_options is not None and body.stream_options.include_usage
        stream = [f"data: {json.dumps(chunk)}" for chunk in _chunks(answer, usage)]
        return _stream([*stream, "data: [DONE]"])


def _add_responses(app: FastAPI, find: Callable[[Request], AnswersChats]) -> None:
    @app.post("/v1/responses", responses=_STATUSES, dependencies=KEY, response_model=dict[str, Any])
    async def responses(request: Request, body: ResponsesRequest) -> Any:
        policy = find(request)
        if body.model != policy.chats.name:
            return _unknown_model(body.model, policy.chats.name)
        earlier_messages: tuple[ChatMessage, ...] | None = ()
        if body.previous_response_id is not None:
            earlier_messages = policy.chats.responses.get(body.previous_response_id)
        if earlier_messages is None:
            return problem(
                404,
                "not_found",
                f"the response {str(body.previous_response_id)[:64]!r} is not known (any more)",
            )
        chat_request = chat_of(body, earlier_messages)
        answer = await policy.chat(chat_request)
        response = response_of(answer, body)
        message = ChatMessage.model_validate(_without_nulls(answer["choices"][0]["message"]))
        policy.chats.responses.put(response["id"], (*chat_request.messages, message))
        if not body.stream:
            return Response(json.dumps(response), media_type="application/json")
        return _stream(
            f"event: {event['type']}\ndata: {json.dumps(event)}" for event in events(response)
        )


def _add_traces(app: FastAPI, find: Callable[[Request], AnswersChats]) -> None:
    @app.get(
        "/v1/traces/{name}/{choice}",
        responses=documented(400, 401, 403, 404),
        dependencies=KEY,
        response_model=dict[str, Any],
    )
    async def trace(request: Request, name: str, choice: int) -> Any:
        answer = f"{name}/{choice}"
        trace_json = find(request).chats.trace(answer)
        if not trace_json:
            return problem(404, "not_found", f"the answer {answer} is not known (any more)")
        return trace_json


def _unknown_model(name: str, run_model: str) -> Response:
    return problem(
        404, "model_not_found", f"unknown model {name[:64]!r}; the run's is {run_model!r}"
    )


def _without_nulls(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if value is not None}


def _stream(events: Iterable[str]) -> Response:
    text = "".join(f"{event}\n\n" for event in events)
    return Response(text, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def _chunks(answer: Mapping[str, Any], usage: bool) -> Iterator[dict[str, Any]]:
    """A complete answer as OpenAI's chunks.

    Each choice has two, its message and the reason of its end; with ``usage`` one more follows.
    """
    not_in_every_chunk = ("choices", "usage", *_FIRST_CHUNK_KEYS)
    common = {key: value for key, value in answer.items() if key not in not_in_every_chunk}
    common["object"] = "chat.completion.chunk"
    if usage:
        common["usage"] = None
    first_only = {key: answer[key] for key in _FIRST_CHUNK_KEYS if key in answer}
    start_keys = ("index", "logprobs", "token_ids", "weight_version")
    end_keys = ("index", "finish_reason", "stop_reason", "weight_version")
    for choice in answer["choices"]:
        message = _without_nulls(choice["message"])
        if "tool_calls" in message:
            message["tool_calls"] = [
                {"index": index, **call} for index, call in enumerate(message["tool_calls"])
            ]
        start = {key: choice[key] for key in start_keys if key in choice}
        start |= {"delta": message, "finish_reason": None}
        yield {**common, **first_only, "choices": [start]}
        first_only = {}
        end = {key: choice[key] for key in end_keys}
        yield {**common, "choices": [{**end, "delta": {}, "logprobs": None}]}
    if usage:
        yield {**common, "choices": [], "usage": answer["usage"]}
