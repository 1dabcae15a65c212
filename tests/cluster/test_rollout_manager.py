"""Production with a player that only pretends to play: rounds, budget, staleness, quarantine,
order. No Ray cluster, and a clock that does not wait.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.virtual_time import VirtualLoop
from rayloop.core.deadlines import background
from rayloop.core.events import Event
from rayloop.core.failures import (
    ConfigError,
    DataFailure,
    GenerationBudgetSpent,
    GraderBroken,
    Preempted,
)
from rayloop.core.groups import Group, Member, Scored, Unscored, UnscoredKind
from rayloop.core.ledger import Ledger
from rayloop.core.types import (
    EndReason,
    RolloutRequest,
    Summary,
    Trajectory,
    TrajectoryId,
    Turn,
    Version,
)
from rayloop.data.cursor import TaskCursor
from rayloop.data.dataset import Dataset
from rayloop.grpo.advantage import build_advantage, with_advantages
from rayloop.grpo.filters import build_filters
from rayloop.grpo.selection import apply_filters
from rayloop.rollout.failed_episodes import FailureHistory
from rayloop.rollout.manager import FetchBatch, RolloutManager
from rayloop.rollout.scheduler import GroupRequest, GroupRollout
from rayloop.run.config import RunConfig
from rayloop.run.order import training_rows
from tests.support.plain import saved_and_read
from tests.support.runs import ledger_closes, settings

Play = Callable[["Loop", RolloutRequest], Awaitable[Scored | Unscored]]


class Reporter:
    def __init__(self) -> None:
        self.bad: list[DataFailure] = []
        self.events: list[tuple[str, str]] = []

    def event(self, event: Event) -> None:
        self.events.append((event.kind, event.record().get("why", "")))

    def bad_row(self, failure: DataFailure) -> None:
        self.bad.append(failure)


def member(request: RolloutRequest, outcome: Scored | Unscored, version: Version) -> Member:
    summary = Summary(
        request.id,
        0,
        request.task.id,
        "",
        EndReason.DONE,
        length=10,
        sampled_tokens=5,
        turns=1,
        images=0,
        observation_images=0,
        images_consistent=True,
        first_version=version,
        last_version=version,
    )
    turns = (Turn("assistant", (1, 2), logprobs=(-0.5, -1.0), version=version),)
    played = Trajectory(
        request.id, 0, request.task.id, request.seed, turns, request.sampling, EndReason.DONE
    )
    return Member(summary, outcome, payload=played)


class Loop:
    """The driver's part in it: collects steps, and is the player.

    ``play`` says what an episode earns.
    """

    def __init__(self, folder: Path, play: Play, **changes: Any) -> None:
        self.config = RunConfig.model_validate(
            settings(folder, folder, data__order="file", **changes)
        )
        self.ledger, self.reporter = Ledger(), Reporter()
        self.rollouts = RolloutManager(
            self.config,
            self.ledger,
            training_rows(self.config, self.reporter),
            self.reporter,
            FailureHistory(self.config.environment),
        )
        self.version = Version(1, 0)
        self.rollouts.synced(self.version)
        self.played: list[RolloutRequest] = []
        self.collecting = False
        self._play = play

    async def rollout_group(
        self, asked: Sequence[RolloutRequest], step: int, begins: Callable[[RolloutRequest], None]
    ) -> list[Member]:
        return await asyncio.gather(*(self._episode(request, begins) for request in asked))

    async def _episode(
        self, request: RolloutRequest, begins: Callable[[RolloutRequest], None]
    ) -> Member:
        self.played.append(request)
        begins(request)
        version = self.version
        return member(request, await self._play(self, request), version)

    async def finish(self, group: Group) -> Group:
        group = self.rollouts.finished.replay(group)
        group = with_advantages(group, build_advantage(self.config.algorithm.advantage))
        return apply_filters(group, build_filters(self.config.algorithm.filtering.filters))

    async def collect(self, hold: FetchBatch | None = None) -> tuple[Group, ...]:
        collected = await self.rollouts.collect(self.version, {}, *filter(None, [hold]))
        return collected.groups

    async def step(self, between: float = 0.0) -> tuple[Group, ...]:
        """Collect, pretend to train for a while, publish."""
        self.collecting = True
        groups = await self.collect()
        self.collecting = False
        await asyncio.sleep(between)
        self.rollouts.ready.settle_trained(groups)
        self.ledger.check()
        self.version = Version(1, self.version.step + 1)
        self.rollouts.synced(self.version)
        return groups

    def continues(self, before: Loop, folder: Path) -> None:
        """Become what ``before`` saved, written to ``folder`` and read again."""
        state = {"ledger": before.ledger.state(), "rollouts": before.rollouts.state()}
        state = saved_and_read(state, folder)
        self.ledger.restore(state["ledger"])
        self.ledger.reissue_live()
        self.rollouts.restore(state["rollouts"], lambda payload: payload)

    def run(self, test: Callable[[], Awaitable[Any]]) -> Any:
        async def both() -> Any:
            produce = self.rollouts.run(self, self.finish)  # type: ignore[arg-type]
            async with background(produce):
                return await asyncio.wait_for(test(), 30)

        try:
            with asyncio.Runner(loop_factory=VirtualLoop) as runner:
                return runner.run(both())
        finally:
            self.rollouts.close()
            self.ledger.check()


def spread(request: RolloutRequest) -> Scored:
    """Rewards that differ within a group, more in later groups."""
    return Scored(request.id.sample * request.id.group / 100)


async def differs(loop: Loop, request: RolloutRequest) -> Scored:
    return spread(request)


async def equal(loop: Loop, request: RolloutRequest) -> Scored:
    return Scored(0.5)


def issues(groups: tuple[Group, ...]) -> list[int]:
    return [group.number for group in groups]


def test_a_synchronous_round_starts_and_ends_within_its_step(tmp_path: Path) -> None:
    outside: list[RolloutRequest] = []

    async def play(loop: Loop, request: RolloutRequest) -> Scored:
        await asyncio.sleep(0.001 * request.id.sample)
        if not loop.collecting:
            outside.append(request)
        return spread(request)

    loop = Loop(tmp_path, play)

    async def test() -> list[list[int]]:
        return [issues(await loop.step(between=0.02)) for _ in range(4)]

    assert loop.run(test) == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert outside == []
    counts = loop.ledger.counts()
    assert counts["issued"] == counts["trained"] == 4 * 8


def test_filtered_groups_are_refilled_within_the_step(tmp_path: Path) -> None:
    async def play(loop: Loop, request: RolloutRequest) -> Scored:
        return spread(request) if request.id.group % 3 == 0 else Scored(0.5)

    loop = Loop(tmp_path, play)

    async def test() -> list[int]:
        return issues(await loop.step())

    assert loop.run(test) == [3, 6]
    counts = loop.ledger.counts()
    ledger_closes(counts)
    assert counts["trained"] == 8
    assert counts["filtered[all_equal]"] == 4 * (
        loop.rollouts.scheduler.next_number - loop.rollouts.scheduler.next_number // 3
    )


def test_the_budget_is_spent_exactly_and_the_error_counts(tmp_path: Path) -> None:
    loop = Loop(tmp_path, equal, algorithm__filtering={"max_generation_batches": 3})
    with pytest.raises(
        GenerationBudgetSpent,
        match=r"0 of 8 .* survived 3 generation batches.*filtered\[all_equal\] 24",
    ):
        loop.run(loop.step)
    assert loop.rollouts.scheduler.next_number == 3 * 2


def test_a_smaller_batch_is_trained_when_enough_survived(tmp_path: Path) -> None:
    async def play(loop: Loop, request: RolloutRequest) -> Scored:
        return spread(request) if request.id.group == 1 else Scored(0.5)

    loop = Loop(
        tmp_path, play, algorithm__filtering={"min_fraction": 0.5, "max_generation_batches": 2}
    )

    async def test() -> list[int]:
        return issues(await loop.step())

    assert loop.run(test) == [1]
    assert loop.rollouts.scheduler.next_number == 4


def test_the_groups_that_differ_most_are_trained_and_the_rest_is_surplus(tmp_path: Path) -> None:
    loop = Loop(tmp_path, differs, algorithm__filtering={"groups_per_generation": 5})

    async def test() -> list[int]:
        return issues(await loop.step())

    assert loop.run(test) == [4, 5]
    assert loop.ledger.counts()["surplus[left_over]"] == 3 * 4


def test_what_is_left_over_competes_again_while_fresh(tmp_path: Path) -> None:
    changes = {
        "algorithm__filtering": {"ranking": "fifo"},
        "algorithm__staleness": {"max_staleness": 1},
    }
    loop = Loop(tmp_path, differs, **changes)

    async def test() -> list[list[int]]:
        await asyncio.sleep(0.05)  # two steps' worth is admitted
        assert loop.rollouts.scheduler.next_number == 4
        return [issues(await loop.step(between=0.02)) for _ in range(3)]

    assert loop.run(test) == [[1, 2], [3, 4], [5, 6]]
    assert "stale" not in loop.ledger.counts(), (
        "what trains next must be admitted so that it is fresh"
    )


def test_what_is_too_old_is_stale(tmp_path: Path) -> None:
    changes = {
        "algorithm__filtering": {"ranking": "fifo"},
        "algorithm__staleness": {"max_staleness": 1},
    }
    loop = Loop(tmp_path, differs, **changes)

    async def test() -> list[int]:
        await asyncio.sleep(0.05)
        assert loop.rollouts.ready.survivors == 16
        loop.version = Version(1, 2)
        return issues(await loop.step())

    assert loop.run(test) == [5, 6]
    assert loop.ledger.counts()["stale"] == 16


def held_back(released: asyncio.Event) -> Play:
    """Group 1 ends when it is released, all others at once."""

    async def play(loop: Loop, request: RolloutRequest) -> Scored:
        if request.id.group == 1:
            await released.wait()
        return spread(request)

    return play


@pytest.mark.parametrize(("when_late", "second"), [("wait", [1, 4]), ("drop", [4, 5])])
def test_a_group_that_would_be_too_old_at_the_next_step_is_waited_for(
    when_late: str, second: list[int], tmp_path: Path
) -> None:
    released = asyncio.Event()
    changes = {
        "algorithm__filtering": {"ranking": "fifo"},
        "algorithm__staleness": {"max_staleness": 1, "when_late": when_late},
    }
    loop = Loop(tmp_path, held_back(released), **changes)

    async def test() -> list[list[int]]:
        first = issues(await loop.step())
        next_one = asyncio.create_task(loop.step())
        await asyncio.sleep(0.05)
        assert next_one.done() == (when_late == "drop"), "two younger groups are ready"
        released.set()
        return [
            first,
            issues(await next_one),
            *[issues(await loop.step(between=0.01)) for _ in range(2)],
        ]

    steps = loop.run(test)
    assert steps[:2] == [[2, 3], second]
    assert loop.ledger.counts().get("stale", 0) == (4 if when_late == "drop" else 0)


def test_a_group_counts_from_when_it_was_let_into_the_engines_for_the_last_time(
    tmp_path: Path,
) -> None:
    config = RunConfig.model_validate(
        settings(tmp_path, tmp_path, algorithm__staleness={"max_staleness": 1})
    )
    changes: list[str] = []
    playing = GroupRollout(config, lambda: changes.append("begun again"))
    admitted, failed, ended = (asyncio.Event() for _ in range(3))

    class EpisodeRunner:
        async def rollout_group(
            self,
            asked: Sequence[RolloutRequest],
            step: int,
            begins: Callable[[RolloutRequest], None],
        ) -> list[Member]:
            first, *others = asked
            await admitted.wait()
            begins(first)
            await failed.wait()
            begins(first)
            await ended.wait()
            unplayed = [
                member(r, Unscored(UnscoredKind.ENVIRONMENT_FAILURE), Version(0, 0)) for r in others
            ]
            return [member(first, Scored(1.0), Version(1, 4)), *unplayed]

    def due() -> list[int]:
        return [
            step for step in range(playing.version.step, 8) if playing.any_due(Version(1, step), {})
        ]

    async def test() -> None:
        task = Dataset(config.data.train, config.data.reader.build(), True, print)[0]
        playing.version = Version(1, 0)
        group = asyncio.create_task(
            playing.rollout_group(GroupRequest(1, 0, 1), task, EpisodeRunner())
        )  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert due() == []
        for version, event, expected in ((2, admitted, [3]), (3, failed, [4]), (5, ended, [5])):
            playing.version = Version(1, version)
            event.set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert due() == expected
        await group
        assert changes == ["begun again"]
        playing.forget(1)
        assert due() == []

    asyncio.run(test())


def test_a_stop_ends_the_wait_for_a_late_group(tmp_path: Path) -> None:
    loop = Loop(tmp_path, held_back(asyncio.Event()), algorithm__staleness={"max_staleness": 1})

    async def test() -> None:
        await loop.step()
        asyncio.get_running_loop().call_later(0.02, loop.rollouts.stop)
        await loop.step()

    with pytest.raises(Preempted):
        loop.run(test)


def test_what_is_too_old_is_dropped_by_data_source(tmp_path: Path) -> None:
    loop = Loop(tmp_path, differs, algorithm__staleness={"max_staleness": 1})
    sources: list[Mapping[str, int]] = []

    async def test() -> None:
        await asyncio.sleep(0.05)
        loop.version = Version(1, 2)
        sources.append((await loop.rollouts.collect(loop.version, {})).dropped)

    loop.run(test)
    assert sources == [{"stale/unnamed": 16}]


@pytest.mark.parametrize("batch", [2, 8, 16])
def test_the_bound_on_staleness_holds_whatever_a_generation_batch_is(
    batch: int, tmp_path: Path
) -> None:
    most = 0

    async def play(loop: Loop, request: RolloutRequest) -> Scored:
        nonlocal most
        rollouts = loop.rollouts
        most = max(most, rollouts.ready.survivors + 4 * len(rollouts.in_flight) + rollouts._taken)
        await asyncio.sleep(0.004 + 0.002 * (request.id.group % 7))
        return spread(request)

    changes = {
        "algorithm__filtering": {"groups_per_generation": batch},
        "algorithm__staleness": {"max_staleness": 1},
    }
    loop = Loop(tmp_path, play, **changes)

    async def test() -> None:
        for _ in range(10):
            await loop.step(between=0.01)

    loop.run(test)
    assert most == 2 * 8
    assert "stale" not in loop.ledger.counts()


@pytest.mark.parametrize("stale", [1, 2, 4, 8])
def test_asynchronous_defaults_throw_nothing_away_when_the_trainer_is_the_slower_side(
    stale: int, tmp_path: Path
) -> None:
    """Later groups have the larger spread, so that ranking alone would let older ones wait until
    they are stale.
    """

    async def play(loop: Loop, request: RolloutRequest) -> Scored:
        await asyncio.sleep(0.002)
        return spread(request)

    loop = Loop(tmp_path, play, algorithm__staleness={"max_staleness": stale})
    counts: list[dict[str, int]] = []

    async def test() -> None:
        for _ in range(12):
            await loop.step(between=0.01)
        counts.append(loop.ledger.counts())

    loop.run(test)
    (found,) = counts
    assert found["trained"] == 12 * 8
    assert found["issued"] == found["trained"] + found["ready"] + found["in_flight"], found


def stopped_and_resumed(folder: Path, stop: float | None) -> list[list[int]]:
    """Two synchronous steps of rounds of five groups, the larger spread last; with ``stop``, by
    another production from then on.

    On a virtual clock: group n ends after n seconds.
    """

    async def play(loop: Loop, request: RolloutRequest) -> Scored:
        await asyncio.sleep(request.id.group)
        return spread(request)

    changes = {"algorithm__filtering": {"groups_per_generation": 5}, "rollout__deterministic": True}

    async def steps(loop: Loop, until: float | None = None) -> list[list[int]]:
        async with background(loop.rollouts.run(loop, loop.finish)):  # type: ignore[arg-type]
            if until is not None:
                asyncio.get_running_loop().call_later(until, loop.rollouts.stop)
            return [issues(await loop.step()) for _ in range(2)]

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = Loop(folder, play, **changes)
        if stop is None:
            return runner.run(steps(loop))
        with pytest.raises(Preempted):
            runner.run(steps(loop, stop))
        resumed = Loop(folder, play, **changes)
        resumed.continues(loop, folder)
        return runner.run(steps(resumed))


@pytest.mark.parametrize("stop", [0.5, 2.5, 3.5, 4.5])
def test_a_run_stopped_in_mid_round_trains_what_an_uninterrupted_one_does(
    stop: float, tmp_path: Path
) -> None:
    whole = stopped_and_resumed(tmp_path, None)
    assert whole == [[4, 5], [9, 10]]
    assert stopped_and_resumed(tmp_path, stop) == whole


def test_groups_that_grew_between_stop_and_resumption_are_played_under_new_numbers(
    tmp_path: Path,
) -> None:
    first = Ledger()
    first.issue([TrajectoryId(group, sample) for group in (1, 2) for sample in range(2)])
    loop = Loop(tmp_path, differs)
    loop.ledger.restore(first.state())
    loop.ledger.reissue_live()
    loop.rollouts.scheduler.reissue = [GroupRequest(number, number - 1, 1) for number in (1, 2)]
    loop.rollouts.scheduler.next_number, loop.rollouts.scheduler.issued_this_step = 2, 2

    async def test() -> list[int]:
        return issues(await loop.step())

    assert loop.run(test) == [3, 4]
    assert [request.task.id for request in loop.played[::4]] == ["train-0", "train-1"]
    ledger_closes(loop.ledger.counts())


def test_groups_are_committed_in_issue_order_in_deterministic_mode(tmp_path: Path) -> None:
    generator = random.Random(3)

    async def play(loop: Loop, request: RolloutRequest) -> Scored:
        await asyncio.sleep(generator.uniform(0, 0.03))
        return spread(request)

    def committed(deterministic: bool) -> list[int]:
        folder = tmp_path / str(deterministic)
        folder.mkdir()
        loop = Loop(
            folder, play, rollout__deterministic=deterministic, algorithm__groups_per_step=12
        )
        order: list[int] = []

        async def test() -> None:
            collected = await loop.rollouts.collect(loop.version, {})
            order.extend(group.number for group in collected.ended_groups)

        loop.run(test)
        assert {request.cohort for request in loop.played} == ({4} if deterministic else {None})
        return order

    assert committed(True) == list(range(1, 13))
    assert committed(False) != list(range(1, 13)), "the delays must be able to change the order"


async def bad_first(loop: Loop, request: RolloutRequest) -> Scored | Unscored:
    if request.task.id != "train-0":
        return spread(request)
    loop.rollouts.quarantine(request.task, "/data/gone.png", "cannot be read")
    return Unscored(UnscoredKind.BAD_DATA, "cannot be read")


def test_a_quarantined_task_is_reported_once_and_never_played_again(tmp_path: Path) -> None:
    loop = Loop(tmp_path, bad_first)

    async def test() -> None:
        for _ in range(30):
            await loop.step()

    loop.run(test)
    (failure,) = loop.reporter.bad
    assert failure.path.endswith("train.jsonl:1"), "the row, which is what a person mends"
    assert failure.reason == "/data/gone.png: cannot be read"
    assert sum(request.task.id == "train-0" for request in loop.played) == 4
    assert sum(request.task.id == "train-1" for request in loop.played) >= 8, (
        "the other tasks were visited again"
    )
    assert loop.ledger.counts()["excluded[bad_data]"] == 4


def test_without_any_task_left_the_run_stops(tmp_path: Path) -> None:
    async def play(loop: Loop, request: RolloutRequest) -> Unscored:
        loop.rollouts.quarantine(request.task, "", "broken")
        return Unscored(UnscoredKind.BAD_DATA, "broken")

    loop = Loop(tmp_path, play, algorithm__filtering={"max_generation_batches": 50})
    with pytest.raises(ConfigError, match="every one of the 24 tasks is quarantined"):
        loop.run(loop.step)


def test_a_task_that_is_not_quarantined_is_found_in_whatever_order_epochs_come(
    tmp_path: Path,
) -> None:
    for seed in range(10):
        loop = Loop(tmp_path, differs, seed=seed)
        loop.rollouts.scheduler.cursor = TaskCursor(24, seed, True)
        loop.rollouts.scheduler.quarantined = {f"train-{n}" for n in range(2, 24)}

        async def test(loop: Loop = loop) -> None:
            for _ in range(6):
                await loop.step()

        loop.run(test)
        assert {request.task.id for request in loop.played} == {"train-0", "train-1"}


@pytest.mark.parametrize(("fraction", "steps"), [(1.0, 2), (0.5, 3)])
def test_what_is_ready_is_trained_before_the_run_stops_for_want_of_tasks(
    fraction: float, steps: int, tmp_path: Path
) -> None:
    """Five groups are played, two make a step; the sixth task is the last."""

    async def play(loop: Loop, request: RolloutRequest) -> Scored | Unscored:
        await asyncio.sleep(0.01 * request.id.group)
        if request.id.group < 6:
            return spread(request)
        loop.rollouts.scheduler.quarantined = {task.id for task in loop.rollouts.dataset}
        return Unscored(UnscoredKind.BAD_DATA, "broken")

    changes = {
        "algorithm__staleness": {"max_staleness": 2},
        "algorithm__filtering": {"min_fraction": fraction, "ranking": "fifo"},
    }
    loop = Loop(tmp_path, play, **changes)
    done: list[list[int]] = []

    async def test() -> None:
        while True:
            done.append(issues(await loop.step(between=0.2)))

    with pytest.raises(ConfigError, match="every one of the 24 tasks is quarantined"):
        loop.run(test)
    assert done == [[1, 2], [3, 4], [5]][:steps]


def test_many_trajectories_without_a_reward_are_an_event(tmp_path: Path) -> None:
    async def play(loop: Loop, request: RolloutRequest) -> Scored | Unscored:
        lost = request.id.sample % 2
        return (
            Unscored(UnscoredKind.REWARD_UNAVAILABLE, "no judge")
            if lost
            else Scored(float(request.id.sample))
        )

    loop = Loop(tmp_path, play)

    async def test() -> None:
        for _ in range(10):
            await loop.step()

    loop.run(test)
    first, *alarms = loop.reporter.events
    assert first == ("unscored", "no judge")
    assert [kind for kind, _ in alarms] == ["alarm", "alarm"]
    assert "no reward (reward_unavailable 8: no judge)" in alarms[0][1]
    assert "excluded from training" in alarms[1][1]


async def crashes(loop: Loop, request: RolloutRequest) -> Unscored:
    return Unscored(
        UnscoredKind.GRADER_ERROR, "my:Reward: KeyError: 'x'", "Traceback ...\nKeyError: 'x'"
    )


def test_a_grader_that_raises_on_all_of_the_first_group_ends_the_run(tmp_path: Path) -> None:
    loop = Loop(tmp_path, crashes)
    with pytest.raises(
        GraderBroken,
        match=r"tests\.support\.rewards:TokenReward raised on each of the 4 .*KeyError: 'x'",
    ):
        loop.run(loop.step)
    assert loop.rollouts.finished.groups, "for the answer that the error quotes"


def test_when_nothing_is_scored_the_error_says_why_and_blames_no_filter(tmp_path: Path) -> None:
    async def play(loop: Loop, request: RolloutRequest) -> Scored | Unscored:
        if request.id.sample == 0:
            return Scored(0.5)
        return Unscored(
            UnscoredKind.INVALID_REWARD, "the reward source returned None, not a finite number"
        )

    loop = Loop(tmp_path, play, algorithm__filtering={"max_generation_batches": 1})
    with pytest.raises(GenerationBudgetSpent) as spent:
        loop.run(loop.step)
    assert (
        "Why 6 have no reward: invalid_reward 6: the reward source returned None, not a finite"
        " number." in str(spent.value)
    )
    assert "repair that first." in str(spent.value)
    assert "loosen filters" not in str(spent.value)


def test_a_failure_that_a_replayed_success_displaces_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One task succeeds once; when it comes again, its first episode loses its environment, and the
    others fail.
    """
    first: list[int] = []

    async def play(loop: Loop, request: RolloutRequest) -> Scored | Unscored:
        if request.task.id != "train-0":
            return spread(request)
        first.append(request.id.group)
        if request.id.group == first[0]:
            return Scored(float(request.id.sample > 0))
        return Unscored(UnscoredKind.ENVIRONMENT_FAILURE) if request.id.sample == 0 else Scored(0.0)

    loop = Loop(tmp_path, play, algorithm__replay={"kind": "corrected"})
    blamed: list[str] = []
    ended = loop.rollouts.finished.history.ended

    def note(group: int, task: str, failed: bool) -> str:
        blamed.extend([task] * failed)
        return ended(group, task, failed)

    monkeypatch.setattr(loop.rollouts.finished.history, "ended", note)

    async def test() -> None:
        while not loop.ledger.counts().get("replayed"):
            await loop.step()

    loop.run(test)
    counts = loop.ledger.counts()
    ledger_closes(counts)
    assert counts["excluded[environment_failure]"] == 1
    assert "surplus[replaced_by_replay]" not in counts
    assert blamed == ["train-0"]


def test_an_interrupted_round_is_finished_as_it_began(tmp_path: Path) -> None:
    """Groups in flight at a checkpoint are issued again first, and are not counted against the
    budget twice.
    """
    loop = Loop(
        tmp_path,
        equal,
        algorithm__filtering={"max_generation_batches": 1, "groups_per_generation": 3},
    )
    loop.rollouts.scheduler.reissue = [GroupRequest(number, number - 1, 1) for number in (1, 2, 3)]
    loop.rollouts.scheduler.next_number, loop.rollouts.scheduler.issued_this_step = 3, 3
    with pytest.raises(GenerationBudgetSpent):
        loop.run(loop.step)
    assert sorted({request.id.group for request in loop.played}) == [1, 2, 3]


def test_a_stop_ends_the_wait(tmp_path: Path) -> None:
    async def play(loop: Loop, request: RolloutRequest) -> Scored:
        loop.rollouts.stop()
        await asyncio.sleep(60)
        return spread(request)

    loop = Loop(tmp_path, play)
    with pytest.raises(Preempted):
        loop.run(loop.step)
    assert loop.ledger.counts()["cancelled"] == 8


def test_an_error_of_production_ends_the_wait_for_it(tmp_path: Path) -> None:
    async def play(loop: Loop, request: RolloutRequest) -> Scored:
        raise ZeroDivisionError("a bug")

    loop = Loop(tmp_path, play)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        loop.run(loop.step)


@pytest.mark.parametrize("stale", [0, 1])
def test_what_is_lost_after_it_was_scored_is_made_up_for(tmp_path: Path, stale: int) -> None:
    """The trainer finds twice that payloads are gone; other groups arrive while it looks."""
    changes: dict[str, Any] = {"algorithm__staleness": {"max_staleness": stale}} if stale else {}
    loop = Loop(tmp_path, differs, **changes)
    held: list[list[int]] = []

    async def hold(groups: tuple[Group, ...]) -> set[TrajectoryId]:
        held.append(issues(groups))
        await asyncio.sleep(0.01)
        return {groups[0].kept[0].summary.id} if len(held) <= 2 else set()

    async def test() -> list[tuple[Group, ...]]:
        steps = []
        for _ in range(3):
            steps.append(await loop.collect(hold))
            loop.rollouts.ready.settle_trained(steps[-1])
            loop.version = Version(1, loop.version.step + 1)
            loop.rollouts.synced(loop.version)
        return steps

    steps = loop.run(test)
    assert len(held) == 5
    assert [sum(len(group.kept) for group in step) for step in steps] == [
        8,
        8,
        8,
    ], "made up for within the step"
    taken = [m.summary.id for step in steps for group in step for m in group.kept]
    assert len(taken) == len(set(taken))
    counts = loop.ledger.counts()
    ledger_closes(counts)
    assert (counts["trained"], counts["excluded[payload_lost]"]) == (24, 2)
    assert [kind for kind, _ in loop.reporter.events] == ["payload_lost"] * 2


def test_no_wake_up_is_lost(tmp_path: Path) -> None:
    """A group ends just after one waiter began to wait and just before another does: the first must
    hear of it.
    """
    rollouts = Loop(tmp_path, differs, recovery={"stall_timeout": 5.0}).rollouts

    async def test() -> None:
        first = asyncio.create_task(rollouts._change())
        await asyncio.sleep(0)
        rollouts._notify()
        second = rollouts._change()
        second.send(None)
        await asyncio.wait({first}, timeout=1)
        second.close()
        assert first.done(), "the first waiter slept through the notice"

    asyncio.run(test())
