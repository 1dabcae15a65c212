"""The network of a node: its addresses, connections to others, and its block of ports."""

import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from rayloop.core.failures import ConfigError, InfrastructureFailure

CONNECT_TIMEOUT_S = 2.0
"""Seconds for a TCP connection or an HTTP answer."""
PORTS_PER_NODE = 1000
"""Ports of one node: one for each service, and one for each of its worker processes."""


def unreachable(host: str, port: int) -> str:
    """Why no TCP connection can be made within ``CONNECT_TIMEOUT_S``; empty when one can."""
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def this_node() -> str | None:
    """The address under which other machines see this one; None when it has no network.

    Sends nothing.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # The address is reserved for documentation (RFC 5737); UDP only looks up the route.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def of_interface(name: str) -> str:
    """The IPv4 address of a network interface such as ib0.

    Raises ConfigError, which names the node's interfaces.
    """
    addresses = {}
    for interface, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family is socket.AF_INET:
                addresses[interface] = entry.address
    if name not in addresses:
        interfaces = [f"{interface} ({address})" for interface, address in addresses.items()]
        raise ConfigError(
            f"--interface {name}: this node has none with an IPv4 address; it has"
            f" {', '.join(interfaces) or 'no network'}"
        )
    return addresses[name]


class NoFreePorts(InfrastructureFailure):
    """Every block of the range is taken."""


@dataclass(frozen=True)
class Ports:
    """The ports of a node.

    ``services``: name -> port. ``workers``: lowest and highest port of worker processes.
    """

    services: dict[str, int]
    workers: tuple[int, int]

    def __getitem__(self, service: str) -> int:
        return self.services[service]


def port_range(text: str) -> tuple[int, int]:
    """``20000-29999`` as numbers. Raises ConfigError."""
    low, _, high = text.partition("-")
    is_range = low.isdigit() and high.isdigit()
    if not is_range or not 1024 <= int(low) < int(high) < 65536:
        raise ConfigError(
            f"--ports {text}: expected LOW-HIGH between 1024 and 65535, for example 20000-29999"
        )
    return int(low), int(high)


def kernels() -> str:
    """LOW-HIGH: the range from which the kernel picks a port when none is named.

    gloo, NCCL and their stores name none.
    """
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8")
    return "-".join(text.split())


@contextmanager
def block(low: int, high: int, services: Sequence[str]) -> Iterator[Ports]:
    """Own a block of ports in the range ``low``..``high``: its first port stays bound.

    Raises ConfigError, NoFreePorts.
    """
    size = min(PORTS_PER_NODE, high - low + 1)
    if size < 2 * (len(services) + 1):
        raise ConfigError(
            f"--ports {low}-{high}: a node needs {len(services) + 1} ports and one per worker"
            " process"
        )
    starts = list(range(low, high - size + 2, size))
    # Nodes that start together on one machine would all try the first block otherwise.
    random.shuffle(starts)
    for start in starts:
        lock = _bound(start)
        if lock is None:
            continue
        with closing(lock):
            numbers = range(start + 1, start + 1 + len(services))
            if all(map(_free, numbers)):
                workers = (numbers[-1] + 1, start + size - 1)
                yield Ports(dict(zip(services, numbers, strict=True)), workers)
                return
    raise NoFreePorts(
        f"no block of {size} ports is free between {low} and {high}. Give another range with"
        " --ports"
    )


def _bound(port: int) -> socket.socket | None:
    """A socket that is bound to the port; None when another one is."""
    candidate = socket.socket()
    try:
        candidate.bind(("", port))
    except OSError:
        candidate.close()
        return None
    return candidate


def _free(port: int) -> bool:
    candidate = _bound(port)
    if candidate is not None:
        candidate.close()
    return candidate is not None
