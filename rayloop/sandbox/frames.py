"""What host and interpreter say to each other: 4 bytes of length, a JSON header, and the blobs whose sizes the header names."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

MOST_HEADER = 1 << 20
"""Bytes."""
MOST_ANSWERED = (32, 64 << 20)
"""Blobs, and bytes of all of them, that the host reads of an answer, which may be anybody's."""
MOST_GIVEN = (1 << 16, 256 << 20)
"""The same that the host gives an interpreter: a video has one blob a frame."""
_CHUNK = 1 << 20

Frame = tuple[dict[str, Any], list[bytes]]


class Malformed(ValueError):
    """What came is no frame."""


def send(connection: socket.socket, header: dict[str, Any], blobs: Sequence[bytes] = (), until: float | None = None) -> None:
    """``until``: on the monotonic clock. Raises OSError (TimeoutError among them)."""
    text = json.dumps({**header, "blobs": [len(blob) for blob in blobs]}).encode()
    _wait(connection, until)
    connection.sendall(struct.pack(">I", len(text)) + text + b"".join(blobs))


def receive(connection: socket.socket, until: float | None, most: tuple[int, int]) -> Frame:
    """The next frame. Of one with more blobs or bytes than ``most`` none is read. Raises EOFError at the connection's end,
    Malformed, OSError (TimeoutError when ``until`` has passed)."""
    (length,) = struct.unpack(">I", _exactly(connection, 4, until))
    if length > MOST_HEADER:
        raise Malformed(f"a header of {length} bytes")
    try:
        header = json.loads(_exactly(connection, length, until))
        sizes = header["blobs"]
        fine = type(sizes) is list and len(sizes) <= most[0] and all(type(size) is int and size >= 0 for size in sizes)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Malformed(f"no header: {type(error).__name__}") from None
    if not fine or sum(sizes) > most[1]:
        raise Malformed(f"more than {most[0]} blobs or {most[1]} bytes of them")
    return header, [_exactly(connection, size, until) for size in sizes]


def _exactly(connection: socket.socket, size: int, until: float | None) -> bytes:
    got = bytearray()  # not a list of parts, of which each would take fifty bytes more
    while len(got) < size:
        _wait(connection, until)
        part = connection.recv(min(size - len(got), _CHUNK))
        if not part:
            raise EOFError
        got += part
    return bytes(got)


def _wait(connection: socket.socket, until: float | None) -> None:
    """Give the next call on ``connection`` the time that is left. Raises TimeoutError when there is none."""
    if until is None:
        return
    if (left := until - time.monotonic()) <= 0:
        raise TimeoutError
    connection.settimeout(left)
