"""The collective transport with real actors: engines get the policy's weights, also when one dies or hangs meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from actors.base import GROUPS
from actors.policy import PolicyRank
from actors.rollout import RolloutActor
from cluster.loop.publication import Publisher
from cluster.roles.policy_group import PolicyGroup
from cluster.roles.pool import Pool
from rayloop.core.protocols import Manifest
from rayloop.core.types import Version
from rayloop.run.config import RunConfig
from rayloop.transports.manifest import manifest
from rayloop.transports.object_store import ObjectStore
from tests.support.runs import settings


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    yield
    ray.shutdown()


class Engine:
    """Keeps what it loads."""

    def __init__(self) -> None:
        self.loaded: list[tuple[Manifest, Any]] = []

    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def load(self, manifest: Manifest, tensors: Any) -> None:
        self.loaded.append((manifest, tensors))


class Receiver(RolloutActor):
    """The rollout actor, whose engine keeps weights, and which can be told to die within its next broadcast."""

    def __init__(self, config: RunConfig) -> None:
        from rayloop.transports.choose import transport

        torch.set_num_threads(1)
        self.engine: Any = Engine()
        self.transport: Any = transport(config.publish.transport, "")
        self.groups: set[str] = set()

    def health(self) -> int:  # type: ignore[override]
        return os.getpid()

    async def load(self, manifest: Manifest, source: Any) -> None:
        await super().load(manifest, source)
        if self.transport._meeting is not None:
            self.groups.add(self.transport._meeting.name)

    def die_in_the_next_broadcast(self) -> None:
        self.transport._broadcast = lambda *_: os.kill(os.getpid(), signal.SIGKILL)

    def seen(self) -> tuple[list[Version], dict[str, torch.Tensor], int]:
        """The versions loaded, the tensors of the last one, and how many groups they came through."""
        return [loaded.version for loaded, _ in self.engine.loaded], dict(self.engine.loaded[-1][1]), len(self.groups)


class Sender(PolicyRank):
    """The policy's rank without a model: its weights of step n are all n."""

    def __init__(self, config: RunConfig) -> None:
        from rayloop.transports.choose import transport

        torch.set_num_threads(1)
        self.transport: Any = transport(config.publish.transport, "")

    def export(self, version: Version) -> tuple[Manifest, Any]:
        tensors = weights(version)
        return manifest(version, tensors), ObjectStore().pack(version, tensors)[1]


def weights(version: Version) -> dict[str, torch.Tensor]:
    return {f"layer.{i}": torch.full((300, 10 * (i + 1)), float(version.step)) for i in range(6)}


class Stage:
    """The publisher of a run with a policy rank and ``size`` engines."""

    def __init__(self, folder: Path, size: int) -> None:
        transport = {"kind": "collective", "bucket_bytes": 40_000, "timeout": 5}
        c = self.config = RunConfig.model_validate(settings(folder, folder, publish={"transport": transport}))
        self.events: list[dict[str, Any]] = []
        sender, receiver = (ray.remote(num_cpus=0, concurrency_groups=GROUPS)(cls) for cls in (Sender, Receiver))
        policy = PolicyGroup(c.policy, lambda _: sender.remote(c))
        policy.ranks = [sender.remote(c)]
        self.pool = Pool(
            "rollout",
            size,
            lambda _: receiver.options(max_concurrency=10).remote(c),
            c.recovery,
            self._event,
            self._admit,
        )
        services: Any = SimpleNamespace(policy=policy, rollout=self.pool)
        self.publisher = Publisher(c, services, SimpleNamespace(event=self._event))  # type: ignore[arg-type]

    def _event(self, kind: str, **fields: Any) -> None:
        self.events.append({"event": kind, **fields})

    async def _admit(self, engine: Any) -> None:
        await self.publisher.admit(engine)

    async def publish(self, step: int) -> None:
        await self.publisher.publish(Version(0, step))

    async def seen(self) -> list[tuple[list[int], int]]:
        """For each engine the steps that it loaded, the last one's weights checked, and how many groups they came through."""
        found = []
        for worker in self.pool.workers.values():
            versions, tensors, groups = await worker.handle.seen.remote()
            expected = weights(versions[-1])
            assert tensors.keys() == expected.keys()
            assert all(torch.equal(tensors[name], expected[name]) for name in expected)
            found.append(([version.step for version in versions], groups))
        return found

    async def back(self) -> None:
        while len(self.pool.workers) < self.pool.size:
            await asyncio.sleep(0.05)

    def named(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]


def test_a_receiver_killed_during_a_broadcast_is_replaced_and_the_others_are_served(tmp_path: Path) -> None:
    stage = Stage(tmp_path, 2)

    async def play() -> None:
        await stage.pool.start()
        await stage.publish(1)
        await stage.publish(2)
        assert await stage.seen() == [([1, 2], 1), ([1, 2], 1)], "the same members need one group"
        await stage.pool.workers[2].handle.die_in_the_next_broadcast.remote()
        await stage.publish(3)
        [failed], [lost] = stage.named("broadcast_failed"), stage.named("worker_lost")
        assert (failed["version"], lost["worker"]) == ("0.3", 2)
        assert (await stage.seen())[0] == ([1, 2, 3], 1), "the survivor read the object store"
        await stage.back()
        assert (await stage.seen())[1] == ([3], 0), "so did the replacement"
        await stage.publish(4)
        assert await stage.seen() == [([1, 2, 3, 4], 2), ([3, 4], 1)], "they meet in a new group"
        assert len(stage.named("broadcast_failed")) == 1

    run(stage, play)


@pytest.mark.slow_faults
def test_a_receiver_that_hangs_holds_nobody_up_beyond_the_deadline(tmp_path: Path) -> None:
    stage = Stage(tmp_path, 2)
    publish = stage.config.publish.model_copy(update={"timeout": 8.0})
    stage.publisher.config = stage.config.model_copy(update={"publish": publish})

    async def play() -> None:
        await stage.pool.start()
        await stage.publish(1)
        os.kill(await stage.pool.workers[2].handle.health.remote(), signal.SIGSTOP)
        await stage.publish(2)
        [lost] = stage.named("worker_lost")
        assert (lost["worker"], lost["why"]) == (2, "load of rollout 1 did not answer within 8 s")
        await stage.back()
        assert [steps for steps, _ in await stage.seen()] == [[1, 2], [2]]

    run(stage, play)


def run(stage: Stage, play: Any) -> None:
    async def all_of_it() -> None:
        try:
            async with asyncio.timeout(90):
                await play()
        finally:
            stage.pool.stop()
            stage.publisher.services.policy.stop()

    asyncio.run(all_of_it())
