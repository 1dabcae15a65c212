"""Messages between a process and a child that it started.

A message is 4 bytes of length, a JSON header, and the blobs whose sizes the header names. Standard
library and Python 3.9 only: the module also runs inside sandboxes, and in interpreters where
rayloop is not installed.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple


class Bounds(NamedTuple):
    """The limits of one message; nothing is read of a larger one."""

    header: int
    """Bytes of the JSON header."""
    blobs: int
    """Number of blobs."""
    size: int
    """Bytes of all blobs."""


MOST_ANSWERED = Bounds(1 << 20, 32, 64 << 20)
"""The limits of an interpreter's answer, which code of the policy may have written."""
MOST_GIVEN = Bounds(1 << 20, 1 << 16, 256 << 20)
"""The limits of a call to an interpreter: a video has one blob a frame."""
OF_PROGRAMS = Bounds(1 << 28, 1, 1 << 28)
"""The limits between processes that run no code of the policy."""
_LENGTH = struct.Struct(">I")
_CHUNK_BYTES = 1 << 20

Header = dict[str, Any]


class Malformed(ConnectionError):
    """The bytes are not a message, are too many, or are the answer to another call."""


@dataclass(eq=False)
class Refused(Exception):
    """The other side answered that it could not.

    ``kind`` is the class name of its exception, ``why`` its text.
    """

    kind: str
    why: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.why}"


def send(
    connection: socket.socket,
    header: Header,
    blobs: Sequence[bytes] = (),
    until: float | None = None,
) -> None:
    """Send a message, at the latest by ``until`` on the monotonic clock.

    Raises OSError, including TimeoutError.
    """
    sizes = [len(blob) for blob in blobs]
    text = json.dumps({**header, "blobs": sizes}).encode()
    # Once is enough: Python counts a socket's timeout over all of ``sendall``.
    _wait(connection, until)
    connection.sendall(_LENGTH.pack(len(text)) + text + b"".join(blobs))


def receive(
    connection: socket.socket, until: float | None, most: Bounds
) -> tuple[Header, list[bytes]]:
    """Return the next message.

    Raises OSError: ConnectionError at the connection's end, Malformed, TimeoutError after
    ``until``.
    """
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size, until))
    if length > most.header:
        raise Malformed(f"a header of {length} bytes")
    try:
        header = json.loads(_exactly(connection, length, until))
        sizes = header["blobs"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Malformed(f"no header: {type(error).__name__}") from None
    if not _are_sizes(sizes, most):
        raise Malformed(f"more than {most.blobs} blobs or {most.size} bytes of them")
    return header, [_exactly(connection, size, until) for size in sizes]


def _are_sizes(sizes: Any, most: Bounds) -> bool:
    """Whether this part of a header is a list of sizes within the limits."""
    if type(sizes) is not list or len(sizes) > most.blobs:
        return False
    # ``isinstance`` would take true and false for numbers.
    if not all(type(size) is int and size >= 0 for size in sizes):
        return False
    return sum(sizes) <= most.size


class Channel:
    """One end of a stream socket, for calls that are answered one after the other.

    It serves one thread at a time.
    """

    def __init__(self, connection: socket.socket, most: Bounds = OF_PROGRAMS) -> None:
        self._socket = connection
        self._most = most
        self._calls = 0

    def ask(
        self, op: str, seconds: float, blobs: Sequence[bytes] = (), **arguments: Any
    ) -> tuple[Header, list[bytes]]:
        """Return the answer to one call.

        Raises Refused; ConnectionError and TimeoutError, after which the channel must not be used.
        """
        self._calls += 1
        request = {**arguments, "op": op, "call": self._calls}
        until = time.monotonic() + seconds
        try:
            send(self._socket, request, blobs, until)
            header, answer_blobs = receive(self._socket, until, self._most)
        except TimeoutError as error:
            # TimeoutError is a kind of OSError: further down it would become a ConnectionError.
            raise TimeoutError(f"no answer within {seconds:g} seconds") from error
        except ConnectionError:
            raise
        except OSError as error:
            raise ConnectionError(str(error)) from error

        # Code in an interpreter can write to its connection, and so answer calls that do not exist.
        if header.get("call") != self._calls:
            raise Malformed(f"the answer of another call to call {self._calls}")
        if "refused" not in header:
            return header, answer_blobs
        refusal = header["refused"]
        if type(refusal) is not list or [type(part) for part in refusal] != [str, str]:
            raise Malformed("a refusal that is not two texts")
        raise Refused(*refusal)

    def serve(
        self, handler: Callable[[Header, list[bytes]], tuple[Header, Sequence[bytes]]]
    ) -> None:
        """Answer calls until the other side closes the connection.

        An exception of ``handler`` is sent as the answer to that call.
        """
        while True:
            try:
                header, blobs = receive(self._socket, None, self._most)
            except OSError:
                return
            try:
                answer, answer_blobs = handler(header, blobs)
            except Exception as error:
                answer = {"refused": [type(error).__name__, str(error)]}
                answer_blobs = ()
            try:
                send(self._socket, {**answer, "call": header.get("call")}, answer_blobs)
            except OSError:
                return

    def close(self) -> None:
        """Close the socket; a call that waits in another thread then raises ConnectionError."""
        # ``close`` alone does not wake a thread that waits in ``recv``.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def arguments(header: Header) -> dict[str, Any]:
    """The arguments of a call."""
    return {key: value for key, value in header.items() if key not in ("op", "call", "blobs")}


def _exactly(connection: socket.socket, size: int, until: float | None) -> bytes:
    # Not a list of parts: each part would take fifty bytes more.
    content = bytearray()
    while len(content) < size:
        # The remaining time shrinks with every part; ``recv`` counts its timeout for one part.
        _wait(connection, until)
        part = connection.recv(min(size - len(content), _CHUNK_BYTES))
        if not part:
            raise ConnectionError("the other side closed the connection")
        content += part
    return bytes(content)


def _wait(connection: socket.socket, until: float | None) -> None:
    """Set the timeout of the next call on ``connection`` to the remaining time.

    Raises TimeoutError when none remains.
    """
    if until is None:
        return
    remaining = until - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    connection.settimeout(remaining)
