"""A run without Ray: the real rollout manager, runner and pools over actors that are plain objects
of this process.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError

from rayloop.cluster.supervision.attempts import EpisodeRunner
from rayloop.cluster.supervision.pool import Pool
from rayloop.core.deadlines import background
from rayloop.core.events import Event
from rayloop.core.failures import Cause, DataFailure, Failure, Scope
from rayloop.core.groups import Group, Scored, Unscored
from rayloop.core.ledger import Ledger
from rayloop.core.types import EndReason, RolloutRequest, Summary, TrajectoryId, Version
from rayloop.grpo.advantage import build_advantage, with_advantages
from rayloop.grpo.filters import build_filters
from rayloop.grpo.selection import apply_filters
from rayloop.rollout.colocation import Colocation
from rayloop.rollout.failed_episodes import FailureHistory
from rayloop.rollout.manager import RolloutManager
from rayloop.run.config import RunConfig
from rayloop.run.order import training_rows
from tests.support.runs import settings


class Handle:
    """An actor: ``run_episodes`` and ``score`` as the runner calls them.

    ``dead`` is set by ``ray.kill``; calls under way then fail.
    """

    def __init__(self, world: World, slot: int) -> None:
        self.world, self.slot, self.dead = world, slot, asyncio.Event()
        self.played: list[str] = []
        self.calls: list[list[int]] = []
        """The samples that each call of ``run_episodes`` was asked for."""
        self.health = SimpleNamespace(remote=lambda: asyncio.sleep(0))
        self.run_episodes = SimpleNamespace(
            options=lambda num_returns: SimpleNamespace(remote=self._run_episodes)
        )
        self.score = SimpleNamespace(remote=self._score)

    def _run_episodes(
        self, requests: Sequence[RolloutRequest], lease: Any, driver: Any
    ) -> tuple[Any, ...]:
        self.calls.append([request.id.sample for request in requests])
        for request in requests:
            self.played.append(request.task.id)
            self.world.plays[request.task.id] += 1
            self.world.engines[request.id] = lease.slot
        return self._unless_dead(_all(self.world.behave(self, one) for one in requests)), *(
            object() for _ in requests
        )

    async def _unless_dead(self, work: Awaitable[Any]) -> Any:
        working, dead = asyncio.ensure_future(work), asyncio.ensure_future(self.dead.wait())
        await asyncio.wait({working, dead}, return_when=asyncio.FIRST_COMPLETED)
        if self.dead.is_set():
            working.cancel()
            raise ActorDiedError()
        dead.cancel()
        return await working

    def _score(self, task: Any, step: int, *payloads: Any) -> Awaitable[list[Scored | Unscored]]:
        if self.world.config.reward.per == "group":
            return self._unless_dead(self.world.score_group(self, list(payloads)))
        return self._unless_dead(_all(self.world.score(self) for _ in payloads))


async def _all(works: Iterable[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*works)


def failed(
    request: RolloutRequest | None,
    why: str,
    *,
    hung: bool = False,
    contained: bool = False,
    bug: bool = False,
) -> Failure:
    """The environment itself failed."""
    cause = Cause.HUNG if hung else Cause.BUG if bug else Cause.RAISED
    return Failure(
        cause,
        Scope.PROCESS if hung and not contained else Scope.EPISODE,
        retryable=not bug,
        why=why,
    )


def bad_data(request: RolloutRequest, why: str, own: bool = True) -> Failure:
    """A file could not be used, as the environment actor says (``own``), or an engine."""
    return Failure(
        Cause.BAD_DATA,
        Scope.EPISODE if own else Scope.ENGINE,
        retryable=True,
        why=why,
        path="/data/x.png",
    )


class Houses:
    """Nodes as a pool asks them: an actor of slot ``n`` is on the ``n``th one, or on the last; none
    is ever lost.
    """

    def __init__(self, *names: str) -> None:
        self.names = names

    async def locate(self, handle: Handle, role: str) -> str:
        await asyncio.sleep(0)
        return self.names[min(handle.slot, len(self.names) - 1)]

    async def lost(self, node: str) -> bool:
        await asyncio.sleep(0)
        return False

    def add(self, evict: Any, role: str) -> None: ...

    def left(self, node: str, role: str) -> None: ...

    def failed(self, node: str) -> None: ...

    def name(self, node: str) -> str:
        return node


class World:
    """``behave(actor, request)`` is what an environment actor does with an episode; ``well`` is an
    episode that goes well; ``nodes`` are those of its actors.
    """

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        behave: Callable[[Handle, RolloutRequest], Awaitable[Any]],
        nodes: Any = None,
        **changes: Any,
    ) -> None:
        monkeypatch.setattr(ray, "kill", lambda handle: handle.dead.set())
        monkeypatch.setattr(ray, "cancel", lambda result: None)
        self.config = RunConfig.model_validate(
            settings(folder, folder, data__order="file", **changes)
        )
        self.behave, self.random, self.nodes = behave, random.Random(0), nodes
        self.plays: Counter[str] = Counter()
        self.engines: dict[TrajectoryId, int] = {}
        """The slot of the engine that an episode was last given."""
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.bad: list[DataFailure] = []
        self.version = Version(1, 0)
        self.ledger = Ledger()
        reporter: Any = SimpleNamespace(event=self._emit, bad_row=self.bad.append)
        self.history = FailureHistory(self.config.environment)
        self.rollouts = RolloutManager(
            self.config, self.ledger, training_rows(self.config, reporter), reporter, self.history
        )
        self.spawned: list[Handle] = []
        self.environment = self._pool("environment", self.config.environment.actors)

    def _emit(self, event: Event) -> None:
        fields = event.record()
        self.events.append((fields.pop("event"), fields))

    def _pool(self, role: str, size: int) -> Pool:
        def spawn(slot: int) -> Handle:
            self.spawned.append(Handle(self, slot))
            return self.spawned[-1]

        return Pool(role, size, spawn, self.config.recovery, self._emit, nodes=self.nodes)

    async def score(self, actor: Handle) -> Scored | Unscored:
        """What a reward actor answers. Tests replace it."""
        await asyncio.sleep(0)
        return Scored(self.random.random())

    async def score_group(self, actor: Handle, payloads: list[Any]) -> list[Scored | Unscored]:
        """The same with ``reward.per: group``."""
        return [await self.score(actor) for _ in payloads]

    def named(self, kind: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.events if event == kind]

    def well(self, request: RolloutRequest) -> Summary:
        return Summary(
            request.id,
            request.attempt,
            request.task.id,
            "",
            EndReason.DONE,
            10,
            5,
            1,
            0,
            0,
            True,
            self.version,
            self.version,
        )

    async def finish(self, group: Group) -> Group:
        group = self.rollouts.finished.replay(group)
        group = with_advantages(group, build_advantage(self.config.algorithm.advantage))
        return apply_filters(group, build_filters(self.config.algorithm.filtering.filters))

    def run(self, steps: int) -> None:
        """Collect this many steps. Raises what ends a run."""
        asyncio.run(asyncio.wait_for(self._run(steps), 60))

    async def player(self) -> EpisodeRunner:
        """The run's player, over pools that have started."""
        rollout, reward = (
            self._pool("rollout", self.config.rollout.actors),
            self._pool("reward", self.config.reward.actors),
        )
        for pool in (self.environment, rollout, reward):
            await pool.start()
        services: Any = SimpleNamespace(
            environment=self.environment, rollout=rollout, reward=reward, colocation=Colocation()
        )
        return EpisodeRunner(
            self.config, services, None, self._emit, self.rollouts.quarantine, self.history
        )

    async def _run(self, steps: int) -> None:
        player = await self.player()
        self.rollouts.synced(self.version)
        async with background(self.rollouts.run(player, self.finish), self._supervise()):
            for _ in range(steps):
                collected = await self.rollouts.collect(self.version, {})
                self.rollouts.ready.settle_trained(collected.groups)
                self.ledger.check()
                self.version = Version(1, self.version.step + 1)
                self.rollouts.synced(self.version)

    async def _supervise(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            await self.environment.check()


BAD = "train-3"
"""The task that something is wrong with."""
Behave = Callable[[Handle, RolloutRequest], Awaitable[Any]]
Make = Callable[..., World]


def broken(made: World) -> Behave:
    """An environment whose code is wrong: every episode fails in the same way."""

    async def behave(actor: Handle, request: RolloutRequest) -> Any:
        await asyncio.sleep(0)
        return failed(request, "Guess.step must return StepResult, not str", bug=True)

    return behave


def hangs(made: World) -> Behave:
    """The bad task's episodes do not answer; the deadline says so."""

    async def behave(actor: Handle, request: RolloutRequest) -> Any:
        await asyncio.sleep(0.03 if request.task.id == BAD else 0.01)
        return (
            failed(request, "step gave no answer", hung=True)
            if request.task.id == BAD
            else made.well(request)
        )

    return behave
