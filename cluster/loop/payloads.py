"""What the references in a state stand for, so that a checkpoint holds it (docs/algorithm.md, section 12)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from typing import Any

from rayloop.actors.fates import object_lost
from rayloop.core.deadlines import with_deadline
from rayloop.core.failures import CheckpointError, WorkerLost
from rayloop.core.types import TrajectoryId
from rayloop.rollout.plain import HeldValue, Plain, filled, held


async def capture(state: Callable[[], Plain], lose: Callable[[Collection[TrajectoryId]], None], timeout: float) -> Plain:
    """The state of one moment with its payloads in it; what it is taken of goes on while they are fetched.

    ``lose`` gets the trajectories whose bytes are gone, and then a later moment is taken. Raises CheckpointError when
    bytes do not come within ``timeout`` seconds.
    """
    values: dict[Any, Any] = {}
    while True:
        taken = state()
        try:
            lost = await with_deadline(timeout, fetch(held(taken), values), "payloads for the checkpoint")
        except WorkerLost as error:
            raise CheckpointError(str(error)) from error
        if not lost:
            return filled(taken, values.__getitem__)
        lose(lost)


async def fetch(wanted: Iterable[HeldValue], values: dict[Any, Any]) -> set[TrajectoryId]:
    """Add to ``values`` what the references stand for. Returns the trajectories of which something is lost."""
    ids = {(found.reference, found.id) for found in wanted}

    async def one(reference: Any) -> None:
        try:
            values[reference] = await reference
        except Exception as error:
            if not object_lost(error):
                raise

    await asyncio.gather(*(one(reference) for reference in {r for r, _ in ids} - values.keys()))
    return {id for reference, id in ids if reference not in values}
