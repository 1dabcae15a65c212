"""A call carries the episodes of a group: what is in one, who is played again, and with whom.

No Ray cluster.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from rayloop.cluster.supervision.calls import MARGIN
from rayloop.core.deadlines import WAITS
from rayloop.core.failures import Failure
from rayloop.core.groups import Scored, Unscored, UnscoredKind
from rayloop.core.types import RolloutRequest
from rayloop.envs.episode import CLOSE_TIMEOUT_S
from tests.support.stand_ins import BAD, Behave, Handle, Make, World, bad_data, failed

EIGHT = list(range(8))


def unless(fault: Callable[[World, Handle, RolloutRequest], Any]) -> Callable[[World], Behave]:
    """Episodes go well, but for those of the bad task's fourth member, for which ``fault`` says
    what becomes of them.
    """

    def behaves(made: World) -> Behave:
        async def behave(actor: Handle, request: RolloutRequest) -> Any:
            await asyncio.sleep(0.001)
            if (
                request.task.id == BAD
                and request.id.sample == 3
                and (status := fault(made, actor, request))
            ):
                return status
            return made.well(request)

        return behave

    return behaves


def calls(made: World) -> list[list[int]]:
    return [samples for actor in made.spawned for samples in actor.calls]


def well(made: World, actor: Handle, request: RolloutRequest) -> None: ...


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (None, [EIGHT]),
        (8, [EIGHT]),
        (3, [[0, 1, 2], [3, 4, 5], [6, 7]]),
        (1, [[sample] for sample in EIGHT]),
    ],
)
@pytest.mark.parametrize("per", ["trajectory", "group"])
def test_a_group_is_one_call_or_as_many_as_were_asked_for(
    world: Make, size: int | None, expected: list[list[int]], per: str
) -> None:
    made = world(unless(well), environment={"actors": 2, "episodes_at_once": size}, reward__per=per)
    scored: list[int] = []
    score = made.score_group

    async def score_group(actor: Handle, payloads: list[Any]) -> Any:
        scored.append(len(payloads))
        return await score(actor, payloads)

    made.score_group = score_group  # type: ignore[method-assign]
    made.run(steps=1)
    assert sorted(calls(made)) == sorted(expected * 2), "two groups"
    assert made.ledger.counts()["trained"] == 16
    assert scored == ([8, 8] if per == "group" else []), "together, however many calls played them"


def test_a_member_that_failed_is_played_again_alone(world: Make) -> None:
    def once(made: World, actor: Handle, request: RolloutRequest) -> Failure | None:
        return failed(request, "crashed") if request.attempt == 0 else None

    made = world(unless(once), environment={"actors": 2})
    made.run(steps=2)
    assert sorted(calls(made)) == [*[EIGHT] * 4, [3]]
    assert made.ledger.counts()["trained"] == 32
    [reported] = made.named("episode_failed")
    assert reported["trajectory"].endswith("/3")


def test_bad_data_that_one_member_meets_is_looked_at_elsewhere_by_that_member(world: Make) -> None:
    def once(made: World, actor: Handle, request: RolloutRequest) -> Failure | None:
        return bad_data(request, "truncated") if request.attempt == 0 else None

    made = world(unless(once), environment={"actors": 2})
    made.run(steps=2)
    assert made.bad == []
    assert made.ledger.counts()["trained"] == 32
    assert sorted(calls(made)) == [*[EIGHT] * 4, [3]]


@pytest.mark.parametrize("actors", [1, 2, 4])
def test_a_member_that_kills_its_actor_costs_the_others_one_replay_and_no_more(
    world: Make, actors: int
) -> None:
    plays: Counter[int] = Counter()

    def kills(made: World) -> Behave:
        async def behave(actor: Handle, request: RolloutRequest) -> Any:
            bad = request.task.id == BAD
            plays.update([request.id.sample] * bad)
            await asyncio.sleep(0.001)
            if bad and request.id.sample == 3:
                actor.dead.set()
            await asyncio.sleep(0.01)
            return made.well(request)

        return behave

    made = world(
        kills, environment={"actors": actors, "attempts": 2}, recovery={"replacements": 20}
    )
    made.run(steps=2)
    assert plays == {
        **dict.fromkeys(EIGHT, 2),
        3: 3,
    }, "the first time nobody knows who it was; then it has its attempts"


def test_who_is_lost_on_account_of_another_call_is_not_suspected(world: Make) -> None:
    """A hang in one group's call ends the calls of the others: their episodes are played again at
    the same time.
    """
    at_once: list[int] = []
    running = 0

    def hangs(made: World) -> Behave:
        async def behave(actor: Handle, request: RolloutRequest) -> Any:
            nonlocal running
            running += 1
            try:
                await asyncio.sleep(0.02 if request.task.id == BAD else 0.05)
                if request.attempt:
                    at_once.append(running)
            finally:
                running -= 1
            return (
                failed(request, "step gave no answer", hung=True)
                if request.task.id == BAD
                else made.well(request)
            )

        return behave

    made = world(hangs, environment={"actors": 1, "attempts": 1}, recovery={"replacements": 0})
    made.run(steps=4)
    assert max(at_once) >= 8


def test_the_deadline_of_a_call_leaves_its_actor_time_to_answer(world: Make) -> None:
    waits: list[tuple[str, float]] = []

    def look(made: World) -> Behave:
        async def behave(actor: Handle, request: RolloutRequest) -> Any:
            await asyncio.sleep(0.001)
            waits.extend(
                (wait.what, made.config.environment.episode_timeout) for wait in WAITS.oldest()
            )
            return made.well(request)

        return behave

    made = world(look, environment={"actors": 1})
    made.run(steps=1)
    assert "episodes 1/0@0 to 1/7@0 of task train-0 on environment 0" in {what for what, _ in waits}
    assert MARGIN > CLOSE_TIMEOUT_S


def test_a_call_that_waits_for_room_has_a_deadline_behind_those_before_it(world: Make) -> None:
    left: list[float] = []

    def look(made: World) -> Behave:
        async def behave(actor: Handle, request: RolloutRequest) -> Any:
            await asyncio.sleep(0.001)
            now = asyncio.get_running_loop().time()
            left.extend(
                (wait.limit.when() or now) - now
                for wait in WAITS.open.values()
                if wait.limit and "episode" in wait.what
            )
            return made.well(request)

        return behave

    made = world(look, environment={"actors": 1, "episodes_at_once": 2})
    made.run(steps=1)
    each = made.config.environment.episode_timeout + CLOSE_TIMEOUT_S
    assert max(left) > 4 * each, "three calls of two episodes may come before a group's last one"


def test_only_the_members_that_a_reward_actor_could_not_score_are_asked_about_again(
    world: Make,
) -> None:
    made = world(unless(well), environment={"actors": 1}, reward__actors=2)
    asked: Counter[int] = Counter()

    async def score(actor: Handle) -> Scored | Unscored:
        asked[actor.slot] += 1
        ill = actor.slot == 0 and asked[0] % 8 == 3
        await asyncio.sleep(0)
        if ill:
            return Unscored(UnscoredKind.REWARD_UNAVAILABLE, "OSError: No space left on device")
        return Scored(made.random.random())

    made.score = score  # type: ignore[method-assign]
    made.run(steps=2)
    assert asked[0] % 8 == 0, "whole groups"
    assert sum(asked.values()) == 32 + asked[0] // 8, (
        "and one member of each that the ill one was given"
    )
    assert asked[0] >= 8
    assert made.ledger.counts()["trained"] == 32


@pytest.mark.parametrize("per", ["trajectory", "group"])
def test_a_reward_actor_that_dies_costs_the_group_a_call(world: Make, per: str) -> None:
    made = world(unless(well), environment={"actors": 1}, reward__per=per)
    deaths = iter([True])

    async def score(actor: Handle) -> Scored | Unscored:
        if next(deaths, False):
            actor.dead.set()
            await asyncio.sleep(60)
        return Scored(made.random.random())

    made.score = score  # type: ignore[method-assign]
    made.run(steps=1)
    assert made.ledger.counts()["trained"] == 16
    assert [event["role"] for event in made.named("worker_lost")] == ["reward"]
