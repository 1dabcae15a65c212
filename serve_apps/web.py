"""What the HTTP of all applications has in common: the key, sizes, parts of a message, and one form of error (OpenAI's)."""

from __future__ import annotations

import asyncio
import hmac
import inspect
import json
import logging
from typing import Any, Literal, Protocol

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayloop.core.failures import DataFailure, DeadlineExceeded, InfrastructureFailure

logger = logging.getLogger(__name__)

OPEN = ("/healthz", "/openapi.json")
"""What is answered without a key: that the process lives, and what it could be asked."""
RETRY_AFTER = 1
"""Seconds that a client should wait after a 503."""


class BodyLimits(Protocol):
    """Of one request's body: its ``bytes``, and the seconds within which it must be there."""

    @property
    def bytes(self) -> int: ...
    @property
    def body_seconds(self) -> float: ...


class Problem(BaseModel):
    message: str
    type: str
    code: str


class ErrorBody(BaseModel):
    """Every error's body."""

    error: Problem


class Health(BaseModel):
    status: Literal["alive"] = "alive"


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


class Guard:
    """In front of everything: the key, the body's size and time, and one form of error for what nobody foresaw.

    A body is read before the application is called, and never for an open path: without a key nobody can occupy a replica.
    """

    def __init__(self, app: ASGIApp, key: str, limits: BodyLimits, who: str) -> None:
        """``key`` "" admits everybody; ``who`` is what errors call the application ("the judge")."""
        self._app, self._key, self._limits, self._who = app, key.encode(), limits, who

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
            await problem(503, "failed", f"{self._who} failed: {type(error).__name__}")(scope, receive, send)

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
            answer = problem(401, "no_key", f"show {self._who}'s key: Authorization: Bearer ...")
            answer.headers["WWW-Authenticate"] = "Bearer"
            return answer
        if not hmac.compare_digest(token.strip(), self._key):
            return problem(403, "wrong_key", f"this is not {self._who}'s key")
        return None


def problem(status: int, code: str, message: str) -> Response:
    """An error as ``ErrorBody``. In ASCII, so that no text of a request can make it fail."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = json.dumps({"error": {"message": message, "type": kind, "code": code}})
    headers = {"Retry-After": str(RETRY_AFTER)} if status == 503 else None
    return Response(body, status, headers, media_type="application/json")


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For the OpenAPI document: what these statuses mean."""
    meanings = {
        400: "The body is no JSON, or not what is expected.", 401: "No key was shown.", 403: "The key is wrong.",
        413: "The body is too large.",
        404: "There is no such model.", 408: "The body came too slowly.", 422: "The body is not what is expected.",
        429: "The model's server is full.",
        503: "Overloaded, too slow, or the model is gone: try again after Retry-After seconds.",
    }  # fmt: skip
    return {status: {"model": ErrorBody, "description": meanings[status]} for status in statuses}


KEY = [Depends(HTTPBearer(auto_error=False))]
"""Says in the OpenAPI document what Guard enforces."""


def add_errors(app: FastAPI, invalid: int = 422) -> None:
    """Answers for what routes raise; ``invalid`` is the status of a request that is not what is expected."""

    @app.exception_handler(RequestValidationError)
    async def refused(request: Request, error: RequestValidationError) -> Response:
        found = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5])
        return problem(invalid, "invalid", found)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        answer = problem(error.status_code, "refused", str(error.detail))
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(DataFailure)
    async def data(request: Request, error: DataFailure) -> Response:
        return problem(invalid, "invalid", str(error))

    @app.exception_handler(InfrastructureFailure)
    async def unavailable(request: Request, error: InfrastructureFailure) -> Response:
        code = "timeout" if isinstance(error, DeadlineExceeded) else "unavailable"
        return problem(503, code, f"{type(error).__name__}: {error}")


def backpressure() -> dict[str, Any]:
    """Serve's own 503, beyond ``queued``, says when to come back like ours; before Ray 2.60 it cannot."""
    known = "backpressure_config" in inspect.signature(serve.deployment).parameters
    return {"backpressure_config": {"retry_after_s": RETRY_AFTER}} if known else {}
