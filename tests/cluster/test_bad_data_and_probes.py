"""Bad data, and failures in what is played beside the training: probes and evaluations.

No Ray cluster.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rayloop.cluster.loop.weight_check import WeightCheck
from rayloop.cluster.loop.weight_sync import WeightSync
from rayloop.cluster.supervision.attempts import evaluate_answers
from rayloop.core.failures import EnvironmentFailed
from rayloop.core.groups import Group
from rayloop.core.types import RolloutRequest, Sampling, Task
from rayloop.measure.controls import RIGHT, Item
from rayloop.rollout.failed_episodes import FailureHistory
from rayloop.run.held_out import AnswerRequest
from rayloop.run.sections import EnvironmentSettings
from tests.support.stand_ins import (
    BAD,
    Behave,
    Handle,
    Houses,
    Make,
    World,
    bad_data,
    broken,
    failed,
    hangs,
)

# Bad data -----------------------------------------------------------------------------------------


def test_an_actor_without_the_data_is_replaced_and_no_task_is_held_responsible(world: Make) -> None:
    def unmounted(made: World) -> Behave:
        async def behave(actor: Handle, request: RolloutRequest) -> Any:
            if actor is made.spawned[0]:
                return bad_data(request, "cannot be read: No such file or directory")
            await asyncio.sleep(0.001)
            return made.well(request)

        return behave

    made = world(unmounted, environment={"actors": 2})
    made.run(steps=10)
    assert made.rollouts.scheduler.quarantined == set()
    assert made.ledger.counts()["trained"] == made.ledger.counts()["issued"]
    [lost] = made.named("worker_lost")
    assert lost["why"].endswith(
        "failed on it one after the other, last: cannot be read: No such file or directory"
    )


def test_an_engine_without_the_data_gets_less_and_less_to_do(world: Make) -> None:
    asked: list[int] = []

    def unmounted(made: World) -> Behave:
        async def behave(actor: Handle, request: RolloutRequest) -> Any:
            await asyncio.sleep(0.001)
            asked.append(made.engines[request.id])
            return (
                bad_data(request, "the image does not exist", own=False)
                if asked[-1] == 0
                else made.well(request)
            )

        return behave

    made = world(unmounted, environment={"actors": 2}, rollout__actors=2)
    made.run(steps=20)
    assert made.rollouts.scheduler.quarantined == set()
    assert made.ledger.counts()["trained"] == made.ledger.counts()["issued"]
    assert asked.count(0) < asked.count(1) / 10
    assert made.named("worker_lost") == [], "the environment actors are not to blame"


@pytest.mark.parametrize("own", [True, False], ids=["environments", "engines"])
def test_a_node_without_the_data_condemns_no_task(world: Make, own: bool) -> None:
    """Its three actors say the same, and are one witness: another node is asked."""

    def unmounted(made: World) -> Behave:
        async def behave(actor: Handle, request: RolloutRequest) -> Any:
            await asyncio.sleep(0.001)
            slot = actor.slot if own else made.engines[request.id]
            return (
                bad_data(request, "the image does not exist", own=own)
                if slot < 3
                else made.well(request)
            )

        return behave

    roles: Any = (
        {"environment": {"actors": 4}}
        if own
        else {"environment": {"actors": 2}, "rollout__actors": 4}
    )
    made = world(unmounted, nodes=Houses("a", "a", "a", "b"), **roles)
    made.run(steps=10)
    assert made.bad == []
    assert made.ledger.counts()["trained"] == made.ledger.counts()["issued"]


@pytest.mark.parametrize(
    ("actors", "asked", "nodes"), [(1, 1, "a"), (2, 2, "a"), (4, 2, "a"), (4, 2, "aaab")]
)
@pytest.mark.parametrize("attempts", [1, 3])
def test_bad_data_is_what_two_actors_say(
    world: Make, actors: int, asked: int, nodes: str, attempts: int
) -> None:
    def broken(made: World) -> Behave:
        async def behave(actor: Handle, request: RolloutRequest) -> Any:
            await asyncio.sleep(0.001)
            return (
                bad_data(request, "truncated or corrupt image")
                if request.task.id == BAD
                else made.well(request)
            )

        return behave

    made = world(broken, nodes=Houses(*nodes), environment={"actors": actors, "attempts": attempts})
    made.run(steps=30)
    [failure] = made.bad
    assert failure.reason == "/data/x.png: truncated or corrupt image"
    assert made.plays[BAD] == 8 * asked
    assert made.ledger.counts()["excluded[bad_data]"] == 8
    assert made.named("worker_lost") == []


# Probes -------------------------------------------------------------------------------------------


async def probe(made: World, purpose: str = "log-prob check") -> list[Any]:
    """What the proof at the start does first: an episode on each of the first tasks."""
    reporter: Any = SimpleNamespace(event=made._emit)
    player = await made.player()
    check = WeightCheck(WeightSync(made.config, player.services, reporter))
    return await check._probe(made.rollouts.scheduler.probe_tasks(), player, purpose)


@pytest.mark.parametrize("probes", [1, 3])
def test_a_task_that_hangs_costs_the_proof_at_the_start_its_own_attempts(
    world: Make, probes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayloop.cluster.loop.weight_check.PROBE_TASKS", probes)

    def first_hangs(made: World) -> Behave:
        async def behave(actor: Handle, request: RolloutRequest) -> Any:
            await asyncio.sleep(0)
            first = request.task.id == "train-0"
            return (
                failed(request, "reset gave no answer", hung=True) if first else made.well(request)
            )

        return behave

    made = world(first_hangs, environment={"actors": 2})
    assert len(asyncio.run(probe(made))) == probes
    assert made.plays["train-0"] == 3
    assert made.plays.keys() == {
        f"train-{i}" for i in range(1 + probes)
    }  # those on a replaced actor begin again
    assert made.plays[f"train-{probes}"] == 1, "the one that is asked in its place"
    [reported] = made.named("probe_failed")
    assert (reported["task"], reported["why"]) == ("train-0", "reset gave no answer")


def test_a_task_that_failed_one_probe_is_not_tried_in_the_next(world: Make) -> None:
    made = world(hangs, environment={"actors": 2})

    async def twice() -> None:
        reporter: Any = SimpleNamespace(event=made._emit)
        player = await made.player()
        check = WeightCheck(WeightSync(made.config, player.services, reporter))
        for purpose in ("log-prob check", "language"):
            assert (
                len(await check._probe(made.rollouts.scheduler.probe_tasks(), player, purpose)) == 4
            )

    asyncio.run(twice())
    assert made.plays[BAD] == 3


def test_a_quarantined_task_is_no_probe(world: Make) -> None:
    made = world(hangs, environment={"actors": 2})
    made.rollouts.scheduler.quarantined = {BAD}
    assert len(asyncio.run(probe(made))) == 4
    assert BAD not in made.plays


def test_the_proof_fails_when_no_task_can_be_played(world: Make) -> None:
    made = world(broken, environment={"actors": 2})
    with pytest.raises(
        EnvironmentFailed,
        match=r"none of 4 tasks could be played for the log-prob check probe: Guess\.step must",
    ):
        asyncio.run(probe(made))


# What is played outside of groups, under numbers of its own, again and again ----------------------


def test_an_item_that_hung_in_one_evaluation_is_played_in_the_next(world: Make) -> None:
    made = world(hangs, environment={"actors": 2})
    kept: list[Item] = []

    async def evaluations() -> list[list[Item]]:
        player = await made.player()
        player.rewards.describe = no_records  # type: ignore[assignment]
        asked = [AnswerRequest(RIGHT, task, Sampling()) for task in list(made.rollouts.dataset)[:5]]
        keep = lambda item, images: kept.append(item)  # noqa: E731
        return [
            await evaluate_answers(asked, player, step, keep, lambda member: None)
            for step in (0, 1)
        ]

    first, second = asyncio.run(evaluations())
    assert (
        [item.reward is None for item in first]
        == [item.reward is None for item in second]
        == [i == 3 for i in range(5)]
    )
    assert made.plays[BAD] == 2 * 3


def test_a_broken_held_out_row_says_nothing_about_the_training_task_of_its_id(world: Make) -> None:
    def broken(made: World) -> Behave:
        async def behave(actor: Handle, request: RolloutRequest) -> Any:
            await asyncio.sleep(0)
            return (
                bad_data(request, "truncated or corrupt image")
                if request.id.group < 0
                else made.well(request)
            )

        return behave

    made = world(broken, environment={"actors": 2})

    async def evaluated() -> list[Item]:
        player = await made.player()
        player.rewards.describe = no_records  # type: ignore[assignment]
        asked = [AnswerRequest(RIGHT, Task(BAD, ()), Sampling())]
        return await evaluate_answers(
            asked, player, 0, lambda item, images: None, lambda member: None
        )

    [item] = asyncio.run(evaluated())
    assert item.unscored == "bad_data: truncated or corrupt image"
    assert made.rollouts.scheduler.quarantined == set()
    assert made.bad == []
    assert made.named("bad_data") == [
        {"task": BAD, "path": "/data/x.png", "why": "truncated or corrupt image"}
    ]


async def no_records(group: Group) -> tuple[list[Any], dict[str, bytes]]:
    return [], {}


def test_a_number_that_hung_as_a_probe_is_free_for_another_task(
    world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayloop.cluster.loop.weight_check.PROBE_TASKS", 1)
    made = world(hangs, environment={"actors": 2})

    async def two() -> None:
        player = await made.player()
        sync = WeightSync(made.config, player.services, SimpleNamespace(event=made._emit))  # type: ignore[arg-type]
        check = WeightCheck(sync)
        bad, good = made.rollouts.dataset[3], made.rollouts.dataset[4]
        assert len(await check._probe([bad, good], player, "log-prob check")) == 1
        assert len(await check._probe([good], player, "language")) == 1

    asyncio.run(two())


def test_groups_before_a_restore_are_not_those_after_it() -> None:
    blame = FailureHistory(EnvironmentSettings(actors=2))
    for attempt in range(3):
        blame.begins(12, attempt)
        blame.failed(12, BAD, attempt, attempt % 2, failed(None, "step gave no answer", hung=True))
    blame.groups_failed["other"] = 1
    assert blame.hangs(12)
    blame.restore({BAD: 1})
    assert blame.hangs(12) == "", "the number is another task's now"
    assert blame.groups_failed == {BAD: 1}
