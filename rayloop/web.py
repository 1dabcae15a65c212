"""The HTTP code that all applications share.

It has the key, sizes, health routes, parts of a message, and one form of error (OpenAI's).
"""

import asyncio
import hmac
import json
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from importlib.metadata import version
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayloop.core.failures import DataFailure, DeadlineExceeded, InfrastructureFailure

logger = logging.getLogger(__name__)

OPEN = ("/healthz", "/openapi.json")
"""Paths that need no key: whether the process lives, and the OpenAPI document."""
RETRY_AFTER_S = 1
"""Seconds that a client should wait after a 503."""
_LATENCY_BUCKETS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
    120,
)


class BodyLimits(Protocol):
    """The largest size of a request's body, and the seconds in which it must arrive."""

    @property
    def bytes(self) -> int: ...  # noqa: D102

    @property
    def body_seconds(self) -> float: ...  # noqa: D102


class Service(Protocol):
    """The part of an application behind its routes."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """A context that begins before the first request and ends after the last one."""

    def failing(self) -> dict[str, str]:
        """Each condition that fails, and why; empty when the replica is ready.

        It must return at once.
        """

    def scrape(self) -> bytes:
        """The metrics in Prometheus' text format."""


class Problem(BaseModel):
    """One error in OpenAI's form."""

    message: str
    type: str
    code: str


class ErrorBody(BaseModel):
    """The body of every error."""

    error: Problem


class Health(BaseModel):
    """The body of ``GET /healthz``."""

    status: Literal["alive"] = "alive"


class Readiness(BaseModel):
    """The body of ``GET /readyz``; ``failing`` has each condition that fails, and why."""

    ready: bool
    failing: dict[str, str]


class TextPart(BaseModel):
    """A text in a message.

    Further keys of a part, which clients of several providers add, are ignored.
    """

    type: Literal["text"]
    text: str


class ImageData(BaseModel):
    """An image as a ``data:`` URL; nothing is fetched.

    OpenAI's ``detail`` is ignored: the model has its own image limits.
    """

    url: str = Field(pattern=r"^data:image/(png|jpeg|webp);base64,[A-Za-z0-9+/=]+$")


class ImagePart(BaseModel):
    """An image in a message."""

    type: Literal["image_url"]
    image_url: ImageData


Key = str | Callable[[bytes], bool]
"""The key that clients must show ("" admits all), or a function that admits a key."""


class Guard:
    """Middleware that checks the key, the body's size and its time.

    It answers an unexpected exception with a 503. It reads a body before the application is called,
    and never for an open path: a client without a key cannot occupy a replica.
    """

    def __init__(self, app: ASGIApp, key: Key, limits: BodyLimits, who: str) -> None:
        """``who`` names the application in errors ("the judge")."""
        self._app = app
        self._limits = limits
        self._who = who
        self._key = key
        self._needs_no_key = key == ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        refusal = self._refusal(scope)
        if refusal is not None:
            return await refusal(scope, receive, send)
        body = b"" if scope["path"] in OPEN else await self._body(receive)
        if isinstance(body, Response):
            return await body(scope, receive, send)
        if body is not None:
            await self._run_application(scope, body, receive, send)

    async def _run_application(
        self, scope: Scope, body: bytes, receive: Receive, send: Send
    ) -> None:
        """Answer by the application, or with a 503 when it raises."""
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        has_started = False

        async def replay() -> Message:
            # After the body comes only the client's disconnect, which Starlette waits for.
            return messages.pop() if messages else await receive()

        async def send_and_note(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, replay, send_and_note)
        except Exception as error:
            # The status is sent already, and a second answer would become part of the first's body.
            if has_started:
                raise
            logger.exception("%s %s failed", scope["method"], scope["path"])
            answer = problem(503, "failed", f"{self._who} failed: {type(error).__name__}")
            await answer(scope, receive, send)

    async def _body(self, receive: Receive) -> bytes | Response | None:
        """The complete body, or the answer to a body that is too large or too slow.

        None when the client has disconnected.
        """
        chunks = []
        size = 0
        more = True
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    chunk = message.get("body", b"")
                    chunks.append(chunk)
                    size += len(chunk)
                    more = message.get("more_body", False)
                    if size > self._limits.bytes:
                        return problem(
                            413, "too_large", f"the body has more than {self._limits.bytes} bytes"
                        )
        except TimeoutError:
            return problem(
                408, "too_slow", f"the body did not arrive within {self._limits.body_seconds:g} s"
            )
        return b"".join(chunks)

    def _admits(self, token: bytes) -> bool:
        if callable(self._key):
            return self._key(token)
        # In constant time: a comparison that ends early would reveal how much of a guess is right.
        return hmac.compare_digest(token, self._key.encode())

    def _refusal(self, scope: Scope) -> Response | None:
        """The answer to a request that must not reach the application, else None."""
        if self._needs_no_key and not addressed(scope):
            return problem(
                421,
                "wrong_host",
                f"without a key {self._who} answers to its address or localhost only",
            )
        if self._needs_no_key or scope["path"] in OPEN:
            return None
        token = bearer(scope)
        if not token:
            answer = problem(401, "no_key", f"show {self._who}'s key: Authorization: Bearer ...")
            answer.headers["WWW-Authenticate"] = "Bearer"
            return answer
        if not self._admits(token):
            return problem(403, "wrong_key", f"this is not {self._who}'s key")
        return None


def addressed(scope: Scope) -> bool:
    """Whether a request names its server by an address or as localhost.

    A page of another site can let its own name resolve to this machine (DNS rebinding), and could
    then read everything that needs no key.
    """
    header = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
    with suppress(ValueError):
        host = urlsplit("//" + header).hostname
        return host == "localhost" or bool(ip_address(host or ""))
    return False


def with_token(url: str, token: str, file: Callable[[], Path]) -> str:
    """The address to print, with its token on a terminal.

    Other outputs are kept in files that others may read, so they get the path of the ``file`` that
    has the token, which is made then.
    """
    if not token:
        return url
    if sys.stdout.isatty():
        return f"{url}?token={token}"
    return f"{url} (its ?token= is in {file()})"


def bearer(scope: Scope) -> bytes:
    """The key that a request shows; b"" for none."""
    scheme, _, token = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def problem(status: int, code: str, message: str) -> Response:
    """An error as ``ErrorBody``, in ASCII, so that no text of a request can make it fail."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = json.dumps({"error": {"message": message, "type": kind, "code": code}})
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else None
    return Response(body, status, headers, media_type="application/json")


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The meaning of these statuses, for the OpenAPI document."""
    meanings = {
        400: "The body is not JSON, or not what is expected.",
        401: "No key was shown.",
        403: "The key is wrong.",
        413: "The body is too large.",
        404: "There is no such model.",
        408: "The body came too slowly.",
        422: "The body is not what is expected.",
        429: "The model's server is full.",
        503: "Overloaded, too slow, or the model is lost: try again after Retry-After seconds.",
    }
    return {status: {"model": ErrorBody, "description": meanings[status]} for status in statuses}


KEY = [Depends(HTTPBearer(auto_error=False))]
"""Shows in the OpenAPI document that a route needs the key, which Guard checks."""


def application(
    title: str, service: Service, key: Key, limits: BodyLimits, who: str, invalid: int = 422
) -> FastAPI:
    """An application with Guard, errors and the routes for health and metrics."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    app = FastAPI(
        title=title, version=version("rayloop"), lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.add_middleware(Guard, key=key, limits=limits, who=who)

    async def failed(request: Request, error: Exception) -> Response:
        return _answer(error, invalid)

    for kind in (RequestValidationError, HTTPException, DataFailure, InfrastructureFailure):
        app.add_exception_handler(kind, failed)
    not_ready: dict[int | str, dict[str, Any]] = {
        503: {"model": Readiness, "description": "Names the condition that fails."}
    }

    @app.get("/healthz")
    async def healthz() -> Health:
        return Health()

    @app.get(
        "/readyz",
        responses=documented(401, 403) | not_ready,
        response_model=Readiness,
        dependencies=KEY,
    )
    async def readyz(response: Response) -> Readiness:
        failing = service.failing()
        response.status_code = 503 if failing else 200
        return Readiness(ready=not failing, failing=failing)

    @app.get("/metrics", responses=documented(401, 403), response_class=Response, dependencies=KEY)
    async def metrics() -> Response:
        return Response(service.scrape(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


def _answer(error: Exception, invalid: int) -> Response:
    """The answer to an exception of a route; ``invalid`` is the status of a malformed request."""
    match error:
        case RequestValidationError():
            return problem(invalid, "invalid", _validation_message(error))
        case HTTPException():
            answer = problem(error.status_code, "refused", str(error.detail))
            answer.headers.update(error.headers or {})
            return answer
        case DataFailure():
            return problem(invalid, "invalid", str(error))
    code = "timeout" if isinstance(error, DeadlineExceeded) else "unavailable"
    return problem(503, code, f"{type(error).__name__}: {error}")


def _validation_message(error: RequestValidationError) -> str:
    """The first problems of a request, each with its place."""
    problems = []
    for detail in error.errors()[:5]:
        place = ".".join(map(str, detail["loc"]))
        problems.append(f"{place}: {detail['msg']}")
    return "; ".join(problems)


class Overloaded(InfrastructureFailure):
    """The replica holds as much as ``limits.held`` allows."""


class RequestMetrics:
    """The metrics of one replica, which holds at most ``limit`` of ``held`` ("items").

    ``prefix`` ("judge") begins every name, ``owner`` are labels of every series.
    """

    def __init__(self, prefix: str, owner: Mapping[str, str], held: str, limit: int) -> None:
        self.registry = CollectorRegistry()
        self._prefix = prefix
        self._owner = owner
        self._unit = held
        self._limit = limit
        self._held = 0
        self._requests = self.made(
            Counter, "requests", "Requests by how they ended.", "route", "outcome"
        )
        self._latency = self.made(
            Histogram,
            "latency_seconds",
            "From the parsed request to the answer.",
            "route",
            buckets=_LATENCY_BUCKETS_S,
        )
        self._in_flight = self.one(Gauge, "inflight", "Requests being answered.")
        self._queue = self.one(
            Gauge, "queue", f"{held.capitalize()} that are being answered or wait."
        )

    @contextmanager
    def request(self, route: str) -> Iterator[None]:
        """Count a request and its time; an exception's name is its outcome."""
        outcome = "ok"
        with (
            self._in_flight.track_inprogress(),
            self._latency.labels(**self._owner, route=route).time(),
        ):
            try:
                yield
            except BaseException as error:
                outcome = type(error).__name__
                raise
            finally:
                self._requests.labels(**self._owner, route=route, outcome=outcome).inc()

    @contextmanager
    def holding(self, count: int) -> Iterator[None]:
        """Hold the work of one request while the block runs.

        Raises Overloaded when it does not fit together with other work.
        """
        # A request alone is always admitted: a large one could never be answered otherwise.
        if self._held and self._held + count > self._limit:
            raise Overloaded(f"{self._held} {self._unit} are held, limits.held is {self._limit}")
        self._add(count)
        try:
            yield
        finally:
            self._add(-count)

    def full(self) -> str:
        """Why no more work is accepted; "" while it is."""
        if self._held < self._limit:
            return ""
        return f"{self._held} {self._unit} are held, the limit is {self._limit}"

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def made(self, kind: type[Any], name: str, about: str, *labels: str, **options: Any) -> Any:
        """Register a metric with the owner's labels and ``labels``."""
        return kind(
            f"{self._prefix}_{name}",
            about,
            [*self._owner, *labels],
            registry=self.registry,
            **options,
        )

    def one(self, kind: type[Any], name: str, about: str) -> Any:
        """Register a metric with the owner's labels only."""
        return self.made(kind, name, about).labels(**self._owner)

    def _add(self, count: int) -> None:
        self._held += count
        self._queue.set(self._held)
