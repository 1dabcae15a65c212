"""The publisher of a run, with a policy rank and rollout actors that are real but for the model:
they send and keep weights.
"""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import os
import pickle
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
from rayloop.core.failures import RayloopError, WorkerLost
from rayloop.core.protocols import Manifest
from rayloop.core.types import Version
from rayloop.rollout.colocation import Colocation
from rayloop.run.config import RunConfig
from rayloop.transports import manifest
from rayloop.transports.collective import BroadcastReceiver
from rayloop.transports.seam import transport
from rayloop.transports.settings import BroadcastTransport
from tests.support.runs import settings

BUCKET = 40_000
"""Bytes."""


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
        self.loaded.append(
            (manifest, {name: tensor.cpu().clone() for name, tensor in tensors.items()})
        )


def worker(pipe: Any) -> None:
    """A process of an engine that receives broadcasts, as vLLM's: answers with the tensors, or with
    what was raised.
    """
    torch.set_num_threads(1)
    BroadcastTransport.bucket_bytes = BUCKET
    pipe.send("ready")
    receivers = list[BroadcastReceiver]()
    while True:
        version, (settings, meeting) = pipe.recv()
        receivers = receivers or [BroadcastReceiver(settings)]
        try:
            pipe.send(dict(receivers[0].stream(version, meeting)))
        except RayloopError as error:
            pipe.send(error)


class Streaming(Engine):
    """Keeps what its two processes receive."""

    workers = 2

    def __init__(self) -> None:
        super().__init__()
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for _ in range(self.workers):
            ours, theirs = context.Pipe()
            self.pipes.append(ours)
            self.processes.append(context.Process(target=worker, args=(theirs,), daemon=True))
            self.processes[-1].start()
            theirs.close()
        for pipe in self.pipes:
            pipe.recv()

    async def receive(self, version: Version, broadcast: bytes) -> None:
        assert self.paused
        for pipe in self.pipes:
            pipe.send((version, pickle.loads(broadcast)))
        answers = await asyncio.gather(
            *(asyncio.to_thread(pipe.recv) for pipe in self.pipes), return_exceptions=True
        )
        if any(isinstance(answer, EOFError | OSError) for answer in answers):
            raise WorkerLost("a process of the engine has died")
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        self.loaded.append(
            (Manifest(version, {}), {name: tensor.clone() for name, tensor in answer.items()})
        )


class Receiving(RolloutActor):
    """The rollout actor, whose engine keeps weights, and which a test can let die while it takes
    the next ones.
    """

    def __init__(self, config: RunConfig, folder: str, workers: int) -> None:
        torch.set_num_threads(1)
        BroadcastTransport.bucket_bytes = (
            BUCKET  # in this process: several buckets, of a model that small
        )
        self.engine: Any = Streaming() if workers else Engine()
        self.receiver: Any = transport(chosen(config, workers), folder).receiver()
        self._loading, self._order = asyncio.Lock(), 0

    def health(self) -> int:  # type: ignore[override]
        return os.getpid()

    def processes(self) -> list[int]:
        """Those of a ``Streaming`` engine."""
        return [process.pid for process in self.engine.processes]

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

    def __init__(self, config: RunConfig, folder: str, workers: int) -> None:
        torch.set_num_threads(1)
        BroadcastTransport.bucket_bytes = BUCKET
        self.rank = 0
        self.sender: Any = transport(chosen(config, workers), folder).sender("127.0.0.1")
        self.engine: Any = SimpleNamespace(
            export=lambda version, adapters: weights(version),
            stream=lambda version, adapters: iter(weights(version).items()),
        )
        self.honest = manifest.manifest

    def lie(self, name: str) -> None:
        """From now on this tensor is described with another checksum than its bytes have; "" ends
        it.
        """

        def lying(version: Version, tensors: Any) -> Manifest:
            made = self.honest(version, tensors)
            return dataclasses.replace(
                made,
                tensors={
                    n: dataclasses.replace(r, checksum=r.checksum ^ (n == name))
                    for n, r in made.tensors.items()
                },
            )

        manifest.manifest = lying

    def kill_when(self, buckets_sent: int, pids: list[int]) -> None:
        """Kill these processes, or this one, when so many buckets were sent; -1: when all are, -2:
        when the copy is asked for.
        """
        send_bucket, sent, count = self.sender._send_bucket, self.sender.sent, 0

        def kill(*_: Any) -> None:
            for pid in pids or [os.getpid()]:
                os.kill(pid, signal.SIGKILL)

        def sending(*bucket: Any) -> None:
            nonlocal count
            if count == buckets_sent or (buckets_sent == -1 and not bucket):
                kill()
            count += 1
            send_bucket(*bucket)

        self.sender._send_bucket = sending
        if buckets_sent == -2:
            self.sender.sent = lambda: (kill(), sent())[1]

    def spare(self) -> None:
        """Undo ``kill_when``."""
        for name in ("_send_bucket", "sent"):
            vars(self.sender).pop(name, None)


def chosen(config: RunConfig, workers: int) -> Any:
    """The transport for engines with so many processes."""
    within = config.transport
    return (
        within.within(config.sync_timeout, workers)
        if isinstance(within, BroadcastTransport)
        else within
    )


class Stage:
    """The publisher of a run with a policy rank and ``size`` rollout actors, whose engines have
    ``workers`` processes, if any.
    """

    def __init__(
        self, folder: Path, size: int, chosen: Any, *, workers: int = 0, timeout: float = 600.0
    ) -> None:
        changes: dict[str, Any] = {
            "weight_sync": {"transport": chosen},
            "policy__step_timeout": 6 * timeout,
        }
        c = self.config = RunConfig.model_validate(settings(folder, folder, **changes))
        self.events: list[dict[str, Any]] = []
        where = str(folder / "weights")
        sending, receiving = (
            ray.remote(num_cpus=0, concurrency_groups=GROUPS)(cls) for cls in (Sending, Receiving)
        )
        self.policy = PolicyGroup(c.policy, lambda _: sending.remote(c, where, workers))
        self.policy.ranks = [sending.remote(c, where, workers)]
        receiving = receiving.options(max_concurrency=10)
        self.pool = Pool(
            "rollout",
            size,
            lambda _: receiving.remote(c, where, workers),
            c.recovery,
            self._emit,
            self._admit,
        )
        services: Any = SimpleNamespace(
            policy=self.policy, rollout=self.pool, weights=where, colocation=Colocation()
        )
        self.weight_sync = WeightSync(c, services, SimpleNamespace(event=self._emit))  # type: ignore[arg-type]

    def _emit(self, event: Event) -> None:
        self.events.append(event.record())

    async def _admit(self, engine: Any) -> None:
        await self.weight_sync.admit(engine)

    async def sync_weights(self, step: int) -> None:
        await self.weight_sync.send(Version(0, step))

    def replace_rank(self) -> None:
        """Another rank in place of the one that died; its calls are numbered from 1 again."""
        self.policy.ranks = [self.policy._spawn(0)]
        self.policy._number = 0

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

    def run(self, play: Callable[[], Awaitable[None]], seconds: float = 600) -> None:
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
