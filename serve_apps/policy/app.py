"""The policy of a live run on Ray Serve, for ``python -m rayloop policy serve`` (docs/policy_endpoint.md)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from ray.serve import Application

from rayloop.core.failures import OverLongPrompt
from rayloop.judge.discovery import read_key
from rayloop.serve_apps.policy.api import ChatRequest
from rayloop.serve_apps.policy.engines import Engines
from rayloop.serve_apps.policy.service import PolicyService
from rayloop.serve_apps.settings import PolicyEndpointSettings
from rayloop.serve_apps.web import KEY, application, deployed, documented, problem


class PolicyReplica:
    """The only replica: it remembers conversations, which a second one would not know."""

    def __init__(self, settings: PolicyEndpointSettings) -> None:
        self._service = PolicyService(settings, Engines(settings.namespace))
        self._key = read_key(settings.key_file or "")

    def __serve_build_asgi_app__(self) -> Any:
        return web(self._service, self._key)


def app(settings: PolicyEndpointSettings) -> Application:
    """The application that Ray Serve runs. Raises ConfigError without a key."""
    return deployed(
        "Policy", PolicyReplica, settings, what="the policy endpoint", ray_actor_options={"num_cpus": 0}, num_replicas=1,
        max_ongoing_requests=2 * settings.limits.held, graceful_shutdown_timeout_s=5,
    )  # fmt: skip


ONCE = ("prompt_token_ids", "rayloop")
"""Keys of the answer that only the first chunk has. Keys of vLLM are where vLLM's stream has them."""


def web(service: PolicyService, key: str) -> FastAPI:
    """The application. ``key`` "" admits everybody."""
    run = service.settings.run
    app = application("rayloop policy", service, key, service.settings.limits, "the policy endpoint", invalid=400)

    def unknown(name: str) -> Response:
        return problem(404, "model_not_found", f"there is no model {name[:64]!r} here; the run's is {run!r}")

    @app.get("/v1/models", responses=documented(401, 403), dependencies=KEY)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.model()]}

    @app.get("/v1/models/{name}", responses=documented(401, 403, 404), dependencies=KEY, response_model=dict[str, Any])
    async def model(name: str) -> Any:
        return service.model() if name == run else unknown(name)

    @app.exception_handler(OverLongPrompt)
    async def too_long(request: Request, error: OverLongPrompt) -> Response:
        return problem(400, "context_length_exceeded", str(error))

    @app.post(
        "/v1/chat/completions", responses=documented(400, 401, 403, 404, 408, 413, 503), dependencies=KEY,
        response_model=dict[str, Any],
    )  # fmt: skip
    async def chat(body: ChatRequest) -> Any:
        if body.model != run:
            return unknown(body.model)
        answer = await service.chat(body)
        if not body.stream:
            return answer
        usage = body.stream_options is not None and body.stream_options.include_usage
        events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in _chunks(answer, usage)) + "data: [DONE]\n\n"
        return Response(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    @app.get(
        "/v1/traces/{name}/{choice}", responses=documented(400, 401, 403, 404), dependencies=KEY, response_model=dict[str, Any]
    )
    async def trace(name: str, choice: int) -> Any:
        answer = f"{name}/{choice}"
        return service.trace(answer) or problem(404, "not_found", f"the answer {answer} is not known (any more)")

    return app


def _chunks(answer: Mapping[str, Any], usage: bool) -> Iterator[dict[str, Any]]:
    """A whole answer as OpenAI's chunks: two for each choice, its message and why it ended; with ``usage`` one more at the end."""
    common = {key: value for key, value in answer.items() if key not in ("choices", "usage", *ONCE)}
    common |= {"object": "chat.completion.chunk"} | ({"usage": None} if usage else {})
    once = {key: answer[key] for key in ONCE if key in answer}
    for choice in answer["choices"]:
        message = {key: value for key, value in choice["message"].items() if value is not None}
        if "tool_calls" in message:
            message["tool_calls"] = [{"index": at, **call} for at, call in enumerate(message["tool_calls"])]
        begin = {key: choice[key] for key in ("index", "logprobs", "token_ids", "weight_version") if key in choice}
        yield {**common, **once, "choices": [{**begin, "delta": message, "finish_reason": None}]}
        once = {}
        end = {key: choice[key] for key in ("index", "finish_reason", "stop_reason", "weight_version")}
        yield {**common, "choices": [{**end, "delta": {}, "logprobs": None}]}
    if usage:
        yield {**common, "choices": [], "usage": answer["usage"]}
