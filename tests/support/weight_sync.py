"""The publisher of a run, with a policy rank and rollout actors that are real but for the model: they send and keep weights."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch

from rayloop.actors.base import GROUPS
from rayloop.actors.policy import PolicyRank
from rayloop.actors.rollout import RolloutActor
from rayloop.cluster.loop.weight_sync import WeightSync
from rayloop.cluster.supervision.policy_group import PolicyGroup
from rayloop.cluster.supervision.pool import Pool
from rayloop.core.events import Event
from rayloop.core.protocols import Manifest
from rayloop.core.types import Version
from rayloop.run.config import RunConfig
from rayloop.transports.seam import transport
from rayloop.transports.settings import BroadcastTransport
from tests.support.runs import settings


def weights(version: Version) -> dict[str, torch.Tensor]:
    """Of several dtypes and shapes; all of step n are n."""
    made = {f"layer.{i}": torch.full((300, 10 * (i + 1)), float(version.step)) for i in range(6)}
    made["half"] = torch.full((7,), float(version.step), dtype=torch.bfloat16)
    made["transposed"] = torch.arange(12.0).reshape(3, 4).t() + version.step
    return made | {"scalar": torch.tensor(float(version.step))}


class Engine:
    """Keeps what it loads."""

    def __init__(self) -> None:
        self.loaded: list[tuple[Manifest, dict[str, torch.Tensor]]] = []
        self.paused = False

    async def pause(self) -> None:
        self.paused = True

    async def resume(self) -> None:
        self.paused = False

    async def load(self, manifest: Manifest, tensors: Any) -> None:
        assert self.paused
        self.loaded.append((manifest, {name: tensor.cpu().clone() for name, tensor in tensors.items()}))


class Receiving(RolloutActor):
    """The rollout actor, whose engine keeps weights, and which a test can let die while it takes the next ones."""

    def __init__(self, config: RunConfig, folder: str) -> None:
        torch.set_num_threads(1)
        BroadcastTransport.bucket_bytes = 40_000  # in this process: several buckets, of a model that small
        self.engine: Any = Engine()
        self.receiver: Any = transport(config.transport, folder).receiver()

    def health(self) -> int:  # type: ignore[override]
        return os.getpid()

    def die_in_the_next_load(self, within: str) -> None:
        """``within``: the receiver's method, or a path to one of what it has."""
        *parts, method = within.split(".")
        holder = self.receiver
        for part in parts:
            holder = getattr(holder, part)
        setattr(holder, method, lambda *_: os.kill(os.getpid(), signal.SIGKILL))

    def seen(self) -> tuple[list[Version], dict[str, torch.Tensor]]:
        """The versions loaded, and the tensors of the last one."""
        return [loaded.version for loaded, _ in self.engine.loaded], self.engine.loaded[-1][1]

    def attribute(self, path: str) -> Any:
        """Something that the receiver has."""
        found = self.receiver
        for name in path.split("."):
            found = getattr(found, name)
        return found


class Sending(PolicyRank):
    """The policy's rank without a model."""

    def __init__(self, config: RunConfig, folder: str) -> None:
        torch.set_num_threads(1)
        BroadcastTransport.bucket_bytes = 40_000
        self.sender: Any = transport(config.transport, folder).sender("127.0.0.1")
        self.engine: Any = SimpleNamespace(export=weights)
        self.lies = ""

    def lie(self, name: str) -> None:
        """From now on the manifest has another checksum for this tensor than its bytes have; "" ends it."""
        self.lies = name

    def export(self, version: Version) -> tuple[Manifest | None, Any]:
        manifest, source = super().export(version)
        if self.lies and manifest is not None:
            record = manifest.tensors[self.lies]
            other = dataclasses.replace(record, checksum=record.checksum ^ 1)
            manifest = dataclasses.replace(manifest, tensors={**manifest.tensors, self.lies: other})
        return manifest, source


class Stage:
    """The publisher of a run with a policy rank and ``size`` rollout actors, each with ``gpus``."""

    def __init__(self, folder: Path, size: int, chosen: Any, *, gpus: float = 0.0, timeout: float = 600.0) -> None:
        placed = {role: {"num_gpus": gpus, "num_cpus": 0} for role in ("policy", "rollout")} if gpus else {}
        changes = {f"{role}__placement": placement for role, placement in placed.items()}
        changes |= {"weight_sync": {"transport": chosen}, "policy__step_timeout": 6 * timeout}
        c = self.config = RunConfig.model_validate(settings(folder, folder, **changes))
        self.events: list[dict[str, Any]] = []
        where = str(folder / "weights")
        sending, receiving = (ray.remote(num_cpus=0, num_gpus=gpus, concurrency_groups=GROUPS)(cls) for cls in (Sending, Receiving))
        self.policy = PolicyGroup(c.policy, lambda _: sending.remote(c, where))
        self.policy.ranks = [sending.remote(c, where)]
        self.pool = Pool(
            "rollout", size, lambda _: receiving.options(max_concurrency=10).remote(c, where), c.recovery, self._emit, self._admit
        )
        services: Any = SimpleNamespace(policy=self.policy, rollout=self.pool, weights=where)
        self.weight_sync = WeightSync(c, services, SimpleNamespace(event=self._emit))  # type: ignore[arg-type]

    def _emit(self, event: Event) -> None:
        self.events.append(event.record())

    async def _admit(self, engine: Any) -> None:
        await self.weight_sync.admit(engine)

    async def sync_weights(self, step: int) -> None:
        await self.weight_sync.send(Version(0, step))

    async def seen(self) -> list[list[int]]:
        """For each engine the steps that it loaded, the last one's weights checked."""
        found = []
        for worker in self.pool.workers.values():
            versions, tensors = await worker.handle.seen.remote()
            expected = weights(versions[-1])
            assert tensors.keys() == expected.keys()
            for name, tensor in expected.items():
                assert tensors[name].dtype == tensor.dtype
                assert torch.equal(tensors[name], tensor), name
            found.append([version.step for version in versions])
        return found

    async def attributes(self, path: str) -> list[Any]:
        """Of each engine's receiver."""
        return [await worker.handle.attribute.remote(path) for worker in self.pool.workers.values()]

    async def back(self) -> None:
        """All engines are in service."""
        while len(self.pool.workers) < self.pool.size:
            await asyncio.sleep(0.05)

    def named(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    def run(self, play: Callable[[], Awaitable[None]], seconds: float = 240) -> None:
        """Start the rollout actors, play, and end all."""

        async def all_of_it() -> None:
            try:
                async with asyncio.timeout(seconds):
                    await self.pool.start()
                    await play()
            finally:
                self.pool.stop()
                self.policy.stop()

        asyncio.run(all_of_it())
