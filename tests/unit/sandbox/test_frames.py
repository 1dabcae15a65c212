"""Messages between a process and its child, in the hands of a sender who means harm."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from rayloop.sandbox import frames

BOUNDS = frames.Bounds(header=200, blobs=2, size=100)


class Dripping:
    """A connection on which never more than two bytes are there."""

    def __init__(self, content: bytes) -> None:
        self.content, self.at = content, 0

    def recv(self, size: int) -> bytes:
        self.at += min(size, 2)
        return self.content[self.at - min(size, 2) : self.at]


def test_an_answer_takes_no_more_memory_when_it_comes_in_small_parts() -> None:
    size = 1 << 18
    connection = Dripping(written({"blobs": [size]}) + bytes(size))
    tracemalloc.start()
    try:
        _, (blob,) = frames.receive(connection, None, frames.MOST_ANSWERED)  # type: ignore[arg-type]
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert blob == bytes(size)
    assert most < 3 * size


def written(header: Any) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack(">I", len(text)) + text


@pytest.fixture
def ends() -> Iterator[tuple[frames.Channel, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield frames.Channel(ours, BOUNDS), theirs


def test_calls_are_answered_and_what_a_handler_raises_is_a_refusal(
    ends: tuple[frames.Channel, socket.socket],
) -> None:
    channel, theirs = ends

    def handler(header: frames.Header, blobs: list[bytes]) -> tuple[frames.Header, list[bytes]]:
        return {"twice": 2 * frames.arguments(header)["number"]}, [blob[::-1] for blob in blobs]

    threading.Thread(
        target=frames.Channel(theirs, BOUNDS).serve, args=(handler,), daemon=True
    ).start()
    header, blobs = channel.ask("double", 5.0, [b"ab", b""], number=4)
    assert (header["twice"], blobs) == (8, [b"ba", b""])
    with pytest.raises(frames.Refused, match="KeyError: 'number'"):
        channel.ask("double", 5.0)
    assert channel.ask("double", 5.0, number=1)[0]["twice"] == 2, (
        "the channel is of use after a refusal"
    )


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"call": 1, "blobs": [1, 1, 1]}, "more than 2 blobs"),
        ({"call": 1, "blobs": [101]}, "100 bytes of them"),
        ({"call": 1, "blobs": [-1]}, "more than"),
        ({"call": 1, "blobs": [True]}, "more than"),
        ({"call": 1}, "no header: KeyError"),
        ({"call": 1, "blobs": [], "refused": 5}, "a refusal that is not two texts"),
        ({"call": 1, "blobs": [], "refused": ["x", [1]]}, "a refusal that is not two texts"),
        ([], "no header: TypeError"),
        ({"call": 2, "blobs": []}, "the answer of another call to call 1"),
        ({"call": 1, "blobs": [], "text": "x" * 200}, "a header of 2.. bytes"),
    ],
)
def test_an_answer_beyond_the_bounds_is_refused_unread(
    ends: tuple[frames.Channel, socket.socket], answer: Any, why: str
) -> None:
    channel, theirs = ends
    theirs.sendall(written(answer))
    with pytest.raises(frames.Malformed, match=why):
        channel.ask("run", 5.0)


def test_a_call_ends_at_its_deadline_and_at_the_connections_end(
    ends: tuple[frames.Channel, socket.socket],
) -> None:
    channel, theirs = ends
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.2 seconds"):
        channel.ask("run", 0.2)
    assert time.monotonic() - began < 5
    threading.Timer(0.2, channel.close).start()
    with pytest.raises(ConnectionError):
        channel.ask("run", 30.0)
    assert theirs.recv(1 << 16)
