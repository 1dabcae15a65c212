"""Episodes in flight follow what the engines' caches hold."""

from __future__ import annotations

import asyncio
import math

import pytest

from rayloop.core.protocols import EngineHealth
from rayloop.core.types import Version
from rayloop.rollout.scheduler import ConcurrencyLimit

V = Version(0, 1)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Crowd:
    """Episodes that stay inside until they may go."""

    def __init__(self, admission: ConcurrencyLimit) -> None:
        self.admission, self.order = admission, list[int]()
        self._go = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []

    async def add(self, count: int) -> None:
        self.tasks += [asyncio.create_task(self._play(len(self.tasks) + i)) for i in range(count)]
        await settle()

    async def _play(self, number: int) -> None:
        async with self.admission.room():
            self.order.append(number)
            await self._go.wait()

    async def end(self) -> None:
        self._go.set()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def test_engines_that_know_no_cache_never_limit() -> None:
    admission = ConcurrencyLimit()
    admission.observe([EngineHealth(V, 500, 900), EngineHealth(V, 500, 900)])
    assert admission.limit == math.inf


def test_a_full_cache_with_a_queue_lets_in_what_is_decoded_and_room_lets_in_more() -> None:
    async def test() -> None:
        crowd = Crowd(admission := ConcurrencyLimit())
        await crowd.add(40)
        assert admission.inside == 40
        admission.observe([EngineHealth(V, 10, 10, 0.95), EngineHealth(V, 15, 5, 0.6)])
        assert admission.limit == 25
        await crowd.add(10)
        assert admission.inside == 40, "nobody is thrown out, nobody comes in"
        for task in crowd.tasks[:20]:
            task.cancel()
        await settle()
        assert admission.inside == 25
        assert crowd.order[40:] == [40, 41, 42, 43, 44]
        admission.observe([EngineHealth(V, 12, 0, 0.5), EngineHealth(V, 13, 0, 0.95)])
        assert admission.limit == 25, "one engine is full"
        admission.observe([EngineHealth(V, 12, 0, 0.5), EngineHealth(V, 13, 0, 0.7)])
        await settle()
        assert (admission.limit, admission.inside) == (32, 30)
        assert admission.metrics == {
            "rollout/cache": 0.7,
            "rollout/waiting": 0.0,
            "rollout/in_flight_limit": 32.0,
        }
        await crowd.end()
        assert admission.inside == 0

    asyncio.run(test())


def test_the_episodes_of_a_call_are_let_in_together_and_counted_each() -> None:
    async def test() -> None:
        admission = ConcurrencyLimit()
        admission.limit = 10
        inside: list[str] = []

        async def call(name: str, episodes: int, go: asyncio.Event) -> None:
            async with admission.room(episodes):
                inside.append(name)
                await go.wait()

        first, second = asyncio.Event(), asyncio.Event()
        tasks = [
            asyncio.create_task(call(*c))
            for c in (("a", 8, first), ("b", 8, second), ("c", 1, second))
        ]
        await settle()
        assert (inside, admission.inside) == (
            ["a", "b"],
            16,
        ), "there was room for some of b's; nobody passes it by"
        first.set()
        await settle()
        assert (inside, admission.inside) == (["a", "b", "c"], 9)
        second.set()
        await asyncio.gather(*tasks)
        assert admission.inside == 0

    asyncio.run(test())


def test_every_engine_keeps_work_whatever_it_says() -> None:
    admission = ConcurrencyLimit()
    admission.observe([EngineHealth(V, 0, 50, 1.0), EngineHealth(V, 0, 50, 1.0)])
    assert admission.limit == 2


@pytest.mark.parametrize("granted", [False, True])
def test_who_gives_up_waiting_takes_no_room(granted: bool) -> None:
    """Also when its turn came in the same moment."""

    async def test() -> None:
        crowd = Crowd(admission := ConcurrencyLimit())
        admission.limit = 1
        await crowd.add(3)
        if granted:
            crowd.tasks[0].cancel()
            await asyncio.sleep(0)
        crowd.tasks[1].cancel()
        await settle()
        if not granted:
            crowd.tasks[0].cancel()
            await settle()
        assert (admission.inside, crowd.order[-1]) == (1, 2)
        await crowd.end()
        assert admission.inside == 0

    asyncio.run(test())
