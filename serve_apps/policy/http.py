"""The endpoint's HTTP interface: its routes. The key, sizes and errors are those of serve_apps/web.py."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from rayloop.core.failures import OverLongPrompt
from rayloop.serve_apps.policy.api import ChatRequest
from rayloop.serve_apps.policy.chunks import events
from rayloop.serve_apps.policy.service import PolicyService
from rayloop.serve_apps.web import KEY, Guard, Health, add_errors, documented, problem

WHO = "the policy endpoint"


class Readiness(BaseModel):
    """``failing``: condition (engines, queue) -> why."""

    ready: bool
    failing: dict[str, str]


def web(service: PolicyService, key: str) -> FastAPI:
    """The application. ``key`` "" admits everybody."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    app = FastAPI(title="rayloop policy", version=version("rayloop"), lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, key=key, limits=service.settings.limits, who=WHO)
    add_errors(app, invalid=400)
    _add_models(app, service)
    _add_chat(app, service)
    _add_states(app, service)
    return app


def _add_models(app: FastAPI, service: PolicyService) -> None:
    @app.get("/v1/models", responses=documented(401, 403), dependencies=KEY)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.model()]}

    @app.get("/v1/models/{name}", responses=documented(401, 403, 404), dependencies=KEY, response_model=dict[str, Any])
    async def model(name: str) -> Any:
        return service.model() if name == service.settings.run else _unknown(name, service)


def _add_chat(app: FastAPI, service: PolicyService) -> None:
    @app.exception_handler(OverLongPrompt)
    async def too_long(request: Request, error: OverLongPrompt) -> Response:
        return problem(400, "context_length_exceeded", str(error))

    @app.post(
        "/v1/chat/completions", responses=documented(400, 401, 403, 404, 408, 413, 503), dependencies=KEY,
        response_model=dict[str, Any],
    )  # fmt: skip
    async def chat(body: ChatRequest) -> Any:
        if body.model != service.settings.run:
            return _unknown(body.model, service)
        answer = await service.chat(body)
        if not body.stream:
            return answer
        usage = body.stream_options is not None and body.stream_options.include_usage
        return Response(events(answer, usage), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    @app.get(
        "/v1/traces/{name}/{choice}", responses=documented(400, 401, 403, 404), dependencies=KEY,
        response_model=dict[str, Any],
    )  # fmt: skip
    async def trace(name: str, choice: int) -> Any:
        """The conversation up to an answer, as ``rayloop.core.traces.Trace`` and what it was sampled with."""
        answer = f"{name}/{choice}"
        found, sampling = service.trace(answer), service.sampling_of(answer)
        if found is None or sampling is None:
            return problem(404, "not_found", f"the answer {answer} is not known (any more)")
        image_token = service.renderer.image_token
        return {**found.json(), "sampling": dataclasses.asdict(sampling), "image_token": image_token}


def _add_states(app: FastAPI, service: PolicyService) -> None:
    not_ready: dict[int | str, dict[str, Any]] = {503: {"model": Readiness, "description": "Says which condition fails."}}

    @app.get("/healthz")
    async def healthz() -> Health:
        return Health()

    @app.get("/readyz", responses=documented(401, 403) | not_ready, response_model=Readiness, dependencies=KEY)
    async def readyz(response: Response) -> Readiness:
        failing = service.failing()
        response.status_code = 503 if failing else 200
        return Readiness(ready=not failing, failing=failing)

    @app.get("/metrics", responses=documented(401, 403), response_class=Response, dependencies=KEY)
    async def metrics() -> Response:
        return Response(service.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _unknown(name: str, service: PolicyService) -> Response:
    return problem(404, "model_not_found", f"there is no model {name[:64]!r} here; the run's is {service.settings.run!r}")
