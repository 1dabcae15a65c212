"""Which error counts when the block and a background task fail together."""

from __future__ import annotations

import asyncio

import pytest

from rayloop.core.deadlines import background
from rayloop.core.failures import PolicyLost, Preempted, RolesExhausted, Stalled

OTHER = RolesExhausted("the rollout role lost 21 workers")


async def fail_when_cancelled(error: Exception) -> None:
    try:
        await asyncio.sleep(30)
    finally:
        raise error


async def both(block: Exception, task: Exception) -> None:
    """The block fails, and the task while it is being cancelled for that."""
    async with background(fail_when_cancelled(task)):
        await asyncio.sleep(0)
        raise block


async def nested(block: Exception, task: Exception) -> None:
    async with background(asyncio.sleep(30)):
        await both(block, task)


@pytest.mark.parametrize("play", [both, nested])
@pytest.mark.parametrize("decisive", [PolicyLost("rank 1"), Preempted("asked to stop")])
@pytest.mark.parametrize("block_fails_with_it", [True, False])
def test_what_has_a_way_on_wins(play, decisive: Exception, block_fails_with_it: bool) -> None:  # type: ignore[no-untyped-def]
    """A lost policy is rebuilt and a stop is saved, whatever else failed at that moment."""
    errors = (decisive, OTHER) if block_fails_with_it else (OTHER, decisive)
    with pytest.raises(type(decisive)):
        asyncio.run(play(*errors))


def test_a_lost_policy_cannot_be_saved() -> None:
    with pytest.raises(PolicyLost):
        asyncio.run(both(Preempted("asked to stop"), PolicyLost("rank 1")))


def test_the_first_of_other_errors_counts() -> None:
    with pytest.raises(RolesExhausted):
        asyncio.run(both(Stalled("nothing moved"), OTHER))
