"""What ``bench latency`` puts around the real driver, environment, rollout and reward actors: slow
screens, an engine that waits.

Both loops that are compared are the same code: in the one with a barrier the engine begins a turn
when every environment has taken its step, which is what a loop does that steps all environments
together.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.screens import CustomEngines, screen
from benchmarks.simulated import SimulatedPolicy
from rayloop.actors.handles import Handle, submit
from rayloop.actors.lease import LeasesEngines
from rayloop.actors.rollout import RolloutActor
from rayloop.cluster.driver import Driver
from rayloop.cluster.driver_actor import DriverActor
from rayloop.config.settings import SettingsModel
from rayloop.core.protocols import EngineHealth, Manifest, Observation, StepResult
from rayloop.core.types import (
    Completion,
    FinishReason,
    ImageSource,
    Message,
    Sampling,
    Task,
    TokenPrompt,
    Version,
)
from rayloop.run.records.step_metrics import Collected

FASTEST, SLOWEST = 0.05, 5.0
"""Seconds of a step."""
MEDIAN, SPREAD = 0.4, 1.1
"""Of the log-normal distribution that is cut to these: its median in seconds, and the standard
deviation of its logarithm.
"""
SCREENS = [screen(20_000, seed) for seed in range(16)]


def latencies(seed: int, count: int) -> list[float]:
    """Seconds of ``count`` steps."""
    drawn = np.random.default_rng(seed).lognormal(np.log(MEDIAN), SPREAD, count)
    return [float(seconds) for seconds in np.clip(drawn, FASTEST, SLOWEST)]


class Gui:
    """A screen that takes its time; every step shows another one."""

    class Settings(SettingsModel):
        turns: int = 6
        """Steps of an episode."""

    made = 0

    def __init__(self, settings: Gui.Settings) -> None:
        Gui.made += 1
        self._seed, self._turns = Gui.made, settings.turns

    def reset(self, task: Task) -> Observation:
        self._seconds = latencies(zlib.crc32(f"{task.id} {self._seed}".encode()), self._turns)
        return Observation((Message("user", ("Open the settings.", ImageSource(data=SCREENS[0]))),))

    async def step(self, text: str) -> StepResult:
        await asyncio.sleep(self._seconds.pop())
        shown = ImageSource(data=SCREENS[len(self._seconds) % len(SCREENS)])
        return StepResult(Observation((Message("user", (shown,)),)), done=not self._seconds)

    def evaluate(self) -> None: ...
    def close(self) -> None: ...


class SlotEngine:
    """A ``GenerationEngine`` with so many slots, each of which takes as long for a turn.

    With ``barrier`` it begins when as many requests are there.
    """

    class Settings(SettingsModel):
        seconds: float = 1.0
        """What a turn takes in its slot."""
        slots: int = 96
        """Turns that are sampled at once."""
        barrier: int = 0
        """Requests that are waited for before any of them begins; 0: none."""

    def __init__(self, model: Any, settings: SlotEngine.Settings, place: Any) -> None:
        self._settings = settings
        self._slots = asyncio.Semaphore(settings.slots)
        self._version: Version | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self._turns, self._busy = 0, 0.0
        self._running: dict[int, float] = {}

    async def generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        if self._settings.barrier:
            await self._together()
        async with self._slots:
            self._turns += 1
            turn, began = self._turns, time.monotonic()
            self._running[turn] = began
            await asyncio.sleep(self._settings.seconds)
            self._busy += time.monotonic() - self._running.pop(turn)
        word = next(token for token in range(100, 1000) if token not in sampling.banned_tokens)
        tokens = (word,) * 7 + sampling.end_tokens[:1]
        return Completion(
            tokens, (-0.5,) * len(tokens), FinishReason.END_TOKEN, self._version or Version(0, 0)
        )

    async def _together(self) -> None:
        all_there = asyncio.get_running_loop().create_future()
        self._waiting.append(all_there)
        if len(self._waiting) == self._settings.barrier:
            for waiting in self._waiting:
                waiting.set_result(None)
            self._waiting = []
        await all_there

    @property
    def busy(self) -> tuple[float, int]:
        """Seconds that slots have been taken so far, in all, and turns begun."""
        now = time.monotonic()
        return self._busy + sum(now - began for began in self._running.values()), self._turns

    async def leave(self, cohort: str) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...

    async def load(self, manifest: Manifest, tensors: Mapping[str, Any]) -> None:
        self._version = manifest.version

    def health(self) -> EngineHealth:
        return EngineHealth(self._version, len(self._running), len(self._waiting))


class SlotRollout(RolloutActor):
    """The rollout actor, which says how busy its engine was."""

    async def load(self, manifest: Manifest, source: Any, order: int = 0) -> None:
        await self.engine.load(manifest, {})

    async def busy(self) -> tuple[float, int]:
        engine = self.engine
        assert isinstance(engine, SlotEngine)
        return engine.busy


class QuietPolicy(SimulatedPolicy):
    """A trainer that takes no time."""

    async def start(self) -> None: ...


class GuiServices(CustomEngines):
    """Rollout actors with slots, and a policy that does nothing."""

    engine = SlotRollout

    def __init__(self, *made: Any) -> None:
        super().__init__(*made)
        self.policy = QuietPolicy(0.0)  # type: ignore[assignment]


class GuiDriver(Driver):
    """The driver itself, without what needs weights; at most ``environments`` play at once."""

    services: GuiServices
    environments: int

    def __init__(self, *made: Any) -> None:
        super().__init__(*made)
        self.marks: list[tuple[float, float, int]] = []

    async def verify(self) -> None:
        self.runner.admission.limit = self.environments
        await self.mark()

    async def observe(self) -> None: ...

    async def checkpoint(self, last: bool = False) -> None: ...

    async def mark(self) -> None:
        """What the engine did so far."""
        engines: Sequence[Any] = list(self.services.rollout.workers.values())
        busy, turns = await submit(engines[0].handle, SlotRollout.busy)
        self.marks.append((time.monotonic(), busy, turns))

    async def record(self, report: Mapping[str, float], collected: Collected) -> None:
        await super().record(report, collected)
        await self.mark()


class GuiActor(DriverActor):
    """The actor in which it lives."""

    def make(self, handle: Handle[LeasesEngines]) -> GuiDriver:
        services = GuiServices(self.config, self.folder, self.reporter.event)
        return GuiDriver(self.config, services, self.reporter, self.origin, handle, self.hashes)

    async def measure(self, warm: int, environments: int) -> dict[str, float]:
        """Run; returns what happened after the first ``warm`` steps: seconds, busy seconds of
        slots, and turns.
        """
        GuiDriver.environments = environments
        await self.main()
        driver = self.driver
        assert isinstance(driver, GuiDriver)
        (began, busy, turns), (ended, busy_end, turns_end) = driver.marks[warm], driver.marks[-1]
        return {"seconds": ended - began, "busy": busy_end - busy, "turns": turns_end - turns}
