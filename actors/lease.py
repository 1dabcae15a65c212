"""A lease on a pooled worker, and generation through a lease that survives the loss of its engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to use one worker: its serial number in the pool and its actor handle."""

    worker: int
    handle: Any
