"""Calls between two processes: a 4-byte length, a JSON header, then raw bytes. Every answer carries the number of its call.

Standard library only, and Python 3.9: it also runs inside desktops and in interpreters where rayloop is not installed.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

_LENGTH = struct.Struct(">I")
MOST = 1 << 28
"""Bytes of the longest header or blob that is taken: a side that writes nonsense is not believed."""

Header = dict[str, Any]
Handler = Callable[[Header, bytes], "tuple[Header, bytes]"]


class Gone(ConnectionError):
    """The other side has closed the connection, or speaks no frames."""


class Late(TimeoutError):
    """The other side did not answer in time; what it says later is never taken for another answer."""


class Refused(Exception):
    """The other side answered that it could not. ``kind`` is the name of the exception that it met."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(kind, why)
        self.kind, self.why = kind, why

    def __str__(self) -> str:
        return f"{self.kind}: {self.why}"


class Channel:
    """One end of a stream socket. Not for several threads at once."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._calls = 0

    def send(self, header: Header, blob: bytes = b"", seconds: float | None = None) -> None:
        """Raises Gone, and Late when the other side does not take it."""
        written = json.dumps({**header, "blob": len(blob)}).encode()
        self._socket.settimeout(seconds)
        try:
            self._socket.sendall(_LENGTH.pack(len(written)) + written + blob)
        except TimeoutError as error:
            raise Late(f"nothing was taken within {seconds:g} seconds") from error
        except OSError as error:
            raise Gone(str(error)) from error

    def receive(self, seconds: float | None = None) -> tuple[Header, bytes]:
        """The next header and its blob. Raises Gone, Late."""
        until = None if seconds is None else time.monotonic() + seconds
        [length] = _LENGTH.unpack(self._exactly(_LENGTH.size, until, seconds))
        try:
            header = json.loads(self._exactly(length, until, seconds))
            size = header["blob"]
        except (ValueError, KeyError, TypeError) as error:
            raise Gone(f"the other side speaks no frames: {error}") from error
        return header, self._exactly(size, until, seconds)

    def ask(self, op: str, seconds: float, blob: bytes = b"", **arguments: Any) -> tuple[Header, bytes]:
        """The answer to one call. Raises Refused, Late and Gone; after the last two the channel is of no use."""
        self._calls += 1
        self.send({**arguments, "op": op, "call": self._calls}, blob, seconds)
        header, content = self.receive(seconds)
        if header.get("call") != self._calls:
            raise Gone(f"answer {header.get('call')} to call {self._calls}")
        if "error" in header:
            raise Refused(*header["error"])
        return header, content

    def serve(self, handler: Handler) -> None:
        """Answer calls until the other side is gone. What ``handler`` raises is the answer to that call."""
        while True:
            try:
                header, blob = self.receive()
            except Gone:
                return
            try:
                answer, content = handler(header, blob)
            except Exception as error:
                answer, content = {"error": [type(error).__name__, str(error)]}, b""
            try:
                self.send({**answer, "call": header.get("call")}, content)
            except Gone:
                return

    def close(self) -> None:
        self._socket.close()

    def _exactly(self, size: int, until: float | None, seconds: float | None) -> bytes:
        if not (isinstance(size, int) and 0 <= size <= MOST):
            raise Gone(f"the other side announces {size} bytes")
        received = bytearray()
        self._socket.settimeout(None)
        while len(received) < size:
            left = None if until is None else max(until - time.monotonic(), 0)
            if not select.select([self._socket], [], [], left)[0]:
                raise Late(f"no answer within {seconds:g} seconds")
            try:
                part = self._socket.recv(min(size - len(received), 1 << 20))
            except OSError as error:
                raise Gone(str(error)) from error
            if not part:
                raise Gone("the other side closed the connection")
            received += part
        return bytes(received)
