"""A node that lives, and on which an actor fails again and again: the next one is started
elsewhere, on a real Ray.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from rayloop.actors.base import Actor
from rayloop.actors.handles import create
from rayloop.cluster.services import Services, reserve
from rayloop.cluster.supervision.nodes import FAILURES_TO_AVOID
from rayloop.core.events import Event
from rayloop.run.config import RunConfig
from rayloop.run.demand import bundles
from tests.support.clusters import Cluster, cluster
from tests.support.runs import settings

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(300)]
WITHIN = 60.0
"""Seconds for all of it, once the nodes are there."""


class Worker(Actor):
    async def health(self) -> int:
        return os.getpid()


class Site(Services):
    """A run's reservation and one pool of it, whose only actor wants the one ``device`` of its
    node.
    """

    def __init__(self, config: RunConfig, folder: Path) -> None:
        super().__init__(config, str(folder), self._hear)
        self.events: list[dict[str, Any]] = []

    def _hear(self, event: Event) -> None:
        self.events.append(event.record())

    def named(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    async def begin(self) -> None:
        self._group = await reserve(
            f"test {self.folder}",
            bundles(self.config, False),
            self.config.recovery.start_timeout,
            self._emit,
        )
        self._watching = asyncio.create_task(self.nodes.watch())
        self.reward = self._pool(
            "reward", 1, self.config.reward.placement, lambda options: create(Worker, options)
        )
        self.pools = [self.reward]
        await self.reward.start()

    async def fail(self) -> str:
        """End the actor's process. Returns the node that its replacement serves on."""
        [worker] = self.reward.workers.values()
        [pid] = await self.reward.check()
        psutil.Process(pid).kill()
        while worker.serial in self.reward.workers:
            await self.reward.check()
            await asyncio.sleep(0.2)
        while not self.reward.workers:
            await asyncio.sleep(0.05)
        [replacement] = self.reward.workers.values()
        return replacement.node


@pytest.fixture
def stage() -> Iterator[Cluster]:
    with cluster() as made:
        made.join("bad", device=1.0)
        yield made
        ray.shutdown()


def test_what_failed_three_times_on_a_node_is_started_on_another(
    stage: Cluster, tmp_path: Path
) -> None:
    values = settings(tmp_path, tmp_path, recovery={"health_timeout": 5.0})
    for role in ("rollout", "environment", "reward"):
        wanted = {"device": 1} if role == "reward" else {}
        values.setdefault(role, {})["placement"] = {"num_cpus": 0, "resources": wanted}
    ray.init(address=stage.address, log_to_driver=False)

    async def test() -> None:
        site = Site(RunConfig.model_validate(values), tmp_path)
        try:
            await site.begin()
            bad = next(iter(site.reward.workers.values())).node
            stage.join("spare", device=1.0)
            began = time.monotonic()
            went = [await site.fail() for _ in range(FAILURES_TO_AVOID)]
            assert went[:-1] == [bad] * (FAILURES_TO_AVOID - 1), (
                "one failure, or two, may be chance"
            )
            assert went[-1] != bad
            assert time.monotonic() - began < WITHIN
            [avoided] = site.named("node_avoided")
            assert (avoided["node"], avoided["failures"]) == (bad, FAILURES_TO_AVOID)
            assert [event["node"] for event in site.named("worker_lost")] == [
                avoided["name"]
            ] * FAILURES_TO_AVOID
            assert len(site.named("worker_replaced")) == FAILURES_TO_AVOID
            reserved = {
                row["NodeID"]: row["Resources"].get("device", 0.0)
                for row in ray.nodes()
                if row["Alive"]
            }
            assert reserved[bad] == 1.0
            free = await asyncio.to_thread(ray.available_resources)
            assert free.get("device", 0.0) == 0.0, "what the bad node has is given to nobody"
        finally:
            site.stop()

    asyncio.run(asyncio.wait_for(test(), 240))
