"""A stop of the driver: what is then on disk is what training produced, or nothing, and the exit
code says which.

Driver, publisher, policy group, rank, engine and checkpoints are the real ones, the rank behind a
local handle: what was asked of it is done, in order, also when nobody waits for it any more. Probes
and their comparison, which need engines, are made up.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import ActorDiedError, ActorUnavailableError

from rayloop.actors.policy import LogprobGap, PolicyRank, RankSettings
from rayloop.cluster.driver import Driver
from rayloop.cluster.loop.saving import Saving, capture
from rayloop.cluster.loop.weight_check import WeightCheck
from rayloop.cluster.services import TrainingServices
from rayloop.cluster.supervision.policy_group import PolicyGroup
from rayloop.core.deadlines import until_stopped
from rayloop.core.failures import (
    CheckpointError,
    NotSaved,
    PolicyLost,
    Preempted,
    RayloopError,
    RolesExhausted,
)
from rayloop.core.types import Version
from rayloop.rollout.colocation import Colocation
from rayloop.run.checkpoint import Checkpoint, CheckpointStore
from rayloop.run.config import RunConfig
from rayloop.run.identity import about
from rayloop.run.preflight import prepare
from tests.support.drivers import made_driver
from tests.support.local import LocalActor
from tests.support.runs import settings
from tests.support.saved import saved_tensors

Tensors = dict[str, torch.Tensor]


class Counted(Coroutine[Any, Any, Any]):
    """A coroutine that calls ``tick`` whenever it waits."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], tick: Callable[[], None]) -> None:
        self._coroutine, self._tick = coroutine, tick

    def send(self, value: Any) -> Any:
        waits_for = self._coroutine.send(value)
        self._tick()
        return waits_for

    def throw(self, *error: Any) -> Any:
        waits_for = self._coroutine.throw(*error)
        self._tick()
        return waits_for

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Any:
        return self._coroutine.__await__()


@dataclass
class Stage:
    """A policy of one rank that outlives the drivers.

    ``trained`` [name] are the weights that training has produced.
    """

    config: RunConfig
    rank: PolicyRank
    start: Tensors = field(default_factory=dict)

    def weights(self) -> Tensors:
        return {
            name: p.detach().full_tensor().clone()
            for name, p in self.rank.engine._parameters.items()
        }  # type: ignore[attr-defined]

    def begin_anew(self) -> None:
        """As a rank that has just been started."""
        self.rank.engine.restore_parameters()
        with torch.no_grad():
            for name, parameter in self.rank.engine._parameters.items():
                parameter._local_tensor.copy_(self.start[name])  # type: ignore[attr-defined]

    def driver(self, folder: Path, resume: str = "auto") -> Driver:
        folder.mkdir(exist_ok=True)
        policy = PolicyGroup(self.config.policy, lambda rank: None)
        policy.ranks = [LocalActor(self.rank)]
        self.rank._called = 0  # each driver counts its calls from 1
        driver = made_driver(
            self.config, folder, resume, prepare(self.config).identity, Services(policy)
        )
        driver.runner = SimpleNamespace()  # type: ignore[assignment]
        return driver

    def saved(self, folder: Path, *steps: int) -> CheckpointStore:
        """What an earlier start of the run in ``folder`` has saved: what the rank holds, as each of
        these steps.
        """
        driver = self.driver(folder)
        driver.checkpoints.next_lineage()
        whose = about(self.config, driver.hashes, len(driver.rollouts.dataset))
        for driver.step in steps:
            driver.version = Version(1, driver.step)
            state = asyncio.run(capture(driver.state, driver.rollouts.lose, 10))
            asyncio.run(
                driver.checkpoints.save(driver.step, state, driver.services.policy.save, whose)
            )
        return driver.checkpoints

    def until(self, folder: Path, number: int) -> tuple[Driver, BaseException | None, int]:
        """Begin a run and stop it at its ``number``-th await.

        Returns the driver, how it ended, and the awaits until then.
        """
        driver, waited = self.driver(folder), 0

        def tick() -> None:
            nonlocal waited
            waited += 1
            if waited == number:
                driver.stopping.set()

        async def main() -> BaseException | None:
            loop = asyncio.get_running_loop()
            loop.set_task_factory(lambda loop, work: asyncio.Task(Counted(work, tick), loop=loop))  # type: ignore[arg-type]
            try:
                await asyncio.wait_for(asyncio.create_task(driver.main()), 60)
            except (Preempted, NotSaved, Begun) as end:
                return end
            return None

        return driver, asyncio.run(main()), waited


class Begun(RayloopError):
    """The run got as far as its first step."""


class Services:
    """Its engines load whatever they are given."""

    weights = ""
    workers: dict[int, Any] = {}

    def __init__(self, policy: PolicyGroup) -> None:
        self.policy, self.reference, self.rollout = policy, None, self
        self.pools: list[Any] = []
        self.colocation = Colocation()

    async def start(self, admit: Any) -> None:
        await asyncio.sleep(0)

    async def answers(self, *calls: Any, spares: bool = False) -> list[Any]:
        await asyncio.sleep(0)
        return []

    def stop(self) -> None: ...


@pytest.fixture
def stage(tmp_path: Path, digits_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    torch.set_num_threads(1)
    c = RunConfig.model_validate(
        settings(tmp_path, digits_model, weight_sync={"logprob_check": "self_test"})
    )
    made = RankSettings(
        c.model, c.policy.engine, c.policy.optimizer, c.policy.loss, c.transport, str(tmp_path), 0
    )
    stage = Stage(c, PolicyRank(made, 0, 1))
    stage.rank.join(f"file://{tmp_path}/rendezvous")
    stage.start = stage.weights()

    async def probe(self: WeightCheck, tasks: Any, player: Any, purpose: str) -> list[str]:
        await asyncio.sleep(0)
        return [purpose]

    async def compare(
        self: PolicyGroup, payloads: list[str], swap_images: bool = False
    ) -> LogprobGap:
        await asyncio.sleep(0)
        moved = payloads == ["log-prob check"] and not swap_images
        return LogprobGap(1, float(moved), float(moved))

    async def evaluate(self: Driver) -> None:
        raise Begun

    monkeypatch.setattr(WeightCheck, "_probe", probe)
    monkeypatch.setattr(PolicyGroup, "compare", compare)
    monkeypatch.setattr(Driver, "evaluate", evaluate)
    yield stage
    stage.rank.engine.close()


def damaged(checkpoint: Checkpoint, expected: Tensors) -> list[str]:
    """The saved tensors that are not the expected ones."""
    saved = saved_tensors(Path(checkpoint.trainer))
    return [
        name
        for name, tensor in expected.items()
        if not torch.equal(saved[f"parameters.{name}"], tensor)
    ]


@pytest.mark.parametrize("resumed", [False, True])
def test_nothing_is_saved_but_what_training_produced(
    stage: Stage, tmp_path: Path, resumed: bool
) -> None:
    expected, folder = stage.start, tmp_path / "run"
    if resumed:
        expected = {name: tensor + 0.25 for name, tensor in stage.start.items()}
        stage.start, start = expected, stage.start
        stage.begin_anew()
        stage.saved(folder, 0)
        stage.start = start
    stops = saved = number = 0
    while True:
        number += 1
        stage.begin_anew()
        driver, end, waited = stage.until(folder if resumed else tmp_path / f"run-{number}", number)
        if waited < number:
            break
        stops += isinstance(end, Preempted)
        checkpoint = driver.checkpoints.find("auto")
        assert isinstance(end, Begun) or isinstance(end, Preempted) == (checkpoint is not None), (
            f"at await {number}: {end}"
        )
        assert not list(driver.checkpoints.folder.glob("*.tmp")), f"stopped at await {number}"
        if checkpoint is not None:
            saved += 1
            assert damaged(checkpoint, expected) == [], f"stopped at await {number}"
        assert not stage.rank.engine._unperturbed, f"stopped at await {number}"
    assert isinstance(end, Begun)
    assert number > 30, "the awaits of the start must have been counted"
    assert stops > number / 2
    assert saved > number / 2


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(
    ("kept", "code", "says"),
    [
        (
            (),
            1,
            (
                "stopped at step 3 of 3, not saved: .* continue from the beginning: there is no"
                " checkpoint"
            ),
        ),
        ((2,), 1, r"stopped at step 3 of 3, not saved: .* continue from step 2 \(step_000002\)"),
        ((2, 3), 75, "stopped at step 3 of 3, saved; run again to continue"),
    ],
)
def test_75_means_that_this_very_step_is_on_disk(
    stage: Stage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kept: tuple[int, ...],
    code: int,
    says: str,
    beside: bool,
) -> None:
    """The stop comes while a lost policy is being replaced; what is being written beside training
    is waited for.
    """
    write = CheckpointStore._commit

    def slowly(*arguments: Any) -> None:
        time.sleep(0.3)
        write(*arguments)

    monkeypatch.setattr(CheckpointStore, "_commit", slowly)
    stage.config.checkpoint.__dict__["asynchronous"] = beside

    async def three_steps(self: Driver) -> None:
        for self.step in range(1, 4):
            await self.sync_weights()
            if self.step in kept:
                await self.checkpoint()
        raise PolicyLost("rank 0 died")

    async def rebuild(self: PolicyGroup) -> None:
        driver.stopping.set()
        await asyncio.sleep(30)

    monkeypatch.setattr(Driver, "evaluate", three_steps)
    monkeypatch.setattr(PolicyGroup, "rebuild", rebuild)
    driver = stage.driver(tmp_path / "run")
    with pytest.raises(RayloopError, match=says) as raised:
        asyncio.run(driver.main())
    assert raised.value.exit_code == code
    last = list(driver.reporter.updates)[-1][1]["event"]
    assert last == ("preempted" if code == 75 else "failed")


def test_a_stop_whose_save_fails_is_not_saved(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def evaluate(self: Driver) -> None:
        self.step = 1
        await self.sync_weights()
        self.stopping.set()
        await until_stopped(self.stopping, asyncio.sleep(30))

    def save(self: Any, folder: str) -> None:
        raise CheckpointError("no space left on device")

    monkeypatch.setattr(Driver, "evaluate", evaluate)
    monkeypatch.setattr(PolicyRank, "save", save)
    monkeypatch.setattr("rayloop.cluster.loop.saving.STORAGE_RETRY_AFTER_S", 0.1)
    preemption = stage.config.preemption.model_copy(
        update={"grace": 4.0}
    )  # half of it is for tries
    stage.config = stage.config.model_copy(update={"preemption": preemption})
    driver = stage.driver(tmp_path / "run")
    with pytest.raises(
        NotSaved, match=r"step 1 of 3, not saved: .* no space left .* continue from the beginning"
    ):
        asyncio.run(driver.main())


@pytest.mark.parametrize(
    ("older", "code", "says"),
    [
        (
            (),
            1,
            (
                "stopped before anything was trained: there is nothing to save; run again to start"
                " over"
            ),
        ),
        (
            (1, 2),
            75,
            r"there was nothing to save; run again to continue from step 2 \(step_000002\)",
        ),
    ],
)
def test_a_stop_while_the_actors_start_saves_nothing(
    stage: Stage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    older: tuple[int, ...],
    code: int,
    says: str,
) -> None:
    """Also while the resources are awaited, when there is no policy to ask."""
    before = sorted(path.name for path in stage.saved(tmp_path / "run", *older).folder.iterdir())
    driver = stage.driver(tmp_path / "run")

    async def start(admit: Any) -> None:
        driver.stopping.set()
        await asyncio.sleep(30)

    monkeypatch.setattr(driver.services, "start", start)
    driver.services.policy = None
    with pytest.raises(RayloopError, match=says) as raised:
        asyncio.run(driver.main())
    assert raised.value.exit_code == code
    assert sorted(path.name for path in driver.checkpoints.folder.iterdir()) == before
    assert list(driver.reporter.updates)[-1][1]["event"] == (
        "preempted" if code == 75 else "failed"
    )


@pytest.mark.parametrize(("whose", "saves"), [("run", False), ("other", False), ("run", True)])
def test_a_lost_policy_does_not_make_the_run_forget_where_it_was_asked_to_begin(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str, saves: bool
) -> None:
    """A rank dies before, or after, the first save of a run that was rewound to step 1."""
    named = str(stage.saved(tmp_path / whose, 1, 2).folder / "step_000001")
    begun = []

    async def rebuild(self: PolicyGroup) -> None:
        stage.begin_anew()

    async def evaluate(self: Driver) -> None:
        begun.append((self.step, self.version.lineage))
        if len(begun) == 2:
            raise Begun
        if saves:
            self.step = 2
            await self.sync_weights()
            await self.checkpoint()
        raise PolicyLost("rank 0 died")

    monkeypatch.setattr(PolicyGroup, "rebuild", rebuild)
    monkeypatch.setattr(Driver, "evaluate", evaluate)
    driver = stage.driver(tmp_path / "run", named)
    first = driver.checkpoints.lineages() + 1
    with pytest.raises(Begun):
        asyncio.run(driver.main())
    assert begun == [(1, first), (2 if saves else 1, first + 1)]
    restored = [
        record["restored"]
        for _, record in driver.reporter.updates
        if record.get("event") == "begin"
    ]
    again = ("step_000002-1" if whose == "run" else "step_000002") if saves else "step_000001"
    assert restored == ["step_000001", again]


def test_a_rank_that_dies_while_it_writes_beside_training_costs_the_steps_since_the_older_checkpoint(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was writing is never complete; the policy that takes its place begins from the one
    before, and saves again.
    """
    begun, files, lives = [], [], PolicyRank.finish_save

    async def rebuild(self: PolicyGroup) -> None:
        stage.begin_anew()

    def finish_save(self: PolicyRank, within: float) -> Any:
        files.extend(path.name for path in (tmp_path / "run" / "checkpoints").glob("*.tmp"))
        raise ActorDiedError

    async def evaluate(self: Driver) -> None:
        begun.append(self.step)
        if len(begun) == 2:
            monkeypatch.setattr(PolicyRank, "finish_save", lives)
            self.step = 2
            self.version = Version(self.version.lineage, 2)
            await self.checkpoint()
            await self.saving.settle()
            raise Begun
        for self.step in (1, 2):
            await self.sync_weights()
            if self.step == 2:
                monkeypatch.setattr(PolicyRank, "finish_save", finish_save)
            await self.checkpoint()
        await asyncio.sleep(0.2)
        await self.checkpoint()  # as after the next step
        raise AssertionError("nobody noticed")

    monkeypatch.setattr(PolicyGroup, "rebuild", rebuild)
    monkeypatch.setattr(Driver, "evaluate", evaluate)
    stage.config.checkpoint.__dict__["asynchronous"] = True
    driver = stage.driver(tmp_path / "run")
    with pytest.raises(Begun):
        asyncio.run(driver.main())
    assert files == ["step_000002.1.tmp"]
    assert begun == [0, 1]
    assert [(found.lineage, found.step) for found in driver.checkpoints.newest_first()] == [
        (2, 2),
        (1, 1),
    ]
    assert not list(driver.checkpoints.folder.glob("*.tmp"))


def test_a_run_whose_checkpoints_were_all_deleted_ends_when_its_policy_is_lost(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fresh policy would otherwise train from the start model, under the numbers of steps that
    are gone.
    """
    begun: list[int] = []

    async def rebuild(self: PolicyGroup) -> None:
        stage.begin_anew()

    async def evaluate(self: Driver) -> None:
        begun.append(self.step)
        if len(begun) == 2:
            raise Begun
        self.step = 1
        await self.sync_weights()
        await self.checkpoint()
        await self.saving.settle()
        for folder in self.checkpoints.folder.glob("step_*"):
            shutil.rmtree(folder)
        raise PolicyLost("rank 0 has died")

    monkeypatch.setattr(PolicyGroup, "rebuild", rebuild)
    monkeypatch.setattr(Driver, "evaluate", evaluate)
    driver = stage.driver(tmp_path / "run")
    with pytest.raises(
        CheckpointError, match=r"step_000001.* was saved there, and no checkpoint is left"
    ):
        asyncio.run(driver.main())
    assert begun == [0]
    again = stage.driver(
        tmp_path / "run"
    )  # a person starts it once more: it may begin anew, and says so
    with pytest.raises(Begun):
        asyncio.run(again.main())
    assert begun == [0, 0]
    warnings = [
        record["why"] for _, record in again.reporter.updates if record.get("event") == "warning"
    ]
    assert any(why.startswith("step_000001 was saved below") for why in warnings), warnings


def test_nor_does_a_driver_that_took_another_ones_place_begin_anew(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    saving = Saving(store, lambda event, step: None, beside=False, timeout=1)
    saving.check_may_begin(since=0)
    store.next_lineage()
    saving.check_may_begin(since=0)  # the driver before it had saved nothing
    (store.folder / "latest").write_text("step_000020", encoding="utf-8")
    with pytest.raises(
        CheckpointError, match=r"step_000020 was saved there, and no checkpoint is left"
    ):
        saving.check_may_begin(since=0)
    saving.check_may_begin(since=1)  # a start that a person makes after they were deleted


@pytest.mark.parametrize(("where", "step"), [("beside", 2), ("update", 1)])
def test_a_role_that_is_exhausted_costs_no_steps_while_the_policy_lives(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, step: int
) -> None:
    """Two steps are trained since the checkpoint of step 1 (``beside``), or the second update is
    under way and breaks off.
    """

    async def steps(self: Driver) -> None:
        for self.step in (1, 2):
            await self.sync_weights()
            if self.step == 1:
                await self.checkpoint()
        if where == "update":
            await self.train(())
        raise RolesExhausted("the rollout role lost 21 workers")

    asked = PolicyGroup.all

    async def broken(self: PolicyGroup, method: Any, *arguments: Any) -> Any:
        if method is PolicyRank.train:
            raise RolesExhausted("the rollout role lost 21 workers")
        return await asked(self, method, *arguments)

    monkeypatch.setattr(Driver, "evaluate", steps)
    monkeypatch.setattr(PolicyGroup, "all", broken)
    driver = stage.driver(tmp_path / "run")
    with pytest.raises(RolesExhausted) as raised:
        asyncio.run(driver.main())
    assert raised.value.exit_code == 69
    found = driver.checkpoints.find("auto")
    assert found is not None
    assert found.step == step
    assert raised.value.__notes__[0].endswith(
        f"run again to continue from step {step} (step_00000{step})"
    )
    reported = list(driver.reporter.updates)[-1][1]
    assert (reported["event"], reported["error"]) == ("failed", "RolesExhausted")


def test_a_rank_that_is_lost_at_the_start_costs_a_restart(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message is lost while the ranks meet.

    The first lineage finds no ranks; they are rebuilt as at any other time.
    """
    lost = ActorUnavailableError("connection reset", b"1" * 16)
    failed = []

    def address(self: PolicyRank) -> Any:
        if not failed:
            failed.append(lost)
            raise lost
        return "127.0.0.1", 1

    def join(self: PolicyRank, meeting: Any) -> None:
        stage.begin_anew()

    async def evaluate(self: Driver) -> None:
        raise Begun

    monkeypatch.setattr(ray, "kill", lambda handle: None)
    monkeypatch.setattr(PolicyRank, "address", address)
    monkeypatch.setattr(PolicyRank, "join", join)
    monkeypatch.setattr(Driver, "evaluate", evaluate)
    driver = stage.driver(tmp_path / "run")
    policy = driver.services.policy
    policy._spawn = lambda rank: LocalActor(stage.rank)

    async def start(admit: Any) -> None:
        colocation = driver.services.colocation
        started: Any = SimpleNamespace(
            policy=policy, folder=str(tmp_path / "run"), config=driver.config, colocation=colocation
        )
        await TrainingServices._start_policy(started, asyncio.sleep(0))
        assert policy.ranks == []

    monkeypatch.setattr(driver.services, "start", start)
    with pytest.raises(Begun):
        asyncio.run(driver.main())
    kinds = [record["event"] for kind, record in driver.reporter.updates if kind == "event"]
    assert kinds.count("policy_lost") == kinds.count("policy_rebuilt") == 1
    assert (
        "connection reset"
        in next(r for _, r in driver.reporter.updates if r.get("event") == "policy_lost")["why"]
    )
