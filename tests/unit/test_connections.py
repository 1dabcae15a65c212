"""A real uvicorn on loopback: who begins to send headers and does not go on is not waited for."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from rayloop import connections
from tests.support.runs import eventually

WHOLE = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"
BEGUN = b"POST / HTTP/1.1\r\nHost: x\r\nX: "


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the body."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [(b"content-length", b"%d" % len(body))],
        }
    )
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(connections, "HEADERS_TIMEOUT_S", 0.5)
    protocol: Any = connections.Impatient
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, http=protocol, log_config=None, lifespan="off", timeout_keep_alive=60
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    eventually(lambda: server.started, "the server", 30)
    yield listening.getsockname()[1]
    server.should_exit = True
    thread.join(30)


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("begun", [b"", BEGUN])
def test_headers_that_do_not_come_end_the_connection(port: int, begun: bytes) -> None:
    with connected(port) as connection:
        connection.sendall(begun)
        assert closed(connection)


def test_a_body_may_take_longer_and_the_next_request_too(port: int) -> None:
    with connected(port) as connection:
        for _ in range(2):
            connection.sendall(WHOLE + b"ab")
            time.sleep(1)
            connection.sendall(b"cd")
            answer = b""
            while not answer.endswith(b"abcd"):
                answer += connection.recv(4096)
            time.sleep(1)
        connection.sendall(BEGUN)
        assert closed(connection), "a later request has as long as the first"


def test_headers_without_end_are_not_kept(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADERS_TIMEOUT_S", 60.0)
    with connected(port) as connection, pytest.raises(ConnectionError):
        connection.sendall(BEGUN + b"x" * (64 << 20))


def test_half_a_request_behind_a_whole_one_is_not_kept(port: int) -> None:
    whole = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    received = b""
    with connected(port) as connection:
        connection.sendall(whole + BEGUN)
        while chunk := connection.recv(4096):
            received += chunk
    assert received.count(b"HTTP/1.1 200") == 1
