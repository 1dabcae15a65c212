"""Connections of HTTP servers that do not wait for headers without end, which uvicorn does."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADERS = 10.0
"""Seconds for the headers of a request: the first one's since the connection was made, a later
one's since its first byte.
"""
MOST = 1 << 17
"""Bytes of these headers."""
_BASE: Any = HttpToolsProtocol


class Impatient(_BASE):
    """For uvicorn's ``http``: closes a connection whose headers are late or long.

    Bodies have a deadline of their own.
    """

    _late: asyncio.TimerHandle | None = None
    _sent = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        """A request must follow."""
        super().connection_made(transport)
        self._wait()

    def on_message_begin(self) -> None:
        """The first byte of a request, which may lie behind another request in what was received."""
        super().on_message_begin()
        self._wait()

    def on_headers_complete(self) -> None:
        """All headers of a request are there."""
        super().on_headers_complete()
        self._stop()

    def data_received(self, data: bytes) -> None:
        """Bytes of headers, of a body, or of both."""
        super().data_received(data)
        self._sent = self._sent + len(data) if self._late is not None else 0
        if self._sent > MOST:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._stop()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(HEADERS, self.transport.abort)

    def _stop(self) -> None:
        self._sent = 0
        if self._late is not None:
            self._late.cancel()
            self._late = None
