"""Environments that hang or fail, and whose fault that is: the task's, the actor's or nobody's.

No Ray cluster.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from rayloop.cluster.supervision.pool import Pool
from rayloop.core.failures import (
    Cause,
    Diverged,
    Failure,
    GenerationBudgetSpent,
    Scope,
    WorkerSpent,
)
from rayloop.core.groups import Scored, Unscored, UnscoredKind
from rayloop.core.types import RolloutRequest
from rayloop.rollout.failed_episodes import FailureHistory
from rayloop.run.lifetime import RecoverySettings
from rayloop.run.sections import EnvironmentSettings
from tests.support.stand_ins import BAD, Behave, Handle, Houses, Make, World, broken, failed, hangs


@pytest.mark.parametrize("actors", [1, 2, 4, 8])
def test_a_task_that_hangs_is_quarantined_at_the_cost_of_nothing_else(
    world: Make, actors: int
) -> None:
    """Not one replacement is allowed: those that a hanging task causes are not of that budget."""
    made = world(hangs, environment={"actors": actors}, recovery={"replacements": 0})
    made.run(steps=30)
    [failure] = made.bad
    assert failure.reason.endswith("episodes of its group hung")
    assert made.rollouts.scheduler.quarantined == {BAD}
    assert made.plays[BAD] <= 8 * 3, "one group"
    assert made.environment.replaced <= 3 + actors - 1, (
        "those of attempts, and who hangs beside the last of them"
    )
    assert made.ledger.counts()["excluded[environment_failure]"] == 8


@pytest.mark.parametrize("actors", [1, 2])
def test_a_hang_in_a_process_of_its_own_costs_no_actor(world: Make, actors: int) -> None:
    """``isolation: process``: the task is quarantined all the same, also by the only actor, and
    nobody is replaced for it.
    """

    def contained(made: World) -> Behave:
        async def behave(actor: Handle, request: RolloutRequest) -> Any:
            await asyncio.sleep(0.001)
            if request.task.id != BAD:
                return made.well(request)
            return failed(request, "step gave no answer", hung=True, contained=True)

        return behave

    made = world(contained, environment={"actors": actors}, recovery={"replacements": 0})
    made.run(steps=30)
    [failure] = made.bad
    assert failure.reason.endswith("episodes of its group hung")
    assert made.rollouts.scheduler.quarantined == {BAD}
    assert made.environment.replaced == 0
    assert made.plays[BAD] <= 8 * 3, "one group"


def test_an_engine_whose_log_probs_are_not_numbers_ends_the_run_and_is_not_replaced(
    world: Make,
) -> None:
    def diverged(made: World) -> Behave:
        async def behave(actor: Handle, request: RolloutRequest) -> Any:
            await asyncio.sleep(0)
            if request.task.id == BAD:
                return Failure(
                    Cause.DIVERGED, Scope.ENGINE, retryable=False, why="NaN in the logits"
                )
            return made.well(request)

        return behave

    made = world(diverged, recovery={"replacements": 0})
    with pytest.raises(Diverged, match="NaN in the logits"):
        made.run(steps=30)
    assert made.rollouts.scheduler.quarantined == set(), "the task is not to blame"
    assert made.environment.replaced == 0
    assert not made.named("worker_lost")


def test_an_actor_on_which_every_task_hangs_is_replaced_though_they_are_contained(
    world: Make,
) -> None:
    def sick(made: World) -> Behave:
        async def behave(actor: Handle, request: RolloutRequest) -> Any:
            await asyncio.sleep(0.001)
            if actor is made.spawned[0] and len(actor.played) > 10:
                return failed(request, "reset gave no answer", hung=True, contained=True)
            return made.well(request)

        return behave

    made = world(sick, environment={"actors": 2})
    made.run(steps=30)
    [lost] = made.named("worker_lost")
    assert lost["why"].startswith("episodes of 3 different tasks failed on it one after the other")
    assert made.rollouts.scheduler.quarantined == set()


def test_a_hang_does_not_use_up_its_neighbours_attempts(world: Make) -> None:
    """One attempt each, one actor: the group that plays beside the one that hangs is killed with
    it.
    """

    def slow(made: World) -> Behave:
        async def behave(actor: Handle, request: RolloutRequest) -> Any:
            await asyncio.sleep(0.02 if request.task.id == BAD else 0.05)
            return (
                failed(request, "step gave no answer", hung=True)
                if request.task.id == BAD
                else made.well(request)
            )

        return behave

    made = world(slow, environment={"actors": 1, "attempts": 1}, recovery={"replacements": 0})
    made.run(steps=4)
    assert made.ledger.counts()["excluded[environment_failure]"] == 8
    assert made.ledger.counts()["trained"] == 4 * 16
    assert made.environment.replaced == 1, (
        "those that hang came in one call, and were answered for together"
    )


def test_a_sick_actor_is_replaced_and_no_task_is_held_responsible(world: Make) -> None:
    """From its 11th episode on one process fails at once, as with a full disk: it must not attract
    the work.
    """

    def sick(made: World) -> Behave:
        async def behave(actor: Handle, request: RolloutRequest) -> Any:
            if actor is made.spawned[0] and len(actor.played) > 10:
                return failed(request, "reset raised OSError: No space left on device")
            await asyncio.sleep(0.01)
            return made.well(request)

        return behave

    made = world(sick, environment={"actors": 2})
    made.run(steps=30)
    assert made.rollouts.scheduler.quarantined == set()
    [lost] = made.named("worker_lost")
    assert lost["why"].startswith(
        "episodes of 3 different tasks failed on it one after the other, last: reset raised OSError"
    )
    assert "excluded[environment_failure]" not in made.ledger.counts()


def test_a_slot_on_a_sick_node_gets_less_and_less_to_do(world: Make) -> None:
    """Every replacement in slot 0 is sick from the start."""

    def sick(made: World) -> Behave:
        async def behave(actor: Handle, request: RolloutRequest) -> Any:
            if actor.slot == 0 and made.version.step >= 2:
                return failed(request, "reset raised OSError: No space left on device")
            await asyncio.sleep(0.01)
            return made.well(request)

        return behave

    made = world(sick, environment={"actors": 4}, recovery={"replacements": 10})
    made.run(steps=60)
    assert made.rollouts.scheduler.quarantined == set()
    assert "excluded[environment_failure]" not in made.ledger.counts()
    on_sick = sum(len(actor.played) for actor in made.spawned if actor.slot == 0)
    assert on_sick < sum(made.plays.values()) / 10, "a quarter would be its share"


def test_a_sick_node_condemns_no_task_however_many_actors_are_on_it(world: Make) -> None:
    """Retries go to another node, and two actors of one node are one witness."""

    def sick(made: World) -> Behave:
        async def behave(actor: Handle, request: RolloutRequest) -> Any:
            if actor.slot < 3 and made.version.step >= 2:
                return failed(request, "reset raised OSError: No space left on device")
            await asyncio.sleep(0.01)
            return made.well(request)

        return behave

    made = world(sick, nodes=Houses("a", "a", "a", "b"), environment={"actors": 4, "attempts": 2})
    made.run(steps=20)
    assert made.rollouts.scheduler.quarantined == set()
    assert "excluded[environment_failure]" not in made.ledger.counts()


def test_an_environment_that_never_works_ends_the_run_with_its_reason(world: Make) -> None:
    made = world(broken, environment={"actors": 3})
    with pytest.raises(
        GenerationBudgetSpent,
        match=r"environment_failure 64: Guess\.step must return StepResult, not str",
    ):
        made.run(steps=1)
    assert made.rollouts.scheduler.quarantined == set()
    assert made.named("worker_lost") == []
    assert sum(made.plays.values()) == 64 * 2, (
        "what a second actor confirms is not tried a third time"
    )


@pytest.mark.parametrize(("actors", "nodes"), [(1, "a"), (2, "a"), (2, "ab"), (3, "aab")])
def test_a_task_that_fails_everywhere_is_quarantined(world: Make, actors: int, nodes: str) -> None:
    def bad(made: World) -> Behave:
        async def behave(actor: Handle, request: RolloutRequest) -> Any:
            await asyncio.sleep(0.001)
            return failed(request, "crashed") if request.task.id == BAD else made.well(request)

        return behave

    made = world(bad, nodes=Houses(*nodes), environment={"actors": actors})
    made.run(steps=30)
    [failure] = made.bad
    assert failure.path.endswith("train.jsonl:4")
    assert failure.reason == "its environment failed in 2 groups"
    assert made.plays[BAD] == 2 * 8 * 3
    assert made.named("worker_lost") == []


@pytest.mark.parametrize(("slots", "condemned"), [((0, 0), False), ((0, 1), True)])
def test_quarantine_needs_failures_on_two_actors(slots: tuple[int, int], condemned: bool) -> None:
    """A task needs what the node of slot 0 lacks; meanwhile others go well everywhere.

    In each group two of its episodes fail.
    """
    blame, reasons = FailureHistory(EnvironmentSettings(actors=2)), []
    for group in range(4):
        for slot in slots:
            blame.begins(group, slot)
            blame.failed(
                group, BAD, slot, slot, failed(None, "reset raised FileNotFoundError: no browser")
            )
        for slot in (0, 1):
            blame.succeeded(slot)
        reasons.append(blame.ended(group, BAD, failed=True))
    assert any(reasons) == condemned


def test_failures_are_forgotten_once_the_task_goes_well(world: Make) -> None:
    """It fails in every other group, three times in all."""
    groups: list[int] = []

    def moody(made: World) -> Behave:
        async def behave(actor: Handle, request: RolloutRequest) -> Any:
            await asyncio.sleep(0.001)
            if request.task.id == BAD and request.id.group not in groups:
                groups.append(request.id.group)
            wrong = request.task.id == BAD and groups.index(request.id.group) % 2 == 0
            return failed(request, "crashed") if wrong else made.well(request)

        return behave

    made = world(moody, environment={"actors": 2})
    made.run(steps=66)
    assert len(groups) > 4
    assert made.bad == []


def test_an_actor_that_dies_by_itself_costs_an_attempt_and_the_budget(world: Make) -> None:
    def dies(made: World) -> Behave:
        async def behave(actor: Handle, request: RolloutRequest) -> Any:
            await asyncio.sleep(0.001)
            if actor is made.spawned[0]:
                raise ActorDiedError()
            return made.well(request)

        return behave

    made = world(dies, environment={"actors": 1, "attempts": 2})
    made.run(steps=2)
    assert made.environment.replaced == 1
    assert made.environment.ended == set()
    assert made.ledger.counts()["trained"] == 32


def test_an_actor_full_of_hung_tools_is_replaced_for_nothing(world: Make) -> None:
    def spent(made: World) -> Behave:
        async def behave(actor: Handle, request: RolloutRequest) -> Any:
            await asyncio.sleep(0.001)
            if len(actor.played) > 20:
                raise WorkerSpent("8 calls of tools hang in this process")
            return made.well(request)

        return behave

    made = world(spent, environment={"actors": 1, "attempts": 1}, recovery={"replacements": 0})
    made.run(steps=5)
    assert made.environment.replaced >= 3
    assert made.ledger.counts()["trained"] == 5 * 16


# The grader's surroundings ------------------------------------------------------------------------


def with_full_disk(made: World, slots: set[int]) -> list[int]:
    """The reward actors in these slots answer at once that they cannot.

    Returns who is asked, in order.
    """
    asked: list[int] = []

    async def score(actor: Handle) -> Scored | Unscored:
        asked.append(actor.slot)
        if actor.slot in slots:
            return Unscored(UnscoredKind.REWARD_UNAVAILABLE, "OSError: No space left on device")
        await asyncio.sleep(0.002)
        return Scored(made.random.random())

    made.score = score  # type: ignore[method-assign]
    return asked


def test_a_reward_actor_with_a_full_disk_gets_less_and_less_to_do(world: Make) -> None:
    made = world(well, environment={"actors": 2}, reward__actors=2)
    asked = with_full_disk(made, {0})
    made.run(steps=10)
    assert made.ledger.counts()["trained"] == made.ledger.counts()["issued"]
    assert asked.count(0) < asked.count(1) / 4


def test_what_two_reward_actors_cannot_score_has_no_score(world: Make) -> None:
    made = world(well, environment={"actors": 2}, reward__actors=3)
    asked = with_full_disk(made, {0, 1, 2})
    with pytest.raises(
        GenerationBudgetSpent, match=r"reward_unavailable 64: OSError: No space left"
    ):
        made.run(steps=1)
    assert len(asked) == 2 * 64


def test_the_only_reward_actor_is_asked_once(world: Make) -> None:
    made = world(well, environment={"actors": 2})
    asked = with_full_disk(made, {0})
    with pytest.raises(
        GenerationBudgetSpent, match=r"reward_unavailable 64: OSError: No space left"
    ):
        made.run(steps=1)
    assert len(asked) == 64


def well(made: World) -> Behave:
    async def behave(actor: Handle, request: RolloutRequest) -> Any:
        await asyncio.sleep(0)
        return made.well(request)

    return behave


# Leases -------------------------------------------------------------------------------------------


def pool(world: World, size: int, nodes: Any = None) -> Pool:
    return Pool(
        "tester",
        size,
        lambda slot: Handle(world, slot),
        RecoverySettings(),
        lambda *_, **__: None,
        nodes=nodes,
    )


def test_a_slot_is_avoided_with_its_node_if_there_is_another(world: Make) -> None:
    async def test() -> None:
        idle = pool(world(hangs), 4, Houses("a", "a", "b", "b"))
        await idle.start()
        assert {(await idle.lease(avoid={0})).node for _ in range(4)} == {"b"}
        assert (await idle.lease("group 7", avoid={0, 2})).slot in (1, 3)
        assert (await idle.lease("group 7", avoid={0, 1, 2, 3})).slot in range(4)

    asyncio.run(test())


def test_an_idle_pool_takes_turns_and_avoids_slots(world: Make) -> None:
    async def test() -> None:
        idle = pool(world(hangs), 3)
        await idle.start()
        turns = []
        for _ in range(6):
            lease = await idle.lease()
            turns.append(lease.slot)
            idle.release(lease.worker)
        assert turns == [0, 1, 2, 0, 1, 2]
        assert (await idle.lease(avoid={0, 2})).slot == 1
        assert (await idle.lease(avoid={0, 1, 2})).slot in (0, 2), "rather one of them than none"

    asyncio.run(test())


def test_failures_weigh_as_leases_until_a_success_and_stay_with_the_slot(world: Make) -> None:
    async def test() -> None:
        used = pool(world(hangs), 2)
        await used.start()
        sick = await used.lease()
        for _ in range(3):
            used.release(sick.worker, well=False)
            used.workers[sick.worker].leases += 1
        used.release(sick.worker)
        assert [(await used.lease()).slot for _ in range(3)] == [
            1,
            1,
            1,
        ], "3 leases weigh as much as 3 failures"
        used.lost(sick.worker, "sick")
        while len(used.workers) < 2:
            await asyncio.sleep(0.01)
        assert {worker.slot: worker.misses for worker in used.workers.values()} == {0: 3, 1: 0}
        again = next(serial for serial, worker in used.workers.items() if worker.slot == 0)
        used.workers[again].leases += 1
        used.release(again, well=True)
        assert (await used.lease()).slot == 0

    asyncio.run(test())


@pytest.mark.parametrize(("attempts", "scored"), [(9, True), (8, False)])
def test_a_reset_that_fails_eight_times_costs_its_task_no_reward(
    world: Make, attempts: int, scored: bool
) -> None:
    """With an attempt more the episode is played and scored like any other; without, it is left out
    and counted.
    """
    failures: Counter[int] = Counter()

    def flaky(made: World) -> Behave:
        async def behave(actor: Handle, request: RolloutRequest) -> Any:
            await asyncio.sleep(0.001)
            sample = request.id.sample
            if request.task.id == BAD and sample == 0 and failures[sample] < 8:
                failures[sample] += 1
                return failed(
                    request, f"reset raised OSError: machine {failures[sample]} is not there"
                )
            return made.well(request)

        return behave

    made = world(flaky, environment={"actors": 4, "attempts": attempts})
    made.run(steps=4)
    assert failures[0] == 8
    excluded = made.ledger.counts().get("excluded[environment_failure]", 0)
    assert excluded == (0 if scored else 1)
    assert made.rollouts.scheduler.quarantined == set(), "one group alone does not condemn a task"
