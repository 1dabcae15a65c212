"""Addresses: the one of this node, and whether something listens at another."""

from __future__ import annotations

import socket

import psutil

from rayloop.core.failures import ConfigError

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


def of_interface(name: str) -> str:
    """The IPv4 address of a network interface such as ib0. Raises ConfigError with those that there are."""
    found = {
        interface: entry.address
        for interface, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family is socket.AF_INET
    }
    if name not in found:
        there = ", ".join(f"{interface} ({address})" for interface, address in found.items())
        raise ConfigError(f"--interface {name}: this node has none with an IPv4 address; it has {there or 'no network'}")
    return found[name]
