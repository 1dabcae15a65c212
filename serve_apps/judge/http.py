"""The judge's HTTP interface: its routes. The key, sizes and errors are those of serve_apps/web.py."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from rayloop.judge.api import JudgeBody, JudgeResponse, JudgeVersion, items_of
from rayloop.serve_apps.judge.service import JudgeService
from rayloop.serve_apps.web import KEY, RETRY_AFTER, Guard, Health, ImagePart, TextPart, add_errors, documented, problem


class Readiness(BaseModel):
    """``failing``: condition (model, canary, queue) -> why."""

    ready: bool
    failing: dict[str, str]


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "user", "assistant"]
    content: str | list[Annotated[TextPart | ImagePart, Field(discriminator="type")]]


class ChatRequest(BaseModel):
    """The part of OpenAI's request that is passed on. Other keys are refused, so that none is ignored in silence."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    model: str = Field("judge", max_length=256)
    """Ignored: there is one."""
    messages: list[ChatMessage] = Field(min_length=1, max_length=64)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    seed: int | None = Field(None, ge=0, lt=2**63)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: dict[str, Any] | None = None
    n: Literal[1] | None = None
    stream: Literal[False] | None = None


def web(service: JudgeService, key: str) -> FastAPI:
    """The application. ``key`` "" admits everybody."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    app = FastAPI(title="rayloop judge", version=service.version.version, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, key=key, limits=service.settings.limits, who="the judge")
    add_errors(app)
    _add_states(app, service)
    _add_questions(app, service)
    return app


def _add_questions(app: FastAPI, service: JudgeService) -> None:
    limits = service.settings.limits

    @app.post("/v1/judge", responses=documented(400, 401, 403, 408, 413, 422, 503), dependencies=KEY)
    async def judge(body: JudgeBody) -> JudgeResponse:
        items = items_of(body)
        if len(items) > limits.items:
            raise HTTPException(422, f"{len(items)} items, {limits.items} are allowed in one request")
        return JudgeResponse(results=tuple(await service.judge(items)))

    @app.post(
        "/v1/chat/completions", responses=documented(400, 401, 403, 404, 408, 413, 422, 429, 503), dependencies=KEY,
        response_model=dict[str, Any],
    )  # fmt: skip
    async def chat(body: ChatRequest) -> Response:
        if service.chat is None:
            return problem(404, "no_model", f"the backend {service.backend.label} has no language model; POST /v1/judge works")
        wanted = body.model_dump(exclude_none=True) | {"model": service.chat.name}
        asked = wanted.get("max_completion_tokens") or wanted.get("max_tokens") or limits.chat_tokens
        tokens = {"max_tokens": min(asked, limits.chat_tokens)}
        wanted.pop("max_completion_tokens", None)
        status, answer, retry_after = await service.complete(service.chat, wanted | tokens)
        if status in (200, 400, 422, 429):
            headers = {"Retry-After": retry_after or str(RETRY_AFTER)} if status == 429 else None
            return Response(json.dumps(answer), status, headers, media_type="application/json")
        return problem(503, "model_failed", f"the model's server answered {status}")


def _add_states(app: FastAPI, service: JudgeService) -> None:
    @app.get("/healthz")
    async def healthz() -> Health:
        return Health()

    not_ready: dict[int | str, dict[str, Any]] = {503: {"model": Readiness, "description": "Says which condition fails."}}

    @app.get("/readyz", responses=documented(401, 403) | not_ready, response_model=Readiness, dependencies=KEY)
    async def readyz(response: Response) -> Readiness:
        failing = service.failing()
        response.status_code = 503 if failing else 200
        return Readiness(ready=not failing, failing=failing)

    @app.get("/metrics", responses=documented(401, 403), response_class=Response, dependencies=KEY)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version", responses=documented(401, 403), dependencies=KEY)
    async def version() -> JudgeVersion:
        return service.version
