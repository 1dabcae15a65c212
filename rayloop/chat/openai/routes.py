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
    """What answers the chats of a client."""

    chats: Chats

    def model(self) -> dict[str, Any]:
        """The entry of ``/v1/models``."""

    async def chat(self, asked: ChatRequest) -> dict[str, Any]:
        """A chat completion. Raises DataFailure, OverLongPrompt, InfrastructureFailure."""


ONCE = ("prompt_token_ids", "rayloop")
"""Keys of the answer that only the first chunk has.

Keys of vLLM are where vLLM's stream has them.
"""


def add_routes(app: FastAPI, find: Callable[[Request], AnswersChats]) -> None:
    """``find`` returns what answers the client of a request, whose key was admitted."""

    def unknown(name: str, known: str) -> Response:
        return problem(
            404, "model_not_found", f"there is no model {name[:64]!r} here; the run's is {known!r}"
        )

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
        return entry if name == entry["id"] else unknown(name, entry["id"])

    @app.exception_handler(OverLongPrompt)
    async def too_long(request: Request, error: OverLongPrompt) -> Response:
        return problem(400, "context_length_exceeded", str(error))

    statuses = documented(400, 401, 403, 404, 408, 413, 503)

    @app.post(
        "/v1/chat/completions", responses=statuses, dependencies=KEY, response_model=dict[str, Any]
    )
    async def chat(request: Request, body: ChatRequest) -> Any:
        answers = find(request)
        if body.model != answers.chats.name:
            return unknown(body.model, answers.chats.name)
        answer = await answers.chat(body)
        if not body.stream:
            return Response(json.dumps(answer), media_type="application/json")
        usage = body.stream_options is not None and body.stream_options.include_usage
        return _stream(
            [f"data: {json.dumps(chunk)}" for chunk in _chunks(answer, usage)] + ["data: [DONE]"]
        )

    @app.post("/v1/responses", responses=statuses, dependencies=KEY, response_model=dict[str, Any])
    async def responses(request: Request, body: ResponsesRequest) -> Any:
        answers = find(request)
        if body.model != answers.chats.name:
            return unknown(body.model, answers.chats.name)
        known: tuple[ChatMessage, ...] | None = ()
        if body.previous_response_id is not None:
            known = answers.chats.responses.get(body.previous_response_id)
        if known is None:
            return problem(
                404,
                "not_found",
                f"the response {str(body.previous_response_id)[:64]!r} is not known (any more)",
            )
        asked = chat_of(body, known)
        answer = await answers.chat(asked)
        response = response_of(answer, body)
        message = {
            key: value
            for key, value in answer["choices"][0]["message"].items()
            if value is not None
        }
        answers.chats.responses.put(
            response["id"], (*asked.messages, ChatMessage.model_validate(message))
        )
        if not body.stream:
            return Response(json.dumps(response), media_type="application/json")
        return _stream(
            f"event: {event['type']}\ndata: {json.dumps(event)}" for event in events(response)
        )

    @app.get(
        "/v1/traces/{name}/{choice}",
        responses=documented(400, 401, 403, 404),
        dependencies=KEY,
        response_model=dict[str, Any],
    )
    async def trace(request: Request, name: str, choice: int) -> Any:
        answer = f"{name}/{choice}"
        known = find(request).chats.trace(answer)
        return known or problem(404, "not_found", f"the answer {answer} is not known (any more)")


def _stream(events: Iterable[str]) -> Response:
    whole = "".join(f"{event}\n\n" for event in events)
    return Response(whole, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def _chunks(answer: Mapping[str, Any], usage: bool) -> Iterator[dict[str, Any]]:
    """A whole answer as OpenAI's chunks: two for each choice, its message and why it ended; with
    ``usage`` one more at the end.
    """
    common = {key: value for key, value in answer.items() if key not in ("choices", "usage", *ONCE)}
    common |= {"object": "chat.completion.chunk"} | ({"usage": None} if usage else {})
    once = {key: answer[key] for key in ONCE if key in answer}
    for choice in answer["choices"]:
        message = {key: value for key, value in choice["message"].items() if value is not None}
        if "tool_calls" in message:
            message["tool_calls"] = [
                {"index": at, **call} for at, call in enumerate(message["tool_calls"])
            ]
        begin = {
            key: choice[key]
            for key in ("index", "logprobs", "token_ids", "weight_version")
            if key in choice
        }
        yield {**common, **once, "choices": [{**begin, "delta": message, "finish_reason": None}]}
        once = {}
        end = {
            key: choice[key] for key in ("index", "finish_reason", "stop_reason", "weight_version")
        }
        yield {**common, "choices": [{**end, "delta": {}, "logprobs": None}]}
    if usage:
        yield {**common, "choices": [], "usage": answer["usage"]}
