"""The judge's HTTP interface: routes, the key, sizes, and one form of error (OpenAI's) for all of them."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from judge.api import JudgeBody, JudgeResponse, JudgeVersion, items_of
from rayloop.core.failures import DataFailure, DeadlineExceeded, InfrastructureFailure
from serve_apps.judge.service import JudgeService
from serve_apps.judge.settings import LimitSettings

logger = logging.getLogger(__name__)

OPEN = ("/healthz", "/openapi.json")
"""What is answered without a key: that the process lives, and what it could be asked."""
RETRY_AFTER = 1
"""Seconds that a client should wait after a 503."""


class Problem(BaseModel):
    message: str
    type: str
    code: str


class ErrorBody(BaseModel):
    """Every error's body."""

    error: Problem


class Health(BaseModel):
    status: Literal["alive"] = "alive"


class Readiness(BaseModel):
    """``failing``: condition (model, canary, queue) -> why."""

    ready: bool
    failing: dict[str, str]


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: str = Field(max_length=65_536)


class ImageData(BaseModel):
    model_config = ConfigDict(extra="forbid")
    url: str = Field(pattern=r"^data:image/(png|jpeg|webp);base64,[A-Za-z0-9+/=]+$")
    """The image itself: nothing is fetched."""


class ImagePart(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["image_url"]
    image_url: ImageData


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


class Guard:
    """In front of everything: the key, the body's size and time, and one form of error for what nobody foresaw.

    A body is read before the application is called, and never for an open path: without a key nobody can occupy a replica.
    """

    def __init__(self, app: ASGIApp, key: str, limits: LimitSettings) -> None:
        self._app, self._key, self._limits = app, key.encode(), limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if (refusal := self._refused(scope)) is not None:
            return await refusal(scope, receive, send)
        body = b"" if scope["path"] in OPEN else await self._body(receive)
        if isinstance(body, Response):
            return await body(scope, receive, send)
        if body is not None:
            await self._answered(scope, body, receive, send)

    async def _answered(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """By the application, or with a 503 when it raises."""
        waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        begun = False

        async def replay() -> Message:
            return waiting.pop() if waiting else await receive()

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, replay, watched)
        except Exception as error:
            if begun:
                raise
            logger.exception("%s %s failed", scope["method"], scope["path"])
            await problem(503, "failed", f"the judge failed: {type(error).__name__}")(scope, receive, send)

    async def _body(self, receive: Receive) -> bytes | Response | None:
        """The whole body, None when the client went away, or the answer to one that is too large or too slow."""
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                return await self._chunks(receive)
        except TimeoutError:
            return problem(408, "too_slow", f"the body was not there within {self._limits.body_seconds:g} s")

    async def _chunks(self, receive: Receive) -> bytes | Response | None:
        chunks, size, more = list[bytes](), 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            chunks.append(message.get("body", b""))
            size, more = size + len(chunks[-1]), message.get("more_body", False)
            if size > self._limits.bytes:
                return problem(413, "too_large", f"the body has more than {self._limits.bytes} bytes")
        return b"".join(chunks)

    def _refused(self, scope: Scope) -> Response | None:
        if not self._key or scope["path"] in OPEN:
            return None
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, token = given.partition(b" ")
        if scheme.lower() != b"bearer" or not token.strip():
            answer = problem(401, "no_key", "show the judge's key: Authorization: Bearer ...")
            answer.headers["WWW-Authenticate"] = "Bearer"
            return answer
        if not hmac.compare_digest(token.strip(), self._key):
            return problem(403, "wrong_key", "this is not the judge's key")
        return None


def problem(status: int, code: str, message: str) -> Response:
    """An error as ``ErrorBody``. In ASCII, so that no text of a request can make it fail."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = json.dumps({"error": {"message": message, "type": kind, "code": code}})
    headers = {"Retry-After": str(RETRY_AFTER)} if status == 503 else None
    return Response(body, status, headers, media_type="application/json")


def _documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    meanings = {
        400: "The body is no JSON.", 401: "No key was shown.", 403: "The key is wrong.", 413: "The body is too large.",
        404: "The backend has no language model.", 408: "The body came too slowly.", 422: "The body is not what is expected.",
        429: "The model's server is full.",
        503: "Overloaded, too slow, or the model is gone: try again after Retry-After seconds.",
    }  # fmt: skip
    return {status: {"model": ErrorBody, "description": meanings[status]} for status in statuses}


def web(service: JudgeService, key: str) -> FastAPI:
    """The application. ``key`` "" admits everybody."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    app = FastAPI(
        title="rayloop judge", version=service.version.version, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.add_middleware(Guard, key=key, limits=service.settings.limits)
    _add_errors(app)
    _add_states(app, service)
    _add_questions(app, service)
    return app


KEY = [Depends(HTTPBearer(auto_error=False))]
"""Says in the OpenAPI document what Guard enforces."""


def _add_questions(app: FastAPI, service: JudgeService) -> None:
    limits = service.settings.limits

    @app.post("/v1/judge", responses=_documented(400, 401, 403, 408, 413, 422, 503), dependencies=KEY)
    async def judge(body: JudgeBody) -> JudgeResponse:
        items = items_of(body)
        if len(items) > limits.items:
            raise HTTPException(422, f"{len(items)} items, {limits.items} are allowed in one request")
        return JudgeResponse(results=tuple(await service.judge(items)))

    @app.post(
        "/v1/chat/completions", responses=_documented(400, 401, 403, 404, 408, 413, 422, 429, 503), dependencies=KEY,
        response_model=dict[str, Any],
    )  # fmt: skip
    async def chat(body: ChatRequest) -> Response:
        if service.chat is None:
            return problem(
                404, "no_model", f"the backend {service.backend.label} has no language model; POST /v1/judge works"
            )
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

    not_ready: dict[int | str, dict[str, Any]] = {
        503: {"model": Readiness, "description": "Says which condition fails."}
    }

    @app.get("/readyz", responses=_documented(401, 403) | not_ready, response_model=Readiness, dependencies=KEY)
    async def readyz(response: Response) -> Readiness:
        failing = service.failing()
        response.status_code = 503 if failing else 200
        return Readiness(ready=not failing, failing=failing)

    @app.get("/metrics", responses=_documented(401, 403), response_class=Response, dependencies=KEY)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version", responses=_documented(401, 403), dependencies=KEY)
    async def version() -> JudgeVersion:
        return service.version


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def refused(request: Request, error: RequestValidationError) -> Response:
        found = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5])
        return problem(422, "invalid", found)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        answer = problem(error.status_code, "refused", str(error.detail))
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(DataFailure)
    async def data(request: Request, error: DataFailure) -> Response:
        return problem(422, "invalid", str(error))

    @app.exception_handler(InfrastructureFailure)
    async def unavailable(request: Request, error: InfrastructureFailure) -> Response:
        code = "timeout" if isinstance(error, DeadlineExceeded) else "unavailable"
        return problem(503, code, f"{type(error).__name__}: {error}")
