"""The collective transport beyond its contract: when the engines meet anew, and who is held up by one that dies or hangs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.support.weight_sync import Stage

pytestmark = pytest.mark.timeout(300)

COLLECTIVE: dict[str, Any] = {"kind": "collective"}
GROUP = "_membership._name"
"""Of a receiver: the process group in which it is, None when it has left."""


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    yield
    ray.shutdown()


def test_a_receiver_killed_during_a_broadcast_is_replaced_and_the_others_are_served(tmp_path: Path) -> None:
    stage = Stage(tmp_path, 2, COLLECTIVE, timeout=25.0)

    async def play() -> None:
        await stage.sync_weights(1)
        [first, other] = await stage.attributes(GROUP)
        assert first == other is not None
        await stage.sync_weights(2)
        assert await stage.attributes(GROUP) == [first, first], "the same members need one group"
        assert await stage.seen() == [[1, 2], [1, 2]]
        await stage.pool.workers[2].handle.die_in_the_next_load.remote("_membership.broadcast")
        await stage.sync_weights(3)
        [failed], [lost] = stage.named("broadcast_failed"), stage.named("worker_lost")
        assert (failed["version"], lost["worker"]) == ("0.3", 2)
        assert (await stage.seen())[0] == [1, 2, 3]
        assert (await stage.attributes(GROUP))[0] is None, "the survivor read the object store"
        await stage.back()
        assert await stage.seen() == [[1, 2, 3], [3]]
        assert await stage.attributes(GROUP) == [None, None], "so did the replacement"
        await stage.sync_weights(4)
        assert await stage.seen() == [[1, 2, 3, 4], [3, 4]]
        [again, new] = await stage.attributes(GROUP)
        assert again == new != first, "they meet in a new group"
        assert len(stage.named("broadcast_failed")) == 1

    stage.run(play)


@pytest.mark.slow_faults
def test_a_receiver_that_hangs_holds_nobody_up_beyond_the_deadline(tmp_path: Path) -> None:
    stage = Stage(tmp_path, 2, COLLECTIVE, timeout=8.0)

    async def play() -> None:
        await stage.sync_weights(1)
        os.kill(await stage.pool.workers[2].handle.health.remote(), signal.SIGSTOP)
        await stage.sync_weights(2)
        [lost] = stage.named("worker_lost")
        assert (lost["worker"], lost["why"]) == (2, "load of rollout 1 did not answer within 8 s")
        await stage.back()
        assert await stage.seen() == [[1, 2], [2]]

    stage.run(play)
