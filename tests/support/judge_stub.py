"""A judge on a real socket that does what a test says: right verdicts, or one of the ways to fail."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn

from rayloop.judge.rubric import load_rubrics

Send = Callable[[Mapping[str, Any]], Awaitable[None]]
RUBRICS = load_rubrics()
Reply = Callable[["JudgeStub", list[dict[str, Any]], Any, Send], Awaitable[None]]


def verdict(right: bool, fingerprint: str) -> dict[str, Any]:
    """A result as it goes over the wire."""
    word = "correct" if right else "incorrect"
    found = {
        "outcome": "scored",
        "verdict": word,
        "score": float(right),
        "fingerprint": fingerprint,
        "reason": "stub",
    }
    return {
        **found,
        "probability": None,
        "cached": False,
        "backend": "openai",
        "decided_by": "model",
    }


async def body(
    send: Send,
    status: int,
    content: bytes,
    headers: Mapping[str, str] = {},
    length: int | None = None,
) -> None:
    """An HTTP answer; ``length`` is what its header claims."""
    fields = {
        "content-type": "application/json",
        "content-length": str(len(content) if length is None else length),
        **headers,
    }
    raw = [(k.encode(), v.encode()) for k, v in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": content})


def status(code: int, **headers: str) -> Reply:
    async def reply(stub: JudgeStub, items: list[dict[str, Any]], receive: Any, send: Send) -> None:
        await body(
            send,
            code,
            b'{"detail": "asked to fail"}',
            {k.replace("_", "-"): v for k, v in headers.items()},
        )

    return reply


def content(data: bytes, length: int | None = None) -> Reply:
    async def reply(stub: JudgeStub, items: list[dict[str, Any]], receive: Any, send: Send) -> None:
        await body(send, 200, data, length=length)

    return reply


def results(**change: Any) -> Reply:
    """Verdicts with some fields changed."""

    async def reply(stub: JudgeStub, items: list[dict[str, Any]], receive: Any, send: Send) -> None:
        found = [{**verdict(True, stub.fingerprint), **change} for _ in items]
        await body(send, 200, json.dumps({"results": found}).encode())

    return reply


async def reset(stub: JudgeStub, items: list[dict[str, Any]], receive: Any, send: Send) -> None:
    """Drop the connection without an answer."""
    receive.__self__.transport.abort()


def slow(seconds: float) -> Reply:
    async def reply(stub: JudgeStub, items: list[dict[str, Any]], receive: Any, send: Send) -> None:
        await asyncio.sleep(seconds)
        await stub.judge(items, send)

    return reply


class JudgeStub:
    """Right when answer and reference are equal.

    ``script`` holds replies for the next requests, then it judges again.

    ``always`` overrides that for every request; ``requests`` are the items of each request that
    came.
    """

    def __init__(self) -> None:
        self.address = ""
        self.resets = 0
        self.reset()

    @property
    def url(self) -> str:
        """Differs after a reset: requests that were on their way before go nowhere."""
        return f"{self.address}/{self.resets}"

    def reset(self) -> None:
        """As it was at the start."""
        self.resets += 1
        self.fingerprint = "stub-1"
        self.rubrics = RUBRICS
        self.script: list[Reply] = []
        self.always: Reply | None = None
        self.requests: list[list[dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        self.seconds = 0.0
        self.busy = self.most_busy = 0

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == f"/{self.resets}/version":
            digests = {name: rubric.digest for name, rubric in self.rubrics.items()}
            about = {
                "version": "stub",
                "fingerprint": self.fingerprint,
                "backend": "openai",
                "model": "stub",
                "rubrics": digests,
            }
            return await body(send, 200, json.dumps(about).encode())
        if scope["path"] != f"/{self.resets}/v1/judge":
            return await body(send, 404, b"{}")
        data = b""
        while True:
            message = await receive()
            data += message.get("body", b"")
            if not message.get("more_body"):
                break
        items = json.loads(data)["items"]
        self.requests.append(items)
        self.headers.append({k.decode(): v.decode() for k, v in scope["headers"]})
        self.busy += 1
        self.most_busy = max(self.busy, self.most_busy)
        try:
            reply = self.script.pop(0) if self.script else self.always
            await (reply(self, items, receive, send) if reply else self.judge(items, send))
        finally:
            self.busy -= 1

    async def judge(self, items: list[dict[str, Any]], send: Send) -> None:
        await asyncio.sleep(self.seconds * len(items))
        found = [
            verdict(item["answer"].strip(".").lower() == item["reference"], self.fingerprint)
            for item in items
        ]
        await body(send, 200, json.dumps({"results": found}).encode())

    @property
    def asked(self) -> list[str]:
        """The answers that were judged, in order; canaries left out."""
        return [item["answer"] for items in self.requests for item in items if not item["fresh"]]


@contextmanager
def serving(stub: JudgeStub) -> Iterator[JudgeStub]:
    """Serve on a free port of this machine, from a thread."""
    server = uvicorn.Server(
        uvicorn.Config(stub, host="127.0.0.1", port=0, log_level="critical", lifespan="off")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert thread.is_alive(), "the stub did not start"
        assert time.monotonic() < deadline, "the stub did not start in time"
        time.sleep(0.01)
    stub.address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield stub
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)
