"""An actor in the service of a pool."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from rayloop.actors.handles import Handle


class Pooled(Protocol):
    """The methods of every actor of a pool."""

    def health(self) -> Any:
        """Its load, for the driver's metrics. An answer shows that the actor works."""


A = TypeVar("A", bound=Pooled)


@dataclass
class Worker(Generic[A]):
    """An actor in service.

    ``misses``: its slot's failures since a success; ``leased``: the number of its last lease.
    """

    serial: int
    slot: int
    handle: Handle[A]
    leases: int = 0
    misses: int = 0
    leased: int = 0
    node: str = ""
    affinities: Counter[str] = field(default_factory=Counter)
