"""Payloads that are really lost, after they were scored: their owner is killed.

Nothing hangs, nothing ends, each is counted.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import ObjectLostError

from rayloop.actors.base import GROUPS
from rayloop.actors.failures import fetch, object_lost
from rayloop.actors.policy import PolicyRank, RankSettings
from rayloop.actors.reference import ReferenceActor
from rayloop.actors.reward import RewardActor
from rayloop.cluster.driver import Driver
from rayloop.cluster.loop import annotating
from rayloop.cluster.loop.saving import capture
from rayloop.cluster.supervision.calls import RewardCalls
from rayloop.cluster.supervision.policy_group import PolicyGroup
from rayloop.cluster.supervision.pool import Pool
from rayloop.core.deadlines import WAITS
from rayloop.core.failures import CheckpointError, WorkerLost
from rayloop.core.groups import (
    Credit,
    Group,
    Member,
    Outcome,
    Scored,
    Status,
    TrajectoryState,
    Unscored,
    UnscoredKind,
)
from rayloop.core.types import EndReason, Summary, Task, TrajectoryId, Version
from rayloop.run.config import RunConfig
from rayloop.run.identity import about
from rayloop.run.preflight import prepare
from tests.engines.training import trajectory
from tests.support.clusters import private_ray
from tests.support.drivers import made_driver
from tests.support.runs import eventually, settings

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with private_ray(8):
        yield


@ray.remote(num_cpus=0)
class Holder:
    """Owns what it puts: when it dies, that is lost for everybody."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def put(self, value: Any) -> list[Any]:
        self._kept.append(ray.put(value))
        return [self._kept[-1]]

    async def take(self, value: Any) -> None: ...

    async def never(self) -> None:
        await asyncio.sleep(1000)


def kill(holder: Any) -> None:
    """Returns when everybody knows that it is dead."""
    [sign] = ray.get(holder.put.remote("of life"))
    ray.kill(holder)
    eventually(lambda: fetch([sign])[1], "the owner is known to be dead", 30)


class Stage:
    """A driver with a step's groups: two groups of four, ready.

    ``lose`` kills the owner of some of their payloads.
    """

    def __init__(self, folder: Path, model: Path, lost: set[TrajectoryId], **changes: Any) -> None:
        self.config = RunConfig.model_validate(settings(folder, model, **changes))
        (folder / "run").mkdir()
        self.driver = made_driver(self.config, folder / "run")
        self.rollouts = self.driver.rollouts
        self.driver.version = Version(1, 0)
        self._holder = Holder.remote()
        self.groups = tuple(self._group(model, number, lost) for number in (1, 2))
        for group in self.groups:
            ids = [member.summary.id for member in group.members]
            self.driver.ledger.issue(ids)
            for id in ids:
                self.driver.ledger.move(id, Status(TrajectoryState.READY))
        self.rollouts.ready.groups = list(self.groups)
        self.rollouts.scheduler.next_number = 2

    def _group(self, model: Path, number: int, lost: set[TrajectoryId]) -> Group:
        members = []
        for sample in range(4):
            id = TrajectoryId(number, sample)
            payload = dataclasses.replace(
                trajectory(model, 10 * number + sample, [(5, None, 3 + sample)]), id=id
            )
            summary = Summary(
                id,
                0,
                "t",
                "",
                EndReason.DONE,
                length=8 + sample,
                sampled_tokens=3 + sample,
                turns=1,
                images=0,
                observation_images=0,
                images_consistent=True,
                first_version=Version(1, 0),
                last_version=Version(1, 0),
            )
            ref = ray.get(self._holder.put.remote(payload))[0] if id in lost else ray.put(payload)
            members.append(Member(summary, Scored(float(sample)), ref, credit=Credit(sample - 1.5)))
        return Group(number, Task("t", ()), tuple(members), mean=1.5, std=1.3)

    async def capture(self) -> Any:
        return await capture(self.driver.state, self.rollouts.lose, self.config.policy.step_timeout)

    def lose(self) -> None:
        kill(self._holder)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [
            record for kind, record in self.driver.reporter.updates if record.get("event") == name
        ]


LOST = {TrajectoryId(1, 2), TrajectoryId(2, 0)}


def ids(groups: Any) -> set[TrajectoryId]:
    return {member.summary.id for group in groups for member in group.kept}


# What Ray says ------------------------------------------------------------------------------------


@pytest.mark.slow_faults
def test_a_lost_object_is_distinguished_from_a_lost_worker() -> None:
    holder, other = Holder.remote(), Holder.remote()
    [gone] = ray.get(holder.put.remote("gone"))
    there = ray.put("there")
    kill(holder)
    assert fetch([there, gone, there]) == ({there: "there"}, {gone})
    with pytest.raises(ObjectLostError) as as_argument:
        ray.get(other.take.remote(gone), timeout=30)
    assert object_lost(as_argument.value)
    with pytest.raises(ray.exceptions.RayActorError) as worker:
        ray.get(holder.put.remote(1), timeout=30)
    assert not object_lost(worker.value)


# Training -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow_faults)])
def test_the_ranks_tell_what_is_lost_before_they_train(
    tmp_path: Path, digits_model: Path, ranks: int
) -> None:
    stage = Stage(tmp_path, digits_model, LOST, policy__ranks=ranks)
    c = stage.config
    made = RankSettings(
        c.model, c.trainer, c.optimizer, c.policy.loss, c.transport, str(tmp_path), 0
    )
    rank = ray.remote(concurrency_groups=GROUPS)(PolicyRank)
    policy = PolicyGroup(
        c.policy, lambda number: rank.options(num_cpus=1).remote(made, number, ranks)
    )

    async def steps() -> tuple[set[TrajectoryId], dict[str, float]]:
        await policy.start()
        stage.driver.services.policy = policy
        stage.lose()
        began = time.monotonic()
        lost = await stage.driver.fetch_batch(stage.groups)
        assert time.monotonic() - began < c.policy.step_timeout
        stage.rollouts.lose(lost)
        assert await stage.driver.fetch_batch(tuple(stage.rollouts.ready.groups)) == set()
        return lost, (await policy.all(PolicyRank.train))[0][0]

    try:
        lost, report = asyncio.run(steps())
    finally:
        policy.stop()
    assert lost == LOST
    assert report["actor/sequences"] == 8 - len(LOST)
    assert report["actor/updates"] == 1
    stage.rollouts.ready.settle_trained(stage.rollouts.ready.groups)
    stage.driver.ledger.check()
    counts = stage.driver.ledger.counts()
    assert (counts["trained"], counts["excluded[payload_lost]"], counts["ready"]) == (6, 2, 0)
    assert stage.events("payload_lost")[0]["trajectories"] == ["1/2", "2/0"]


def test_probes_that_are_all_lost_compare_to_nothing(tmp_path: Path, digits_model: Path) -> None:
    """Log-prob check of no tokens would pass."""
    policy = PolicyGroup(
        RunConfig.model_validate(settings(tmp_path, digits_model)).policy, lambda rank: None
    )

    class NothingFound:
        call = SimpleNamespace(remote=lambda *args, **kwargs: asyncio.sleep(0, []))
        numbered = SimpleNamespace(options=lambda **options: NothingFound.call)
        forget = call

    policy.ranks = [NothingFound()]
    with pytest.raises(WorkerLost, match="all 2 trajectories to compare were lost"):
        asyncio.run(policy.compare(["a", "b"]))


# Rewards of groups --------------------------------------------------------------------------------


@pytest.mark.parametrize("per", ["trajectory", "group"])
def test_a_group_is_scored_without_the_payloads_that_are_lost(
    tmp_path: Path, digits_model: Path, per: str
) -> None:
    ranking = {
        "reward__per": "group",
        "reward__source": {"use": "tests.support.rewards:TokenRanking", "with": {}},
    }
    stage = Stage(tmp_path, digits_model, LOST, **(ranking if per == "group" else {}))
    c, group = stage.config, stage.groups[0]
    actor = ray.remote(concurrency_groups=GROUPS)(RewardActor)

    def spawn(slot: int) -> Any:
        return actor.options(num_cpus=0, max_concurrency=4).remote(c.model, c.reward)

    async def score() -> tuple[list[Outcome], list[Outcome]]:
        pool = stage.driver.services.reward = Pool(
            "reward", 1, spawn, c.recovery, stage.driver.reporter.event
        )
        await pool.start()
        scoring = RewardCalls(c.reward, stage.driver.services, stage.driver.reporter.event)
        payloads = [member.payload for member in group.members if member.payload]
        whole = await scoring.score(payloads, group.task, 1)
        stage.lose()
        return whole, await scoring.score(payloads, group.task, 1)

    whole, rest = asyncio.run(score())
    assert [type(outcome) for outcome in whole] == [Scored] * 4
    lost = [isinstance(o, Unscored) and o.kind is UnscoredKind.PAYLOAD_LOST for o in rest]
    assert lost == [False, False, True, False], "1/2 is in LOST"
    assert [type(outcome) for outcome in rest] == [Scored, Scored, Unscored, Scored]


# The reference ------------------------------------------------------------------------------------


@pytest.mark.slow_faults
def test_the_reference_annotates_the_rest(tmp_path: Path, digits_model: Path) -> None:
    kl = {"policy__loss": {"kl_coef": 0.1}}
    stage = Stage(tmp_path, digits_model, LOST, **kl)
    stage.rollouts.ready.groups = []
    c = stage.config
    actor = ray.remote(concurrency_groups=GROUPS)(ReferenceActor)

    def spawn(slot: int) -> Any:
        return actor.options(num_cpus=1, max_concurrency=4).remote(c.model, c.policy.engine)

    async def annotate() -> tuple[Group, list[Any]]:
        pool = stage.driver.services.reference = Pool(
            "reference", 1, spawn, c.recovery, stage.driver.reporter.event
        )
        await pool.start()
        stage.lose()
        found = await stage.driver.annotate(stage.groups[0])
        arrays = [await member.ref_logprobs for member in found.kept]
        pool.stop()
        return found, arrays

    group, arrays = asyncio.run(annotate())
    assert [m.summary.id.sample for m in group.kept] == [0, 1, 3]
    assert group.members[2].status == Status(TrajectoryState.EXCLUDED, "payload_lost")
    assert [array.shape for array in arrays] == [(3,), (4,), (6,)]
    assert [m.advantage for m in group.kept] == [
        -1.5,
        -0.5,
        1.5,
    ], "what was lost had a reward: the baseline stays"
    assert stage.events("payload_lost")[0]["trajectories"] == ["1/2"]


def test_what_a_run_without_a_reference_left_ready_is_annotated_when_it_goes_on_with_one(
    tmp_path: Path, digits_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(annotating, "Calls", lambda pool, deadline, attempts: pool)
    before = Stage(tmp_path, digits_model, set())
    hashes = prepare(before.config).identity
    store = before.driver.checkpoints
    asked: list[int] = []

    class Reference:
        """One of the payloads does not survive."""

        async def split(
            self, returns: int, method: Any, payloads: list[Any], folder: str | None
        ) -> tuple[list[int], list[Any]]:
            asked.append(len(payloads))
            assert (method, returns) == (ReferenceActor.annotate, 1 + len(payloads))
            return [0] if len(asked) == 1 else [], [ray.put("log-probs") for _ in payloads]

    async def nothing(folder: str, sums: object = None) -> None: ...

    async def go_on() -> Driver:
        store.next_lineage()
        await store.save(1, await before.capture(), nothing, about(before.config, hashes, 24))
        config = RunConfig.model_validate(
            settings(tmp_path, digits_model, policy__loss={"kl_coef": 0.1})
        )
        services = SimpleNamespace(policy=SimpleNamespace(load=nothing), reference=Reference())
        driver = made_driver(config, tmp_path / "run", "auto", hashes, services)
        await driver.restore()
        return driver

    driver = asyncio.run(go_on())
    assert asked == [4, 4]
    assert ids(driver.rollouts.ready.groups) == ids(before.groups) - {TrajectoryId(1, 0)}
    assert all(
        ray.get(m.ref_logprobs) == "log-probs" for g in driver.rollouts.ready.groups for m in g.kept
    )
    driver.ledger.check()
    assert driver.ledger.counts()["excluded[payload_lost]"] == 1


# The checkpoint -----------------------------------------------------------------------------------


def test_a_checkpoint_leaves_out_what_is_lost(tmp_path: Path, digits_model: Path) -> None:
    stage = Stage(tmp_path, digits_model, LOST)
    stored = stage.groups[1].members[0], stage.groups[1].members[1]
    stage.rollouts.finished.buffer.restore({"t": stored})
    stage.lose()
    state = asyncio.run(stage.capture())

    kept = {TrajectoryId(g, s) for g in (1, 2) for s in range(4)} - LOST
    rollouts = state["rollouts"]
    members = [m for g in rollouts["ready"]["groups"] for m in g["members"] if m["status"] is None]
    assert (
        {TrajectoryId(*m["summary"]["id"]) for m in members}
        == ids(stage.rollouts.ready.groups)
        == kept
    )
    assert [m["summary"]["id"] for m in rollouts["finished"]["replay"]["t"]] == [[2, 1]]
    assert all(m["payload"]["id"] == m["summary"]["id"] for m in members)
    assert state["ledger"]["final"] == {"excluded[payload_lost]": 2}
    assert len(state["ledger"]["live"]) == 6
    stage.driver.ledger.check()


def test_a_payload_that_does_not_come_fails_the_checkpoint_in_time(
    tmp_path: Path, digits_model: Path
) -> None:
    stage = Stage(tmp_path, digits_model, set(), policy__step_timeout=1.0)
    pending = Holder.remote().never.remote()
    first, *others = stage.groups[0].members
    stage.rollouts.ready.groups = [
        dataclasses.replace(
            stage.groups[0], members=(dataclasses.replace(first, payload=pending), *others)
        )
    ]

    async def waits() -> list[str]:
        task = asyncio.ensure_future(stage.capture())
        await asyncio.sleep(0.5)
        shown = [wait.what for wait in WAITS.oldest()]
        with pytest.raises(
            CheckpointError, match="payloads for the checkpoint did not answer within 1 s"
        ):
            await task
        return shown

    assert asyncio.run(waits()) == ["payloads for the checkpoint"]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
