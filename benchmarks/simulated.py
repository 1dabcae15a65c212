"""The driver's surroundings as ``bench scale`` simulates them: one actor that waits instead of
generating, scoring or playing.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, cast

from benchmarks.load import Load
from rayloop.actors.base import Actor
from rayloop.actors.handles import Handle, create, submit
from rayloop.actors.lease import Lease, LeasesEngines
from rayloop.actors.policy import PolicyRank
from rayloop.cluster.driver import Driver
from rayloop.cluster.driver_actor import DriverActor
from rayloop.cluster.services import ACTOR_COROUTINES, TrainingServices
from rayloop.cluster.supervision.pool import Pool
from rayloop.config.settings import load as load_config
from rayloop.core.groups import Group, Outcome, Scored
from rayloop.core.protocols import EngineHealth, Manifest
from rayloop.core.types import EndReason, RolloutRequest, Summary, Task, TrajectoryId, Version
from rayloop.run.config import RunConfig
from rayloop.run.records.step_metrics import Collected
from rayloop.transports.seam import WeightUpdate

NOT_FINAL = ("issued", "in_flight", "ready", "attempts", "replayed")
"""Of the ledger's counts."""


class World(Actor):
    """All engines, environments and graders.

    An episode waits for a slot of its engine, then as long as its latency.
    """

    def __init__(self, load: Load, latencies: Sequence[float]) -> None:
        scale = load.latency * len(latencies) / sum(latencies)
        self._latencies = [scale * latency for latency in latencies]
        self._uniform = load.uniform
        self._slots: dict[int, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(load.slots)
        )
        self._version = Version(0, 0)
        self._busy = 0.0
        self._running: dict[int, float] = {}

    async def health(self) -> EngineHealth:
        return EngineHealth(self._version, 0, 0)

    async def load(self, manifest: Manifest, source: Any, order: int = 0) -> None:
        self._version = manifest.version

    async def run_episodes(
        self, requests: Sequence[RolloutRequest], lease: Lease[Any], driver: Handle[Any]
    ) -> tuple[list[Summary], *tuple[None, ...]]:
        summaries = await asyncio.gather(*(self._episode(request, lease) for request in requests))
        return summaries, *(None for _ in requests)

    async def _episode(self, request: RolloutRequest, lease: Lease[Any]) -> Summary:
        key = hash((request.id.group, request.id.sample))
        async with self._slots[lease.worker]:
            version, began = self._version, time.monotonic()
            self._running[key] = began
            await asyncio.sleep(random.Random(key).choice(self._latencies))
            seconds = time.monotonic() - self._running.pop(key)
            self._busy += seconds
        return Summary(
            request.id,
            request.attempt,
            request.task.id,
            "",
            EndReason.DONE,
            length=200,
            sampled_tokens=100,
            turns=1,
            images=0,
            observation_images=0,
            images_consistent=True,
            first_version=version,
            last_version=self._version,
            seconds=seconds,
        )

    async def score(self, task: Task, step: int, *payloads: Any) -> list[Outcome]:
        chance = random.Random(task.id).random()
        return [
            Scored(1.0 if chance < self._uniform else float(random.random() < 0.5))
            for _ in payloads
        ]

    async def busy(self) -> float:
        """Seconds that slots have been taken so far, in all."""
        now = time.monotonic()
        return self._busy + sum(now - began for began in self._running.values())


class SimulatedPolicy:
    """A trainer that takes its time and changes nothing; it has no ranks."""

    ranks: Sequence[Any] = ()

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def export(self, version: Version) -> WeightUpdate[None]:
        return WeightUpdate(Manifest(version, {}), None)

    async def fetch(self, groups: Sequence[Group], **options: Any) -> set[TrajectoryId]:
        return set()

    async def all(
        self, method: Callable[..., Any]
    ) -> list[tuple[dict[str, float], dict[TrajectoryId, Any], dict[TrajectoryId, Any]]]:
        """The driver calls ``train`` alone in this way."""
        assert method is PolicyRank.train
        await asyncio.sleep(self._seconds)
        return [({}, {}, {})]

    async def check_shared(self, folder: Path) -> None: ...

    async def while_alive(self, work: Awaitable[Any]) -> Any:
        return await work

    def stop(self) -> None: ...


class SimulatedServices(TrainingServices):
    """The pools of a run, all of whose workers are the one actor."""

    load: Load
    latencies: Sequence[float]

    async def start(self, admit_engine: Callable[[Any], Awaitable[None]]) -> None:
        options = {
            "num_cpus": 0,
            "max_concurrency": 4 * max(ACTOR_COROUTINES, self.load.engines * self.load.slots),
        }
        self.world = create(World, options, self.load, self.latencies)
        world = cast(Handle[Any], self.world)  # every role in one
        settings = self.config.recovery
        self.rollout = Pool(
            "rollout", self.load.engines, lambda _: world, settings, self._emit, admit_engine
        )
        self.environment, self.reward = (
            Pool(role, 4, lambda _: world, settings, self._emit)
            for role in ("environment", "reward")
        )
        self.pools = [self.rollout, self.environment, self.reward]
        self.policy = SimulatedPolicy(self.load.train)  # type: ignore[assignment]
        for pool in self.pools:
            await pool.start()


class SimulatedDriver(Driver):
    """The driver itself, but for what needs weights: it verifies, observes and saves nothing."""

    services: SimulatedServices

    def __init__(self, *made: Any) -> None:
        super().__init__(*made)
        self.marks: list[tuple[float, float, float, Counter[str]]] = []
        self.syncs: list[tuple[float, float]] = []
        """Seconds and CPU seconds of the driver during each weight sync."""

    async def verify(self) -> None: ...

    async def observe(self) -> None: ...

    async def checkpoint(self, last: bool = False) -> None: ...

    async def sync_weights(self) -> None:
        began, cpu = time.monotonic(), time.process_time()
        await super().sync_weights()
        self.syncs.append((time.monotonic() - began, time.process_time() - cpu))

    async def record(self, report: Mapping[str, float], collected: Collected) -> None:
        await super().record(report, collected)
        busy = await submit(self.services.world, World.busy)
        self.marks.append(
            (time.monotonic(), time.process_time(), busy, Counter(self.ledger.counts()))
        )


class SimulatedActor(DriverActor):
    """The actor in which it lives."""

    def __init__(
        self, config: RunConfig, folder: str, load: Load, latencies: Sequence[float]
    ) -> None:
        super().__init__(config, folder, "never")
        self.load, self.latencies = load, latencies

    def make(self, handle: Handle[LeasesEngines]) -> SimulatedDriver:
        services = SimulatedServices(self.config, self.folder, self.reporter.event)
        services.load, services.latencies = self.load, self.latencies
        return SimulatedDriver(
            self.config, services, self.reporter, self.origin, handle, self.hashes
        )

    async def measure(self, warm: int) -> dict[str, float]:
        """Run; returns what the steps after the first ``warm`` took."""
        await self.main()
        driver = self.driver
        assert isinstance(driver, SimulatedDriver)
        (began, cpu, busy, before), (ended, cpu_end, busy_end, after) = (
            driver.marks[warm - 1],
            driver.marks[-1],
        )
        seconds, load, counts = ended - began, self.load, after - before
        trained = counts["trained"]
        finished = sum(n for state, n in counts.items() if state not in NOT_FINAL)
        return {
            "seconds": round(seconds, 2),
            "trajectories": finished,
            "cpu_ms_per_trajectory": round(1000 * (cpu_end - cpu) / finished, 3),
            "trained_per_s": round(trained / seconds, 2),
            "sync_ms": round(1000 * median(wall for wall, _ in driver.syncs), 1),
            "sync_cpu_ms": round(1000 * median(cpu for _, cpu in driver.syncs), 1),
            "idle_share": round(1 - (busy_end - busy) / seconds / (load.engines * load.slots), 3),
            "filtered_share": round(
                sum(n for state, n in counts.items() if state.startswith("filtered")) / finished, 3
            ),
            "stale_share": round(
                sum(n for state, n in counts.items() if state.startswith("stale")) / finished, 3
            ),
        }


def simulated_driver(
    path: Path, folder: str, load: Load, latencies: Sequence[float]
) -> Handle[SimulatedActor]:
    """The driver as an actor."""
    config = load_config(path, (), RunConfig)
    run = Path(folder) / config.name
    run.mkdir()
    options = {"num_cpus": 0, "max_concurrency": ACTOR_COROUTINES}
    return create(SimulatedActor, options, config, str(run), load, list(latencies))
