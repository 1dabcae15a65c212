"""Connections of HTTP servers that do not wait for headers without end, which uvicorn does."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADERS_TIMEOUT_S = 10.0
"""Seconds for the headers of a request.

They are counted from the start of the connection for its first request, and from the first byte of
a later one.
"""
MOST_HEADER_BYTES = 1 << 17
"""Bytes of these headers."""
_BASE: Any = HttpToolsProtocol


class Impatient(_BASE):
    """A protocol for uvicorn's ``http`` that closes a connection whose headers are late or long.

    Bodies have a separate deadline.
    """

    _header_timer: asyncio.TimerHandle | None = None
    _header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start the timer: a request must follow."""
        super().connection_made(transport)
        self._start_timer()

    def on_message_begin(self) -> None:
        """Start the timer at the first byte of a request.

        It may come in the same data as the request before it.
        """
        super().on_message_begin()
        self._start_timer()

    def on_headers_complete(self) -> None:
        """Stop the timer after all headers of a request."""
        super().on_headers_complete()
        self._stop_timer()

    def data_received(self, data: bytes) -> None:
        """Count bytes of headers; ``data`` may be of headers, of a body, or of both."""
        super().data_received(data)
        if self._header_timer is None:
            self._header_bytes = 0
        else:
            self._header_bytes += len(data)
        if self._header_bytes > MOST_HEADER_BYTES:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer when the connection has ended."""
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADERS_TIMEOUT_S, self.transport.abort)

    def _stop_timer(self) -> None:
        self._header_bytes = 0
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
