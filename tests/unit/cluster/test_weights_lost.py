"""The synced weights go with the node that held them: engines that come wait for others, which are
made at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import exceptions

from benchmarks.virtual_time import live
from rayloop.actors.rollout import RolloutActor
from rayloop.cluster.loop import weight_sync
from rayloop.cluster.loop.loggers import open_logger
from rayloop.cluster.loop.weight_sync import WeightSync
from rayloop.core.failures import AnswerLate, BroadcastFailed, PolicyLost
from rayloop.core.types import Version
from rayloop.rollout.colocation import Colocation
from rayloop.run.config import RunConfig
from rayloop.run.reporter import Reporter
from rayloop.transports.seam import WeightUpdate
from tests.support.local import LocalActor
from tests.support.runs import settings

NOW, NEXT = Version(1, 5), Version(1, 6)
HOUR = 3600.0


class Engine:
    """Loads what is there. ``had``: what it loaded."""

    def __init__(self, lost: set[str]) -> None:
        self.lost, self.had = lost, list[str]()

    async def load(self, manifest: Any, source: str, order: int = 0) -> None:
        await asyncio.sleep(0)
        if source in self.lost:
            error = exceptions.OwnerDiedError("00" * 28, "owner", "site")
            raise exceptions.RayTaskError("load", "trace", error).as_instanceof_cause()
        self.had.append(source)


class Late(Engine):
    """Does not get these sources."""

    async def load(self, manifest: Any, source: str, order: int = 0) -> None:
        if source in self.lost:
            await asyncio.sleep(HOUR)
        self.had.append(source)


class Slow:
    """Engines in service that take these seconds for each load, in turn.

    ``blamed``: which of them were replaced.
    """

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.had, self.blamed = list(seconds), list[str](), list[str]()
        self.deadline, self.spares = 0.0, False

    def within(self, deadline: float, spares: bool = False) -> Slow:
        self.deadline, self.spares = deadline, spares
        return self

    async def everywhere(self, method: Any, manifest: Any, source: str, order: int) -> None:
        self.had.append(source)
        took = self.seconds.pop(0)
        await asyncio.sleep(min(took, self.deadline))
        if took > self.deadline and self.spares:
            raise AnswerLate("load of rollout 0 did not answer")
        if took > self.deadline:
            self.blamed.append(source)


class Stage:
    """A policy whose exports are called first, second, ...; ``serving`` is what engines in service
    do with them.
    """

    def __init__(self, folder: Path) -> None:
        config = RunConfig.model_validate(settings(folder, Path("/models/any")))
        self.lost = {"first"}
        self.exports = iter(["first", "second", "third"])
        self.alive = True
        self.serving = Engine(set())
        self.reporter = Reporter(config, folder, open_logger)
        services: Any = SimpleNamespace(
            policy=self, rollout=self, weights=str(folder), colocation=Colocation()
        )
        self.weight_sync = WeightSync(config, services, self.reporter)

    async def export(self, version: Version) -> WeightUpdate[str]:
        if not self.alive:
            raise PolicyLost("rank 0 died")
        return WeightUpdate(SimpleNamespace(version=version), next(self.exports))  # type: ignore[arg-type]

    def within(self, deadline: float, spares: bool = False) -> Stage:
        return self

    async def everywhere(self, method: Any, manifest: Any, source: str, order: int) -> None:
        await self.serving.load(manifest, source)

    def reported(self, kind: str) -> int:
        return sum(record["event"] == kind for _, record in self.reporter.updates)

    @asynccontextmanager
    async def resending(self) -> AsyncIterator[asyncio.Task[None]]:
        task = asyncio.create_task(self.weight_sync.resend_lost(lambda: NOW))
        try:
            yield task
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError, PolicyLost):
                await task

    def admit(self, engine: Engine) -> asyncio.Task[None]:
        return asyncio.create_task(self.weight_sync.admit(LocalActor(engine)))


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


@pytest.fixture(autouse=True)
def _calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doubles of a pool answer calls themselves."""
    monkeypatch.setattr(
        weight_sync, "Calls", lambda pool, deadline, spares: pool.within(deadline, spares)
    )


def act(play: Any) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(10):
            await play

    asyncio.run(bounded())


def test_a_policy_that_lives_publishes_again_and_all_who_wait_are_admitted(stage: Stage) -> None:
    async def play() -> None:
        await stage.weight_sync.send(NOW)
        engines = [Engine(stage.lost) for _ in range(3)]
        async with stage.resending():
            await asyncio.gather(*(stage.admit(engine) for engine in engines))
        assert [engine.had for engine in engines] == [["second"]] * 3
        assert stage.serving.had == ["first", "second"], "once for all of them"
        assert stage.reported("weights_lost") >= 1

    act(play())


def test_while_an_update_is_under_way_the_next_weights_are_waited_for(stage: Stage) -> None:
    async def play() -> None:
        await stage.weight_sync.send(NOW)
        engine = Engine(stage.lost)
        async with stage.resending(), stage.weight_sync.update_lock:
            admitted = stage.admit(engine)
            await asyncio.sleep(0.05)
            assert not admitted.done()
            assert stage.serving.had == ["first"], "no export in the middle of an update"
            await stage.weight_sync.send(NEXT)
            await admitted
        assert engine.had == ["second"]
        assert stage.serving.had == ["first", "second"]

    act(play())


def test_a_policy_that_went_with_them_is_lost_and_who_waits_is_admitted_after_it_is_rebuilt(
    stage: Stage,
) -> None:
    async def play() -> None:
        await stage.weight_sync.send(NOW)
        engine, stage.alive = Engine(stage.lost), False
        admitted = stage.admit(engine)
        async with stage.resending() as resending:
            with pytest.raises(PolicyLost, match="rank 0 died"):
                await resending
        assert not admitted.done()
        stage.alive = True
        await stage.weight_sync.send(Version(2, 4))
        await admitted
        assert engine.had == ["second"]

    act(play())


def test_weights_that_are_lost_while_they_are_published_are_a_lost_policy(stage: Stage) -> None:
    stage.serving = Engine({"first"})
    with pytest.raises(
        PolicyLost, match=r"the weights of version 1\.5 were lost while they were synced"
    ):
        act(stage.weight_sync.send(NOW))


def slow(stage: Stage, *seconds: float) -> Slow:
    """In place of the stage's engines; the settings allow 600 s for a load."""
    made = Slow(*seconds)
    stage.weight_sync.services.rollout = made  # type: ignore[assignment]
    stage.weight_sync.services.policy.exports = iter([f"export {n}" for n in range(1, 9)])  # type: ignore[attr-defined]
    return made


def sent(stage: Stage, *versions: Version) -> float:
    """Send these; returns the seconds, on a clock that moves by itself, that the last one took."""

    async def play() -> float:
        now = asyncio.get_running_loop().time
        for version in versions:
            began = now()
            await stage.weight_sync.send(version)
        return now() - began

    return live(play())


VERSIONS = tuple(Version(1, step) for step in range(4))


def test_a_load_that_stands_still_is_given_a_new_reference_before_an_engine_is_blamed(
    stage: Stage,
) -> None:
    engines = slow(stage, 0.1, 0.2, 0.1, HOUR, 0.1)
    took = sent(stage, *VERSIONS)
    assert engines.had == ["export 1", "export 2", "export 3", "export 4", "export 5"]
    assert engines.blamed == []
    assert took == pytest.approx(60.1), "not the 600 s that the first load has"
    assert stage.reported("weights_lost") == 1


def test_an_engine_that_is_late_for_both_is_blamed(stage: Stage) -> None:
    engines = slow(stage, 0.1, 0.2, 0.1, HOUR, HOUR, 0.1)
    assert sent(stage, *VERSIONS) == pytest.approx(120.0)
    assert engines.blamed == ["export 5"]
    sent(stage, Version(1, 4))
    assert engines.deadline == 60.0, (
        "what an engine that was replaced took says nothing about the next load"
    )


def test_the_bound_follows_the_last_loads_and_the_first_has_the_longest(stage: Stage) -> None:
    engines = slow(stage, 400.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0)
    bounds = []
    for step in range(7):
        sent(stage, Version(1, step))
        bounds.append((engines.deadline, engines.spares))
    assert bounds == [(600.0, False)] * 6 + [(pytest.approx(200.0), True)]


@pytest.mark.parametrize(
    ("never", "had"), [({"export 1"}, ["export 2"]), ({"export 1", "export 2"}, [])]
)
def test_a_new_engine_whose_first_load_stands_still_gets_a_new_reference(
    stage: Stage, never: set[str], had: list[str]
) -> None:
    """A second one that stands still is the engine's fault, which is then replaced."""
    slow(stage, 0.1, 0.1)
    engine = Late(never)

    async def play() -> float:
        now = asyncio.get_running_loop().time
        await stage.weight_sync.send(NOW)
        async with stage.resending():
            began = now()
            with nullcontext() if had else pytest.raises(AnswerLate):
                await stage.admit(engine)
            return now() - began

    assert live(play()) == pytest.approx(60.1 if had else 660.1, abs=0.2)
    assert (engine.had, stage.reported("weights_lost")) == (had, 1)


class Ranks:
    """A policy whose broadcasts take 0.1 s, unless ``stands_still``: then a wait fails it."""

    stands_still = False
    invited = 0

    async def invite(self, members: Any, failures: int, timeout: float = 120.0) -> float:
        """How long the members of the group wait: 120 s for the first meeting."""
        self.invited += 1
        return 120.0 if self.invited == 1 else timeout

    async def send(self, version: Version, meeting: float) -> None:
        await asyncio.sleep(meeting if self.stands_still else 0.1)
        if self.stands_still:
            raise BroadcastFailed("the link is down")

    async def export(self, version: Version) -> WeightUpdate[str]:
        return WeightUpdate(SimpleNamespace(version=version), "copy")  # type: ignore[arg-type]


class Members(Slow):
    """Engines that receive broadcasts, and load the copy of one that fails. ``silent``: one of
    them hangs.
    """

    silent = False
    workers = (0,)

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks

    async def everywhere(self, method: Any, manifest: Any, source: Any, order: int) -> None:
        self.seconds = [0.1]
        if source != "copy" and self.ranks.stands_still:
            self.seconds = [HOUR if self.silent else source]
        await super().everywhere(method, manifest, source, order)
        if self.seconds == [] and source != "copy" and self.ranks.stands_still and not self.silent:
            raise BroadcastFailed("the link is down")


@pytest.mark.parametrize(("silent", "seconds"), [(False, 60.1), (True, 120.1)])
def test_a_broadcast_that_stands_still_is_bounded_by_the_last_ones(
    tmp_path: Path, silent: bool, seconds: float
) -> None:
    """Not by 120 s for each wait, and 600 s until an engine that hangs is replaced."""
    config = RunConfig.model_validate(
        settings(tmp_path, Path("/models/any"), weight_sync__transport={"kind": "collective"})
    )
    reporter = Reporter(config, tmp_path, open_logger)
    ranks = Ranks()
    members = Members(ranks)
    members.silent = silent
    services: Any = SimpleNamespace(
        policy=ranks, rollout=members, weights=str(tmp_path), colocation=Colocation()
    )
    sync = WeightSync(config, services, reporter)

    async def play() -> float:
        for step in range(3):
            await sync.send(Version(1, step))
        ranks.stands_still = True
        began = asyncio.get_running_loop().time()
        await sync.send(Version(1, 3))
        return asyncio.get_running_loop().time() - began

    assert live(play()) == pytest.approx(seconds)
    assert len(members.blamed) == silent
    failed = [record for _, record in reporter.updates if record["event"] == "broadcast_failed"]
    assert [record["version"] for record in failed] == ["1.3"]
    assert members.had[-1] == "copy"


def test_an_update_that_comes_after_a_later_one_is_left_out() -> None:
    loaded = list[str]()

    async def take(engine: Any, manifest: Any, source: str) -> None:
        await asyncio.sleep(1.0 if source == "slow" else 0.0)
        loaded.append(source)

    async def play() -> None:
        actor = RolloutActor.__new__(RolloutActor)
        actor.engine, actor.receiver = None, SimpleNamespace(take=take)  # type: ignore[assignment]
        actor._order, actor._loading = 0, asyncio.Lock()
        any_version: Any = None
        under_way = asyncio.create_task(actor.load(any_version, "slow", 1))
        await asyncio.sleep(0.1)
        await actor.load(any_version, "new", 2)
        await actor.load(any_version, "late", 1)
        await actor.load(any_version, "again", 2)
        await under_way

    live(play())
    assert loaded == ["slow", "new", "again"]
