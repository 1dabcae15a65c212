"""Production after losses and resumes: what is lost, left over or begun again costs no more than
itself. No Ray cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rayloop.core.failures import AlarmStopped, GenerationBudgetSpent
from rayloop.core.groups import Group, Scored, Unscored
from rayloop.core.types import RolloutRequest, TrajectoryId, Version
from rayloop.rollout.finished import without
from tests.cluster.test_rollout_manager import Loop, Play, crashes, differs, issues, spread
from tests.support.runs import ledger_closes


def resumed(folder: Path, before: Loop, play: Play, **changes: Any) -> Loop:
    """Another run of production from the state of this one. It begins as if synced again."""
    loop = Loop(folder, play, **changes)
    loop.continues(before, folder)
    loop.version = before.version
    loop.rollouts.synced(loop.version)
    return loop


def stopped(folder: Path, play: Play, seconds: float, **changes: Any) -> Loop:
    """Production that was stopped after so many seconds without a step.

    Nothing of it is cancelled, as in a checkpoint.
    """
    loop = Loop(folder, play, **changes)
    close, loop.rollouts.close = loop.rollouts.close, lambda: None  # type: ignore[method-assign]

    async def test() -> None:
        loop.rollouts._collecting = True
        loop.rollouts._notify()
        await asyncio.sleep(seconds)

    loop.run(test)
    loop.rollouts.close = close  # type: ignore[method-assign]
    return loop


def test_one_task_whose_grader_raises_does_not_end_a_resumed_run(tmp_path: Path) -> None:
    """Its group was in flight, so it is played first."""

    async def slow(loop: Loop, request: RolloutRequest) -> Scored | Unscored:
        await asyncio.sleep(request.id.group)
        return await crashes(loop, request) if request.task.id == "train-2" else spread(request)

    async def fast(loop: Loop, request: RolloutRequest) -> Scored | Unscored:
        await asyncio.sleep(1 / request.id.group)
        return await crashes(loop, request) if request.task.id == "train-2" else spread(request)

    rounds = {"algorithm__filtering": {"groups_per_generation": 3}}
    before = stopped(tmp_path, slow, 2.5, **rounds)
    assert list(before.rollouts.in_flight) == [3]
    loop = resumed(tmp_path, before, fast, **rounds)
    assert issues(loop.run(loop.step)) == [1, 2]
    assert loop.ledger.counts()["excluded[grader_error]"] == 4
    ledger_closes(loop.ledger.counts())


# Payloads that are gone ---------------------------------------------------------------------------


def loses(
    per_group: int, times: int = 1
) -> Callable[[tuple[Group, ...]], Awaitable[set[TrajectoryId]]]:
    """The trainer finds so often that the first members of each group are gone."""
    asked: list[int] = []

    async def hold(groups: tuple[Group, ...]) -> set[TrajectoryId]:
        asked.append(1)
        gone = range(per_group if len(asked) <= times else 0)
        return {m.summary.id for group in groups for m in group.kept if m.summary.id.sample in gone}

    return hold


def test_losses_alarm_as_what_is_excluded(tmp_path: Path) -> None:
    loop = Loop(tmp_path, differs, alarms={"excluded": {"warn": 0.05, "stop": 0.2}})

    async def test() -> None:
        for step in range(1, 20):
            groups = await loop.collect(loses(2))
            loop.rollouts.ready.settle_trained(groups)
            loop.version = Version(1, step)
            loop.rollouts.synced(loop.version)

    with pytest.raises(
        AlarmStopped, match=r"of the last \d+ trajectories were excluded from training"
    ):
        loop.run(test)


def test_what_is_lost_before_its_group_is_committed_is_not_stored_for_replay(
    tmp_path: Path,
) -> None:
    async def play(loop: Loop, request: RolloutRequest) -> Scored:
        return Scored(float(request.id.sample % 2))

    loop = Loop(tmp_path, play, algorithm__replay={"kind": "corrected"})
    plain, gone = loop.finish, {TrajectoryId(1, 1)}

    async def finish(group: Group) -> Group:
        """As the driver's, when the reference cannot fetch a payload."""
        group = await plain(group)
        if group.number != 1:
            return group
        loop.rollouts.lose(gone)
        return without(group, gone)

    loop.finish = finish  # type: ignore[method-assign]
    loop.run(loop.step)
    stored = {
        member.summary.id
        for members in loop.rollouts.finished.buffer.state().values()
        for member in members
    }
    assert stored >= {TrajectoryId(1, 3), TrajectoryId(2, 1), TrajectoryId(2, 3)}
    assert not stored & gone


@pytest.mark.parametrize("batches", [1, 2])
def test_losses_are_made_up_for_beyond_the_budget(batches: int, tmp_path: Path) -> None:
    loop = Loop(tmp_path, differs, algorithm__filtering={"max_generation_batches": batches})

    async def test() -> int:
        groups = await loop.collect(loses(3, times=batches))
        return sum(len(group.kept) for group in groups)

    assert loop.run(test) == 8
    assert loop.rollouts.scheduler.issued_this_step == 0


def test_losses_without_end_are_made_up_for_once_and_blamed_on_no_filter(tmp_path: Path) -> None:
    loop = Loop(tmp_path, differs, algorithm__filtering={"max_generation_batches": 2})
    with pytest.raises(GenerationBudgetSpent, match=r"excluded\[payload_lost\] 32") as spent:
        loop.run(lambda: loop.collect(loses(4, times=99)))
    assert "loosen filters" not in str(spent.value)
    assert "32 were lost with the nodes that held them" in str(spent.value)
    assert loop.rollouts.scheduler.next_number == 2 * 4
    ledger_closes(loop.ledger.counts())


# Another bound on staleness -----------------------------------------------------------------------


@pytest.mark.parametrize("stale", [1, 2, 4])
def test_a_resume_keeps_its_own_bound_on_staleness(stale: int, tmp_path: Path) -> None:
    """Ten groups were in flight; a step takes two."""

    async def play(loop: Loop, request: RolloutRequest) -> Scored:
        most.append(
            loop.rollouts.ready.survivors + 4 * len(loop.rollouts.in_flight) + loop.rollouts._taken
        )
        await asyncio.sleep(0.01 * (1 + (request.id.group * 7919) % 5))
        return spread(request)

    most: list[int] = []
    before = stopped(tmp_path, play, 0.005, algorithm__staleness={"max_staleness": 4})
    assert len(before.rollouts.in_flight) == 10
    most.clear()
    loop = resumed(tmp_path, before, play, algorithm__staleness={"max_staleness": stale})

    async def test() -> list[int]:
        return [group for _ in range(8) for group in issues(await loop.step(between=0.01))]

    assert sorted(loop.run(test)[:10]) == list(range(1, 11))
    assert max(most) == (stale + 1) * 8
    assert "stale" not in loop.ledger.counts()


def test_a_resume_without_staleness_plays_in_rounds_what_was_in_flight_with_it(
    tmp_path: Path,
) -> None:
    """Also when it is stopped and resumed once more."""
    before = stopped(tmp_path, waits, 0.5, algorithm__staleness={"max_staleness": 4})
    once = resumed(tmp_path, before, waits)

    async def steps(loop: Loop, count: int) -> list[list[int]]:
        return [issues(await loop.step()) for _ in range(count)]

    assert once.run(lambda: steps(once, 2)) == [[1, 2], [3, 4]]
    again = resumed(tmp_path, once, waits)
    assert again.run(lambda: steps(again, 4)) == [[5, 6], [7, 8], [9, 10], [11, 12]]
    assert set(again.ledger.counts()) == {
        "issued",
        "in_flight",
        "ready",
        "trained",
        "attempts",
        "replayed",
    }


def test_a_spent_budget_does_not_keep_what_was_in_flight_from_being_played(tmp_path: Path) -> None:
    """The asynchronous step had a larger one, so that nothing more may be begun."""
    before = stopped(tmp_path, waits, 0.5, algorithm__staleness={"max_staleness": 4})
    loop = resumed(tmp_path, before, waits, algorithm__filtering={"max_generation_batches": 1})
    assert issues(loop.run(loop.step)) == [1, 2]


async def waits(loop: Loop, request: RolloutRequest) -> Scored:
    await asyncio.sleep(1)
    return spread(request)
