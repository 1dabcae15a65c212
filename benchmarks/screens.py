"""What ``bench multi_turn`` puts around the real driver, environment, rollout and reward actors: a
desktop, an engine, a trainer.

The desktop shows noise of a given size, which nothing compresses; the engine waits instead of
generating; its actor counts what arrives. The trainer looks at the size of what it is given, and
learns nothing.
"""

from __future__ import annotations

import asyncio
import os
import re
import struct
import time
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import ray

from benchmarks.simulated import SimulatedPolicy
from rayloop.actors.handles import Handle, create, submit
from rayloop.actors.lease import LeasesEngines
from rayloop.actors.rollout import RolloutActor
from rayloop.cluster.driver import Driver
from rayloop.cluster.driver_actor import DriverActor
from rayloop.cluster.services import TrainingServices
from rayloop.cluster.supervision.pool import Pool
from rayloop.config.settings import SettingsModel
from rayloop.core.failures import DataFailure
from rayloop.core.groups import Group
from rayloop.core.protocols import EngineHealth, Manifest, Observation, StepResult
from rayloop.core.types import (
    Completion,
    FinishReason,
    ImageSource,
    Message,
    Sampling,
    Task,
    TokenPrompt,
    TrajectoryId,
    Version,
)
from rayloop.run.records.step_metrics import Collected

SCREEN_WIDTH_PIXELS = 640
"""Pixels of a screen from left to right."""


def screen(size: int, seed: int | None = None) -> bytes:
    """A PNG of about ``size`` bytes: noise, stored as it is. Without a seed no two are alike."""
    height = max(1, size // (3 * SCREEN_WIDTH_PIXELS))
    rows: npt.NDArray[np.uint8] = np.zeros(
        (height, 1 + 3 * SCREEN_WIDTH_PIXELS), np.uint8
    )  # in front of each row its filter: none
    rows[:, 1:] = np.random.default_rng(seed).integers(
        0, 256, (height, 3 * SCREEN_WIDTH_PIXELS), np.uint8
    )
    header = struct.pack(">IIBBBBB", SCREEN_WIDTH_PIXELS, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 0)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(map(_chunk, *zip(*parts, strict=True)))


def _chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


class Desktop:
    """Whatever is done, the next screen is another one.

    All members of a group begin at the same one.
    """

    class Settings(SettingsModel):
        size: int = 1_000_000
        """Bytes of a screen."""

    def __init__(self, settings: Desktop.Settings) -> None:
        self._size = settings.size

    def reset(self, task: Task) -> Observation:
        first = ImageSource(data=screen(self._size, zlib.crc32(task.id.encode())))
        return Observation((Message("user", ("Open the settings.", first)),))

    def step(self, text: str) -> StepResult:
        return StepResult(Observation((Message("user", (ImageSource(data=screen(self._size)),)),)))

    def evaluate(self) -> None: ...
    def close(self) -> None: ...


class WaitingEngine:
    """A ``GenerationEngine`` whose turns all take as long and say the same.

    Raises DataFailure for an image without bytes.
    """

    class Settings(SettingsModel):
        seconds: float = 0.2
        """What a turn takes."""
        tokens: int = 32
        """Of a turn, the end token included."""

    def __init__(self, model: Any, settings: WaitingEngine.Settings, place: Any) -> None:
        self._settings = settings
        self._version: Version | None = None

    async def generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        for image in prompt.images:
            if image.data is None:
                raise DataFailure(f"image {image.ref.sha256}", "it has no bytes")
        await asyncio.sleep(self._settings.seconds)
        word = next(token for token in range(100, 1000) if token not in sampling.banned_tokens)
        tokens = (word,) * (self._settings.tokens - 1) + sampling.end_tokens[:1]
        version = self._version or Version(0, 0)
        return Completion(tokens, (-0.5,) * len(tokens), FinishReason.END_TOKEN, version)

    async def leave(self, cohort: str) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...

    async def load(self, manifest: Manifest, tensors: Mapping[str, Any]) -> None:
        self._version = manifest.version

    def health(self) -> EngineHealth:
        return EngineHealth(self._version, 0, 0)


class CountingRollout(RolloutActor):
    """The rollout actor, and how many bytes of images came with requests, of how many distinct
    images.
    """

    def __init__(self, *made: Any) -> None:
        super().__init__(*made)
        self._requests = self._bytes = 0
        self._distinct: dict[str, int] = {}

    async def generate(self, prompt: TokenPrompt, *asked: Any) -> Any:
        self._count(prompt)
        return await super().generate(prompt, *asked)

    async def generate_each(self, prompt: TokenPrompt, *asked: Any) -> Any:
        self._count(prompt)
        return await super().generate_each(prompt, *asked)

    def _count(self, prompt: TokenPrompt) -> None:
        self._requests += 1
        for image in prompt.images:
            if image.data is not None:
                self._bytes += len(image.data)
                self._distinct[image.ref.sha256] = len(image.data)

    async def load(self, manifest: Manifest, source: Any, order: int = 0) -> None:
        await self.engine.load(manifest, {})

    async def counts(self) -> tuple[int, int, dict[str, int]]:
        """Requests, bytes that came with them, and the bytes of each distinct image so far."""
        return self._requests, self._bytes, self._distinct


class LookingPolicy(SimulatedPolicy):
    """Looks at how large the payloads of its groups are."""

    payload_bytes = 0

    async def start(self) -> None: ...

    async def fetch(self, groups: Sequence[Group], **options: Any) -> set[TrajectoryId]:
        payloads = [
            member.payload
            for group in groups
            for member in group.members
            if member.payload is not None
        ]
        found = await asyncio.to_thread(ray.experimental.get_object_locations, payloads)
        self.payload_bytes += sum(where["object_size"] for where in found.values())
        return set()


class CustomEngines(TrainingServices):
    """Those of a run, but with rollout actors of the class ``engine``, and a policy that does not
    train.
    """

    engine: type[RolloutActor]

    def _pool(self, role: str, size: int, placement: Any, make: Any, *rest: Any) -> Pool[Any]:
        c = self.config
        if role != "rollout":
            return super()._pool(role, size, placement, make, *rest)

        def own(options: dict[str, Any]) -> Handle[Any]:
            return create(self.engine, options, c.model, c.engine, c.transport, self.weights)

        return super()._pool(role, size, placement, own, *rest)


class ScreensServices(CustomEngines):
    """Rollout actors that count, and a policy that looks at what it is given."""

    engine = CountingRollout

    def __init__(self, *made: Any) -> None:
        super().__init__(*made)
        self.looking = LookingPolicy(0.0)
        self.policy = self.looking  # type: ignore[assignment]


class Mark:
    """Everything that is counted, at one moment; ``since`` an earlier one it is what happened
    between.
    """

    def __init__(
        self, services: ScreensServices, counts: Sequence[tuple[int, int, dict[str, int]]]
    ) -> None:
        self.seconds, self.cpu, self.payloads = (
            time.monotonic(),
            cpu_by_role(),
            services.looking.payload_bytes,
        )
        self.requests, self.bytes = sum(one[0] for one in counts), sum(one[1] for one in counts)
        self.distinct = {name: size for one in counts for name, size in one[2].items()}

    def since(self, before: Mark, steps: int, episodes: int) -> dict[str, Any]:
        """Per step, of which there were so many, each with so many ``episodes``."""
        distinct = sum(size for name, size in self.distinct.items() if name not in before.distinct)
        moved, cpu = (
            self.bytes - before.bytes,
            {r: (s - before.cpu.get(r, 0.0)) / steps for r, s in self.cpu.items()},
        )
        return {
            "step_s": round((self.seconds - before.seconds) / steps, 2),
            "requests": round((self.requests - before.requests) / steps),
            "moved_mb": round(moved / 1e6 / steps, 1),
            "distinct_mb": round(distinct / 1e6 / steps, 1),
            "ratio": round(moved / distinct, 3),
            "payload_mb": round((self.payloads - before.payloads) / 1e6 / steps, 1),
            "cpu_s": {
                role: round(seconds, 2) for role, seconds in sorted(cpu.items()) if seconds >= 0.05
            },
            "driver_ms_per_trajectory": round(1000 * cpu["ScreensActor"] / episodes, 2),
        }


def cpu_by_role() -> dict[str, float]:
    """CPU seconds so far of this cluster's processes, by their actor's class or else their name.

    For actors: asks their raylet.
    """
    found: dict[str, float] = defaultdict(float)
    for process in psutil.Process(psutil.Process(os.getppid()).ppid()).children(recursive=True):
        with suppress(psutil.Error):
            actor = re.match(r"ray::(\w+)", "".join(process.cmdline()))
            used = process.cpu_times()
            found[actor[1] if actor else process.name()] += used.user + used.system
    return found


class ScreensDriver(Driver):
    """The driver itself, but for what needs weights."""

    services: ScreensServices

    def __init__(self, *made: Any) -> None:
        super().__init__(*made)
        self.marks: list[Mark] = []

    async def verify(self) -> None: ...

    async def observe(self) -> None: ...

    async def checkpoint(self, last: bool = False) -> None: ...

    async def record(self, report: Mapping[str, float], collected: Collected) -> None:
        await super().record(report, collected)
        engines: Sequence[Any] = list(self.services.rollout.workers.values())
        counts = await asyncio.gather(
            *(submit(worker.handle, CountingRollout.counts) for worker in engines)
        )
        self.marks.append(Mark(self.services, counts))


class ScreensActor(DriverActor):
    """The actor in which it lives."""

    def make(self, handle: Handle[LeasesEngines]) -> ScreensDriver:
        services = ScreensServices(self.config, self.folder, self.reporter.event)
        return ScreensDriver(self.config, services, self.reporter, self.origin, handle, self.hashes)

    async def measure(self, warm: int) -> dict[str, Any]:
        """Run; returns what a step after the first ``warm`` took."""
        await self.main()
        driver = self.driver
        assert isinstance(driver, ScreensDriver)
        steps = len(driver.marks) - warm
        return driver.marks[-1].since(driver.marks[warm - 1], steps, self.config.algorithm.target)
