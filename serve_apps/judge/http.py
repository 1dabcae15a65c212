"""The judge's routes, beside those of serve_apps/web.py."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from rayloop.judge.api import JudgeBody, JudgeRequest, JudgeResponse, JudgeVersion
from rayloop.serve_apps.judge.service import JudgeService
from rayloop.serve_apps.web import KEY, RETRY_AFTER, ImagePart, TextPart, application, documented, problem


class CompletionMessage(BaseModel):
    """A message of a chat completion."""

    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "user", "assistant"]
    content: str | list[Annotated[TextPart | ImagePart, Field(discriminator="type")]]


class CompletionRequest(BaseModel):
    """The part of OpenAI's request that is passed on. Other keys are refused, so that none is ignored in silence."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    model: str = Field("judge", max_length=256)
    """Ignored: there is one model."""
    messages: list[CompletionMessage] = Field(min_length=1, max_length=64)
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
    limits = service.settings.limits
    app = application("rayloop judge", service, key, limits, "the judge")

    @app.get("/version", responses=documented(401, 403), dependencies=KEY)
    async def version() -> JudgeVersion:
        return service.version

    @app.post("/v1/judge", responses=documented(400, 401, 403, 408, 413, 422, 503), dependencies=KEY)
    async def judge(body: JudgeBody) -> JudgeResponse:
        items = body.items if isinstance(body, JudgeRequest) else (body,)
        if len(items) > limits.items:
            raise HTTPException(422, f"{len(items)} items, {limits.items} are allowed in one request")
        return JudgeResponse(results=tuple(await service.judge(items)))

    @app.post(
        "/v1/chat/completions", responses=documented(400, 401, 403, 404, 408, 413, 422, 429, 503), dependencies=KEY,
        response_model=dict[str, Any],
    )  # fmt: skip
    async def chat(body: CompletionRequest) -> Response:
        if service.chat is None:
            return problem(404, "no_model", f"the backend {service.grader.label} has no language model; POST /v1/judge works")
        asked = body.model_dump(exclude_none=True) | {"model": service.chat.name}
        tokens = asked.pop("max_completion_tokens", None) or asked.get("max_tokens") or limits.chat_tokens
        asked["max_tokens"] = min(tokens, limits.chat_tokens)
        status, answer, retry_after = await service.complete(service.chat, asked)
        if status in (200, 400, 422, 429):
            headers = {"Retry-After": retry_after or str(RETRY_AFTER)} if status == 429 else None
            return Response(json.dumps(answer), status, headers, media_type="application/json")
        return problem(503, "model_failed", f"the model's server answered {status}")

    return app
