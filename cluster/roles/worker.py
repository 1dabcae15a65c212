"""An actor in service, as its pool knows it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rayloop.actors.handles import Handle

A = TypeVar("A")


@dataclass
class Worker(Generic[A]):
    """``misses``: failures since its last success, also of those that had its slot before; ``leased``: when it last was."""

    serial: int
    slot: int
    handle: Handle[A]
    leases: int = 0
    misses: int = 0
    leased: int = 0
    node: str = ""
    """Ray's id of the one that it is on."""
    affinities: Counter[str] = field(default_factory=Counter)
