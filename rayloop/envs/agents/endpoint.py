"""The HTTP server, on loopback, of the agents of one process.

Each episode has its key, which opens nothing else.
"""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, ConfigDict
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayloop.chat.openai.routes import AnswersChats, add_routes
from rayloop.connections import Impatient
from rayloop.web import KEY, application, bearer, documented, problem

START_TIMEOUT_S = 30.0
"""Seconds in which the server must answer."""
NO_PAY = (
    "the key of the chats does not pay: return the reward, or set with.reward: posted and send it"
    " with reward_key"
)
KEEP_ALIVE_S = 3600
"""Seconds that a connection may rest between two requests, while the agent works."""


@dataclass(frozen=True)
class Limits:
    """Limits of a request's body."""

    bytes: int = 32 << 20
    body_seconds: float = 60.0


class RewardBody(BaseModel):
    """The body of ``POST /v1/reward``.

    ``answer`` (``<id>/<choice>``): the reward is for this answer, not for the episode.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    reward: float
    answer: str | None = None


class AgentSession(AnswersChats, Protocol):
    """The session that an agent's key opens."""

    refused: str

    def pay(self, reward: float, answer: str | None) -> str:
        """Take a reward. Returns why it is refused, "" when it is not."""


class Endpoint:
    """The server, which starts with the first episode, on the event loop that runs then."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, AgentSession] = {}
        self._paying: dict[bytes, AgentSession] = {}
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._port = 0
        self._starting = asyncio.Lock()

    @asynccontextmanager
    async def serving(self, session: AgentSession) -> AsyncIterator[dict[str, str]]:
        """Answer the holder of a new key by ``session``.

        Yields ``base_url``, ``api_key`` and ``model``, and ``reward_key``, which alone pays and
        does nothing else.
        """
        await self._start()
        chat_key = secrets.token_urlsafe(32)
        reward_key = secrets.token_urlsafe(32)
        self._sessions[chat_key.encode()] = session
        self._paying[reward_key.encode()] = session
        try:
            yield {
                "base_url": f"http://127.0.0.1:{self._port}/v1",
                "api_key": chat_key,
                "reward_key": reward_key,
                "model": session.chats.name,
            }
        finally:
            del self._sessions[chat_key.encode()]
            del self._paying[reward_key.encode()]

    def end(self) -> None:
        """Stop the server."""
        if self._server is not None:
            self._server.should_exit = True

    async def _start(self) -> None:
        async with self._starting:
            if self._serving is not None and not self._serving.done():
                return
            # asyncio turns off Nagle's delay (40 ms a call) only for sockets that name their
            # protocol.
            listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            listening.bind(("127.0.0.1", 0))
            listening.listen(2048)
            self._port = listening.getsockname()[1]
            options: dict[str, Any] = {
                "log_config": None,
                "access_log": False,
                "lifespan": "off",
                "timeout_keep_alive": KEEP_ALIVE_S,
            }
            config = uvicorn.Config(self._app(), http=Impatient, **options)
            self._server = _Server(config)
            self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
            async with asyncio.timeout(START_TIMEOUT_S):
                while not self._server.started:
                    if self._serving.done():
                        # A server that has ended never gets ``started``: this raises its error.
                        await self._serving
                    await asyncio.sleep(0.005)

    def _app(self) -> FastAPI:
        app = application(
            "rayloop agents",
            _AlwaysReady(),
            self._is_known,
            Limits(),
            "a live episode",
            invalid=400,
        )
        app.add_middleware(_Refusals, find=self._sessions.get)
        add_routes(app, self._session)

        @app.post(
            "/v1/reward",
            responses=documented(400, 401, 403),
            dependencies=KEY,
            response_model=dict[str, Any],
        )
        async def reward(request: Request, body: RewardBody) -> Any:
            session = self._paying.get(bearer(request.scope))
            if session is None:
                raise HTTPException(403, NO_PAY)
            refusal = session.pay(body.reward, body.answer)
            if refusal:
                return problem(409, "refused", refusal)
            return {"reward": body.reward}

        return app

    def _session(self, request: Request) -> AgentSession:
        session = self._sessions.get(bearer(request.scope))
        if session is None:
            raise HTTPException(403, "the key of the reward opens nothing else")
        return session

    def _is_known(self, key: bytes) -> bool:
        return key in self._sessions or key in self._paying


class _Server(uvicorn.Server):
    """A server that leaves the signals to its process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _AlwaysReady:
    """A service that is always ready and has no metrics."""

    def running(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def failing(self) -> dict[str, str]:
        return {}

    def scrape(self) -> bytes:
        return b""


class _Refusals:
    """Middleware: notes the last error that a session got."""

    def __init__(self, app: ASGIApp, find: Callable[[bytes], AgentSession | None]) -> None:
        self._app = app
        self._find = find

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        session = self._find(bearer(scope))
        if session is None:
            return await self._app(scope, receive, send)
        opened_session = session
        status = 200

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status >= 400 and message.get("body"):
                opened_session.refused = (
                    f"{status} {message['body'].decode(errors='replace')[:500]}"
                )
            await send(message)

        await self._app(scope, receive, watched)
