"""Engines and ranks that have the GPUs in turn: every order of calls, with a failure of each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rayloop.core.failures import PolicyLost, WorkerLost
from rayloop.rollout.colocation import Colocation, SleepCalls

CALLS = ("engines sleep", "ranks wake", "ranks sleep", "engines wake")


class Gpu:
    """Two roles on one GPU: it refuses that both have tensors there.

    ``failing``: the call that fails once.
    """

    def __init__(self, failing: str = "") -> None:
        self.failing, self.calls = failing, list[str]()
        self.engines, self.ranks = True, False
        self.weights = True
        self.colocation = Colocation(
            "level2", SleepCalls(self.sleep, self.wake_up, self.ranks_sleep, self.ranks_wake_up)
        )

    async def sleep(self, level: str) -> None:
        await self._call("engines sleep", level)
        self.engines = False
        self.weights = self.weights and level == "level1"

    async def wake_up(self) -> None:
        await self._call("engines wake")
        self.engines = True
        assert not self.ranks

    async def ranks_sleep(self) -> None:
        await self._call("ranks sleep")
        self.ranks = False

    async def ranks_wake_up(self) -> None:
        await self._call("ranks wake")
        assert not self.engines
        self.ranks = True

    async def _call(self, name: str, *details: str) -> None:
        self.calls.append(" ".join((name, *details)))
        await asyncio.sleep(0)
        if name == self.failing:
            self.failing = ""
            raise (
                PolicyLost(f"{name} failed")
                if name.startswith("ranks")
                else WorkerLost(f"{name} failed")
            )


async def started(gpu: Gpu) -> None:
    async def ranks() -> None:
        assert not gpu.engines
        gpu.ranks = True

    await gpu.colocation.start_ranks(ranks())


async def step(gpu: Gpu) -> None:
    await gpu.colocation.to_policy()
    assert gpu.ranks
    await gpu.colocation.to_rollout()
    assert gpu.engines
    gpu.weights = True


def test_a_step_calls_each_role_in_turn() -> None:
    async def main() -> list[str]:
        gpu = Gpu()
        await started(gpu)
        await gpu.colocation.to_policy()  # nothing to do
        await step(gpu)
        await step(gpu)
        return gpu.calls

    turn = ["engines sleep level2", "ranks wake"]
    assert asyncio.run(main()) == [
        "engines sleep level1",
        "ranks sleep",
        "engines wake",
        *turn,
        "ranks sleep",
        "engines wake",
    ]


@pytest.mark.parametrize("failing", CALLS)
def test_after_a_failure_of_any_call_nobody_has_the_gpu_and_the_next_switch_works(
    failing: str,
) -> None:
    async def main() -> None:
        gpu = Gpu()
        await started(gpu)
        await step(gpu)
        gpu.failing = failing
        with pytest.raises((PolicyLost, WorkerLost), match=f"{failing} failed"):
            await step(gpu)
        assert gpu.colocation.awake == "nobody"
        assert not (gpu.engines and gpu.ranks)
        await step(gpu)
        assert gpu.colocation.awake == "rollout"

    asyncio.run(main())


def test_ranks_that_start_anew_find_the_gpu_free() -> None:
    async def main() -> None:
        gpu = Gpu("ranks wake")
        await started(gpu)
        await gpu.colocation.to_rollout()
        with pytest.raises(PolicyLost):
            await gpu.colocation.to_policy()
        gpu.ranks = False  # they died
        await started(gpu)
        await step(gpu)

    asyncio.run(main())


async def compare(gpu: Gpu) -> None:
    async with gpu.colocation.ranks_between():
        assert gpu.ranks
        raise WorkerLost("all payloads are gone")


def test_ranks_that_only_compare_leave_the_engines_their_weights() -> None:
    async def main() -> Gpu:
        gpu = Gpu()
        await started(gpu)
        await step(gpu)
        with pytest.raises(WorkerLost):
            await compare(gpu)
        return gpu

    gpu = asyncio.run(main())
    assert gpu.weights
    assert gpu.engines
    assert gpu.calls[-4:] == ["engines sleep level1", "ranks wake", "ranks sleep", "engines wake"]


def test_an_engine_starts_only_while_the_engines_have_the_gpu() -> None:
    order: list[str] = []

    async def start(gpu: Gpu) -> None:
        async with gpu.colocation.starting():
            assert gpu.colocation.awake == "rollout"
            order.append("starts")
            await asyncio.sleep(0.01)
            order.append("serves")

    async def main() -> None:
        gpu = Gpu()
        await started(gpu)
        waiting = asyncio.create_task(start(gpu))
        await asyncio.sleep(0.01)
        assert order == []
        await gpu.colocation.to_rollout()
        await asyncio.sleep(0)
        await gpu.colocation.to_policy()  # waits for the engine that starts
        order.append("policy")
        await waiting

    asyncio.run(main())
    assert order == ["starts", "serves", "policy"]


def test_without_the_setting_nothing_is_called() -> None:
    async def main() -> str:
        colocation = Colocation(None, SleepCalls(*_never))
        await colocation.to_policy()
        await colocation.to_rollout()
        async with colocation.ranks_between(), colocation.starting():
            return await colocation.start_ranks(asyncio.sleep(0, "started"))

    def never(*_: Any) -> Awaitable[object]:
        raise AssertionError

    _never: list[Callable[..., Awaitable[object]]] = [never] * 4
    assert asyncio.run(main()) == "started"
