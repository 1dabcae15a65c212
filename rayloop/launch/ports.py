"""The ports of one Ray node: a block of its own, so that nodes that share a machine do not meet, and firewalls have a range."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rayloop.core.failures import ConfigError, InfrastructureFailure

BLOCK = 1000
"""Ports of one node: one for each service, the rest for its workers (a worker process needs one)."""


class NoFreePorts(InfrastructureFailure):
    """Every block of the range is taken."""


@dataclass(frozen=True)
class Ports:
    """``services``: name -> port. ``workers``: lowest and highest port of worker processes."""

    services: dict[str, int]
    workers: tuple[int, int]

    def __getitem__(self, service: str) -> int:
        return self.services[service]


def port_range(text: str) -> tuple[int, int]:
    """``20000-29999`` as numbers. Raises ConfigError."""
    low, _, high = text.partition("-")
    if not (low.isdigit() and high.isdigit() and 1024 <= int(low) < int(high) < 65536):
        raise ConfigError(f"--ports {text}: expected LOW-HIGH between 1024 and 65535, for example 20000-29999")
    return int(low), int(high)


def kernels(file: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> str:
    """LOW-HIGH: the range from which the kernel picks a port when none is named, as gloo, NCCL and their stores do."""
    return "-".join(file.read_text(encoding="utf-8").split())


@contextmanager
def block(low: int, high: int, services: Sequence[str]) -> Iterator[Ports]:
    """A block of ports within ``low``..``high`` that this node owns until the ``with`` block ends.

    Its first port stays bound and unused, which marks the block as taken. Raises ConfigError, NoFreePorts.
    """
    size = min(BLOCK, high - low + 1)
    if size < 2 * (len(services) + 1):
        raise ConfigError(f"--ports {low}-{high}: a node needs {len(services) + 1} ports and one per worker process")
    starts = list(range(low, high - size + 2, size))
    random.shuffle(starts)
    for start in starts:
        held = _bound(start)
        if held is None:
            continue
        with closing(held):
            numbers = range(start + 1, start + 1 + len(services))
            if all(map(_free, numbers)):
                yield Ports(dict(zip(services, numbers, strict=True)), (numbers[-1] + 1, start + size - 1))
                return
    raise NoFreePorts(f"no block of {size} ports is free between {low} and {high}. Give another range with --ports")


def _bound(port: int) -> socket.socket | None:
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
