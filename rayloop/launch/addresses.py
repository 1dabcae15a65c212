"""Addresses: the one of this node, and whether something listens at another."""

from __future__ import annotations

import socket

CONNECT = 2.0
"""Seconds for a TCP connection or an HTTP answer."""


def unreachable(host: str, port: int) -> str:
    """Why no TCP connection can be made within CONNECT seconds; empty when one can."""
    try:
        socket.create_connection((host, port), timeout=CONNECT).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def this_node() -> str | None:
    """The address under which other machines see this one; None when it has no network. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation (RFC 5737); UDP only looks up the route
        except OSError:
            return None
        return str(probe.getsockname()[0])
