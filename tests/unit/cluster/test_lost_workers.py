"""Many actors are lost, in simulated time: the run ends only when a role has no actor for too long."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError

from benchmarks.virtual_time import live
from rayloop.cluster.supervision.policy_group import PolicyGroup
from rayloop.cluster.supervision.pool import Pool
from rayloop.core.failures import PolicyLost, RolesExhausted
from rayloop.run.lifetime import RecoverySettings
from rayloop.run.sections import PolicySettings

START = 40.0
"""Seconds that an actor takes to start."""


class Site:
    """Where actors start: those of slots in ``down`` never answer, those in ``broken`` die at their
    start.
    """

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch, **recovery: Any) -> None:
        monkeypatch.setattr(ray, "kill", lambda handle: None)
        self.down, self.broken = set[int](), set[int]()
        self.events: list[str] = []
        self.spawned = 0
        settings = RecoverySettings(**recovery)
        self.pool: Pool[Any] = Pool(
            "rollout", size, self._spawn, settings, lambda e: self.events.append(e.kind)
        )

    def _spawn(self, slot: int) -> Any:
        self.spawned += 1

        async def health() -> None:
            await asyncio.sleep(1e9 if slot in self.down else START)
            if slot in self.broken:
                raise ActorDiedError

        return SimpleNamespace(health=SimpleNamespace(remote=health))

    def lose(self, *slots: int) -> None:
        for serial, worker in list(self.pool.workers.items()):
            if worker.slot in slots:
                self.pool.lost(serial, "its node died")

    async def after(self, seconds: float) -> int:
        """How many serve then.

        Raises what the pool gives up with meanwhile, as the driver would.
        """
        for _ in range(int(seconds / 5)):
            await asyncio.sleep(5)
            if self.pool._failure is not None:
                raise self.pool._failure
        return len(self.pool.workers)


def test_24_of_64_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        site = Site(64, monkeypatch)
        await site.pool.start()
        site.lose(*range(24))
        assert await site.after(60) == 64

    live(test())


def test_8_of_64_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        site = Site(64, monkeypatch)
        await site.pool.start()
        site.down |= set(range(8))
        site.lose(*range(8))
        assert await site.after(24 * 3600) == 56
        assert site.spawned - 64 <= 8 * 13 + 24 * 8 * 12, (
            "an attempt that fails is one of the budget"
        )
        site.down.clear()
        assert await site.after(3600) == 64, "the node came back, a day later"

    live(test())


def test_100_losses_in_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        site = Site(4, monkeypatch)
        await site.pool.start()
        for number in range(100):
            site.lose(number % 4)
            await site.after(24 * 3600 / 100)
        assert len(site.pool.workers) == 4
        assert site.pool.replaced == 100

    live(test())


def test_a_slot_that_is_lost_again_and_again_waits_while_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        site = Site(2, monkeypatch, replacements=3)
        await site.pool.start()
        site.broken.add(0)
        site.lose(0)
        assert await site.after(1000) == 1
        assert site.spawned - 2 == 3
        assert await site.after(3600) == 1
        assert site.spawned - 2 == 6
        assert (await site.pool.lease()).slot == 1

    live(test())


@pytest.mark.parametrize("size", [2, 1])
def test_a_role_without_actors_ends_the_run_after_the_start_timeout(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    async def test() -> None:
        site = Site(size, monkeypatch, start_timeout=300.0)
        await site.pool.start()
        site.down.add(0)
        site.lose(0)
        if size == 2:
            assert await site.after(4000) == 1
        else:
            with pytest.raises(
                RolesExhausted,
                match=(
                    r"rollout role had fewer than 1 of 1 actors .* \(300 s\).* last loss: start of"
                ),
            ):
                await site.after(4000)
            assert 300 <= asyncio.get_running_loop().time() - START <= 310

    live(test())


def test_a_wait_for_an_engine_lasts_as_long_as_its_replacement_is_being_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first attempt takes nearly all of ``start_timeout`` and fails; the second began in time."""

    async def test() -> None:
        site = Site(1, monkeypatch, start_timeout=50.0)
        await site.pool.start()
        site.broken.add(0)
        site.lose(0)
        asyncio.get_running_loop().call_later(START + 1, site.broken.clear)
        assert (await site.pool.lease()).worker == 3
        assert asyncio.get_running_loop().time() == pytest.approx(3 * START)

    live(test())


def test_nobody_waits_for_what_can_never_come(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        site = Site(1, monkeypatch, replacements=0)
        await site.pool.start()
        site.lose(0)
        with pytest.raises(RolesExhausted, match="allows 0 per slot and hour"):
            await site.pool.lease()
        assert asyncio.get_running_loop().time() < START + 1

    live(test())


def test_the_policys_node_is_lost_ten_times_in_ten_hours() -> None:
    async def test() -> None:
        group = PolicyGroup(PolicySettings(), lambda rank: None)  # type: ignore[arg-type,return-value]
        for _ in range(10):
            await group.afford(PolicyLost("its node died"))
            await asyncio.sleep(3600)
        for _ in range(6):
            await group.afford(PolicyLost("again at once"))
        with pytest.raises(PolicyLost, match="the seventh"):
            await group.afford(PolicyLost("the seventh within a moment"))

    live(test())
