"""Messages between a process and a child that it started: 4 bytes of length, a JSON header, and the
blobs whose sizes it names. Standard library and Python 3.9 only: it also runs inside of sandboxes,
and in interpreters where rayloop is not installed.
"""

import json
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple


class Bounds(NamedTuple):
    """What one message may have at most; of a larger one nothing is read."""

    header: int
    """Bytes of the JSON header."""
    blobs: int
    """Number of blobs."""
    size: int
    """Bytes of all blobs."""


MOST_ANSWERED = Bounds(1 << 20, 32, 64 << 20)
"""An interpreter's answer: code of the policy may have written it."""
MOST_GIVEN = Bounds(1 << 20, 1 << 16, 256 << 20)
"""What the host gives an interpreter: a video has one blob a frame."""
OF_PROGRAMS = Bounds(1 << 28, 1, 1 << 28)
"""Between processes that run no code of the policy."""
_LENGTH = struct.Struct(">I")
_CHUNK = 1 << 20

Header = dict[str, Any]


class Malformed(ConnectionError):
    """What came is no message, is larger than it may be, or is the answer to another call."""


class Refused(Exception):
    """The other side answered that it could not.

    ``kind`` is the class name of its exception, ``why`` its text.
    """

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(kind, why)
        self.kind, self.why = kind, why

    def __str__(self) -> str:
        return f"{self.kind}: {self.why}"


def send(
    connection: socket.socket,
    header: Header,
    blobs: Sequence[bytes] = (),
    until: float | None = None,
) -> None:
    """``until``: on the monotonic clock. Raises OSError (TimeoutError among them)."""
    text = json.dumps({**header, "blobs": [len(blob) for blob in blobs]}).encode()
    # Once is enough: Python counts a socket's timeout over all of ``sendall``.
    _wait(connection, until)
    connection.sendall(_LENGTH.pack(len(text)) + text + b"".join(blobs))


def receive(
    connection: socket.socket, until: float | None, most: Bounds
) -> tuple[Header, list[bytes]]:
    """The next message.

    Raises OSError: ConnectionError at the connection's end, Malformed, TimeoutError after
    ``until``.
    """
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size, until))
    if length > most.header:
        raise Malformed(f"a header of {length} bytes")
    try:
        header = json.loads(_exactly(connection, length, until))
        sizes = header["blobs"]
        # ``isinstance`` would take true and false for numbers.
        fine = (
            type(sizes) is list
            and len(sizes) <= most.blobs
            and all(type(size) is int and size >= 0 for size in sizes)
        )
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Malformed(f"no header: {type(error).__name__}") from None
    if not fine or sum(sizes) > most.size:
        raise Malformed(f"more than {most.blobs} blobs or {most.size} bytes of them")
    return header, [_exactly(connection, size, until) for size in sizes]


class Channel:
    """One end of a stream socket, for calls that are answered one after the other.

    Not for several threads at once.
    """

    def __init__(self, connection: socket.socket, most: Bounds = OF_PROGRAMS) -> None:
        self._socket, self._most = connection, most
        self._calls = 0

    def ask(
        self, op: str, seconds: float, blobs: Sequence[bytes] = (), **arguments: Any
    ) -> tuple[Header, list[bytes]]:
        """The answer to one call.

        Raises Refused; ConnectionError and TimeoutError, after which the channel must not be used.
        """
        self._calls += 1
        until = time.monotonic() + seconds
        try:
            send(self._socket, {**arguments, "op": op, "call": self._calls}, blobs, until)
            header, found = receive(self._socket, until, self._most)
        except TimeoutError as error:
            # TimeoutError is a kind of OSError: further down it would become a ConnectionError.
            raise TimeoutError(f"no answer within {seconds:g} seconds") from error
        except ConnectionError:
            raise
        except OSError as error:
            raise ConnectionError(str(error)) from error

        # Code in an interpreter can write to its connection, and so answer calls that nobody made.
        if header.get("call") != self._calls:
            raise Malformed(f"the answer of another call to call {self._calls}")
        if "refused" not in header:
            return header, found
        refused = header["refused"]
        if not (
            type(refused) is list
            and len(refused) == 2
            and all(type(text) is str for text in refused)
        ):
            raise Malformed("a refusal that is not two texts")
        raise Refused(*refused)

    def serve(
        self, handler: Callable[[Header, list[bytes]], tuple[Header, Sequence[bytes]]]
    ) -> None:
        """Answer calls until the other side is gone.

        What ``handler`` raises is the answer to that call.
        """
        while True:
            try:
                header, blobs = receive(self._socket, None, self._most)
            except OSError:
                return
            try:
                answer, content = handler(header, blobs)
            except Exception as error:
                answer, content = {"refused": [type(error).__name__, str(error)]}, ()
            try:
                send(self._socket, {**answer, "call": header.get("call")}, content)
            except OSError:
                return

    def close(self) -> None:
        """Close the socket; a call that waits in another thread then raises ConnectionError."""
        # ``close`` alone does not wake a thread that waits in ``recv``.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def arguments(header: Header) -> dict[str, Any]:
    """What a call was made with."""
    return {key: value for key, value in header.items() if key not in ("op", "call", "blobs")}


def _exactly(connection: socket.socket, size: int, until: float | None) -> bytes:
    got = bytearray()  # not a list of parts, of which each would take fifty bytes more
    while len(got) < size:
        # The time left shrinks with every part; ``recv`` counts its timeout for one part.
        _wait(connection, until)
        part = connection.recv(min(size - len(got), _CHUNK))
        if not part:
            raise ConnectionError("the other side closed the connection")
        got += part
    return bytes(got)


def _wait(connection: socket.socket, until: float | None) -> None:
    """Give the next call on ``connection`` the time that is left.

    Raises TimeoutError when there is none.
    """
    if until is None:
        return
    if (left := until - time.monotonic()) <= 0:
        raise TimeoutError
    connection.settimeout(left)
