"""The pool with real actors: leases, loss, replacement, hung workers, and the reservation they live
in.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.exceptions import RayTaskError
from ray.util.placement_group import remove_placement_group

from rayloop.actors.base import Actor
from rayloop.actors.failures import cause
from rayloop.actors.handles import create, submit
from rayloop.cluster.services import reserve
from rayloop.cluster.supervision.pool import Calls, Pool
from rayloop.core.events import Event
from rayloop.core.failures import (
    ConfigError,
    ResourcesUnavailable,
    RolesExhausted,
    WorkerLost,
    WorkerStartFailed,
)
from rayloop.launch.ray_variables import NICENESS, SUBREAPER, node_settings
from rayloop.run.config import RunConfig
from rayloop.run.demand import bundles
from rayloop.run.lifetime import RecoverySettings
from tests.support.runs import settings


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in (
            SUBREAPER,
            NICENESS,
        ):  # not the authentication: Ray reads that once in a process
            patch.setenv(name, node_settings(None)[name])
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            log_to_driver=False,
        )
    yield
    ray.shutdown()


class Worker(Actor):
    def __init__(self, broken: bool = False, wrong: bool = False) -> None:
        if broken:
            raise OSError("no model at /models/gone")
        if wrong:
            raise ConfigError("rollout.engine: two problems:\n  - one\nanother")
        self.loaded = 0

    async def health(self) -> int:
        return os.getpid()

    async def work(self, seconds: float = 0.0) -> int:
        await asyncio.sleep(seconds)
        return os.getpid()

    async def load(self, version: int) -> None:
        self.loaded = version

    async def version(self) -> int:
        return self.loaded

    async def fail(self) -> None:
        raise ValueError("the work is wrong")


class Fixture:
    """A pool with its events; ``spawned`` counts constructions, those after ``good`` are broken."""

    def __init__(
        self,
        size: int,
        replacements: int = 5,
        good: int = 100,
        admit: Callable[[Any], Awaitable[None]] | None = None,
    ):
        self.events: list[dict[str, Any]] = []
        self.spawned = 0
        self.good = good
        recovery = RecoverySettings(
            replacements=replacements, start_timeout=30.0, health_timeout=2.0
        )
        self.pool = Pool("tester", size, self._spawn, recovery, self._emit, admit)

    def _spawn(self, slot: int) -> Any:
        self.spawned += 1
        return create(Worker, {"num_cpus": 1}, self.spawned > self.good)

    def _emit(self, event: Event) -> None:
        self.events.append(event.record())

    def named(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    def run(self, test: Callable[[Pool[Worker]], Coroutine[Any, Any, None]]) -> None:
        async def all_of_it() -> None:
            await self.pool.start()
            try:
                await asyncio.wait_for(test(self.pool), 60)
            finally:
                self.pool.stop()

        asyncio.run(all_of_it())

    async def back(self) -> None:
        """Wait until every slot is served again."""
        while len(self.pool.workers) < self.pool.size:
            await asyncio.sleep(0.02)


async def pid_of(pool: Pool[Worker], serial: int) -> int:
    return int(await pool.workers[serial].handle.health.remote())


def test_leases_go_to_the_same_worker_for_an_affinity_else_to_the_least_loaded() -> None:
    async def test(pool: Pool[Worker]) -> None:
        first, second = await pool.lease("a"), await pool.lease("b")
        assert first.worker != second.worker
        assert (await pool.lease("a")).worker == first.worker
        assert (await pool.lease()).worker == second.worker, "1 lease against 2"
        for _ in range(2):
            pool.release(first.worker, "a")
        assert (await pool.lease("c")).worker == first.worker, "0 leases against 2"
        assert (await pool.lease("b")).worker == second.worker, "affinity before load"

    Fixture(2).run(test)


def test_a_lease_weighs_as_much_as_the_work_that_it_brings() -> None:
    async def test(pool: Pool[Worker]) -> None:
        group = await pool.lease("a", count=8)
        others = [await pool.lease() for _ in range(8)]
        assert {lease.worker for lease in others} == {3 - group.worker}
        for _ in range(7):
            pool.release(group.worker, "a")
        assert (await pool.lease("a")).worker == group.worker, "one of the eight is still there"
        pool.release(group.worker, "a", count=2)
        assert pool.workers[group.worker].leases == 0
        assert not pool.workers[group.worker].affinities

    Fixture(2).run(test)


def test_a_dead_worker_is_replaced_and_admitted_before_it_serves() -> None:
    current = 7

    async def admit(handle: Any) -> None:
        await handle.load.remote(current)

    fixture = Fixture(1, admit=admit)

    async def test(pool: Pool[Worker]) -> None:
        pid = await pid_of(pool, 1)
        working = asyncio.create_task(Calls(pool, 20, attempts=2).call(Worker.work, 0.5))
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        assert await working != pid, "the call was made again elsewhere"
        assert list(pool.workers) == [2]
        assert await Calls(pool, 5).call(Worker.version) == 7

    fixture.run(test)
    [lost], [back] = fixture.named("worker_lost"), fixture.named("worker_replaced")
    assert (lost["role"], lost["worker"], back["worker"]) == ("tester", 1, 1)
    assert "died" in lost["why"]


def test_actors_get_as_much_of_the_cores_as_other_programs() -> None:
    """With Ray's own niceness of 15 the actors of a run beside a program on each core never came
    up.
    """

    async def test(pool: Pool[Worker]) -> None:
        assert psutil.Process(await pid_of(pool, 1)).nice() == psutil.Process().nice()

    Fixture(1).run(test)


def test_a_late_complaint_does_no_harm() -> None:
    fixture = Fixture(2)

    async def test(pool: Pool[Worker]) -> None:
        lease = await pool.lease("a")
        pool.lost(lease.worker, "gone")
        pool.lost(lease.worker, "gone, says another")
        await fixture.back()
        pool.lost(lease.worker, "gone, says one more, late")
        pool.release(lease.worker, "a")
        assert sorted(pool.workers) == [2, 3]
        assert [worker.leases for worker in pool.workers.values()] == [0, 0]

    fixture.run(test)
    assert [event["why"] for event in fixture.named("worker_lost")] == ["gone"]
    assert fixture.spawned == 3


def test_an_error_of_the_work_is_no_loss_of_the_worker() -> None:
    fixture = Fixture(1)

    async def test(pool: Pool[Worker]) -> None:
        with pytest.raises(ValueError, match="the work is wrong"):
            await Calls(pool, 5, attempts=3).call(Worker.fail)
        assert pool.workers[1].leases == 0

    fixture.run(test)
    assert fixture.events == []


@pytest.mark.parametrize("notice", ["call", "check"])
def test_a_stopped_worker_outlives_its_deadline_and_is_killed(notice: str) -> None:
    fixture = Fixture(1)

    async def test(pool: Pool[Worker]) -> None:
        process = psutil.Process(await pid_of(pool, 1))
        process.suspend()
        began = time.monotonic()
        if notice == "call":
            assert await Calls(pool, 1.0, attempts=2).call(Worker.work) != process.pid
        else:
            await pool.check()
            await fixture.back()
        assert time.monotonic() - began < 20
        process.wait(20)  # raises when it still lives

    fixture.run(test)
    [lost] = fixture.named("worker_lost")
    method, deadline = ("work", 1) if notice == "call" else ("health", 2)
    assert lost["why"] == f"{method} of tester 0 did not answer within {deadline} s"


def test_a_call_gives_up_after_its_attempts() -> None:
    async def test(pool: Pool[Worker]) -> None:
        with pytest.raises(
            WorkerLost,
            match=(
                r"tester\.work failed 2 times, last: work of tester 0 did not answer within 0\.3 s"
            ),
        ):
            await Calls(pool, 0.3, attempts=2).call(Worker.work, 30.0)

    Fixture(1).run(test)


def test_the_role_is_exhausted_when_replacements_keep_failing() -> None:
    fixture = Fixture(1, replacements=2, good=1)

    async def test(pool: Pool[Worker]) -> None:
        pool.lost(1, "gone")
        with pytest.raises(
            RolesExhausted,
            match=r"tester role had fewer than 1 of 1 actors .* allows 2 per slot and hour.*gone",
        ):
            await pool.lease()
        with pytest.raises(RolesExhausted):
            await pool.check()

    fixture.run(test)
    failed = fixture.named("replacement_failed")
    assert len(failed) == 2
    assert "no model at /models/gone" in failed[0]["why"]


def test_a_constructor_that_raises_is_named() -> None:
    async def start() -> None:
        await Fixture(1, good=0).pool.start()

    with pytest.raises(
        WorkerStartFailed,
        match=r"an actor of role tester did not start: .*no model at /models/gone",
    ):
        asyncio.run(start())


def test_a_wrong_configuration_that_a_constructor_finds_arrives_as_such() -> None:
    """Ray passes on the text of the exception alone."""

    async def start() -> None:
        pool = Fixture(1).pool
        pool._spawn = lambda slot: create(Worker, {"num_cpus": 1}, wrong=True)
        await pool.start()

    with pytest.raises(ConfigError) as raised:
        asyncio.run(start())
    assert str(raised.value) == "rollout.engine: two problems:\n  - one\nanother"


def test_a_reservation_too_large_gives_the_arithmetic(tmp_path: Path) -> None:
    config = RunConfig.model_validate(
        settings(
            tmp_path,
            tmp_path,
            policy__ranks=4,
            policy__placement={"num_gpus": 1, "num_cpus": 20},
            recovery={"start_timeout": 0.5},
        )
    )
    events = []
    with pytest.raises(
        ResourcesUnavailable, match="needs 82 CPUs, the cluster has 4, 4 GPUs, the cluster has 0"
    ):
        asyncio.run(
            reserve(
                "too large",
                bundles(config),
                config.recovery.start_timeout,
                lambda event: events.append((event.kind, event.record()["lacks"])),
            )
        )
    assert events == [
        ("waiting_for_resources", "82 CPUs, the cluster has 4, 4 GPUs, the cluster has 0")
    ]


def test_a_reservation_that_others_hold_names_what_is_free(tmp_path: Path) -> None:
    wanted = bundles(RunConfig.model_validate(settings(tmp_path, tmp_path)))

    async def free(cpus: float) -> None:
        async with asyncio.timeout(30):
            while ray.available_resources().get("CPU", 0.0) != cpus:  # Ray says so with a delay
                await asyncio.sleep(0.1)

    async def twice() -> None:
        await reserve("first", wanted, 60.0, lambda *_, **__: None)
        # In place of the one before.
        held = await reserve("first", wanted, 60.0, lambda *_, **__: None)
        try:
            await free(1.0)
            with pytest.raises(
                ResourcesUnavailable,
                match=r"4 actors could not be placed within 1 s: free are 1 of 4 CPUs",
            ):
                await reserve("second", wanted, 1.0, lambda *_, **__: None)
        finally:
            remove_placement_group(held)
        await free(4.0)

    asyncio.run(twice())


def test_the_cause_is_found_through_two_actors() -> None:
    @ray.remote
    class Inner:
        def fail(self) -> None:
            raise ConfigError("the cause")

    @ray.remote
    class Outer:
        async def fail(self) -> None:
            inner = Inner.remote()
            await inner.fail.remote()

    with pytest.raises(RayTaskError) as caught:
        ray.get(Outer.remote().fail.remote(), timeout=30)
    assert type(cause(caught.value)) is ConfigError
    assert str(cause(caught.value)) == "the cause"


class Parent(Actor):
    def child(self) -> int:
        return subprocess.run(["sh", "-c", "exit 7"], check=False).returncode


def test_an_actor_learns_how_its_children_end(tmp_path: Path) -> None:
    """Also under Ray's subreaper, which makes workers ignore SIGCHLD (a plain worker here sees 0)."""
    plain = ray.remote(lambda: subprocess.run(["sh", "-c", "exit 7"], check=False).returncode)
    parent = create(Parent, {})
    assert ray.get([plain.remote(), submit(parent, Parent.child)], timeout=60) == [0, 7]
    assert "pid " in ray.get(submit(parent, Parent.stacks), timeout=60)
