"""The rollout manager: it plays groups of tasks without end, and gives a step its groups.

A step waits only for groups that have begun.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from rayloop.core import incidents
from rayloop.core.failures import GenerationBudgetSpent, Preempted
from rayloop.core.groups import Group, Status, TrajectoryState, Unscored
from rayloop.core.ledger import Ledger
from rayloop.core.types import Task, TrajectoryId, Version
from rayloop.data.dataset import Dataset
from rayloop.grpo.alarms import Alarms
from rayloop.grpo.selection import enough
from rayloop.rollout.failed_episodes import FailureHistory
from rayloop.rollout.finished import FinishedGroups, ReadyGroups
from rayloop.rollout.plain import Store, with_present_keys
from rayloop.rollout.scheduler import GroupRequest, GroupRollout, GroupRunner, GroupScheduler
from rayloop.run.config import RunConfig
from rayloop.run.order import Reports
from rayloop.run.records.step_metrics import Collected

Finish = Callable[[Group], Awaitable[Group]]
FetchBatch = Callable[[tuple[Group, ...]], Awaitable[Collection[TrajectoryId]]]


async def _nothing_lost(groups: tuple[Group, ...]) -> Collection[TrajectoryId]:
    return ()


class RolloutManager:
    """The scheduler, the groups in flight, the finished groups and the ready groups of a run.

    ``in_flight``: the groups being played, by number.
    """

    def __init__(
        self,
        config: RunConfig,
        ledger: Ledger,
        dataset: Dataset,
        reporter: Reports,
        history: FailureHistory,
    ) -> None:
        self.config = config
        self.ledger = ledger
        self.dataset = dataset
        self._reporter = reporter
        self.scheduler = GroupScheduler(config, dataset, ledger, reporter.bad_row)
        self.ready = ReadyGroups(config.algorithm, ledger)
        self.alarms = Alarms(
            config.alarms,
            config.drift,
            config.reward.source.use,
            reporter.event,
            dropout=config.policy.engine.drops_out,
            compares_states=config.algorithm.advantage.kind == "gigpo",
            lost_episodes=history.lost_episodes,
        )
        self.finished = FinishedGroups(config, ledger, self.ready, self.alarms, history)
        self.in_flight: dict[int, GroupRequest] = {}
        self._group_rollout = GroupRollout(config, self._notify)
        self._taken = 0
        """Trajectories that a step has taken and that are not known to be trained.

        They count against the bound on staleness.
        """
        self._collecting = False
        self._stopping = False
        self._change_waiters: list[asyncio.Future[None]] = []
        self._last_commit: asyncio.Future[None] | None = None

    async def run(self, runner: GroupRunner, finish: Finish) -> None:
        """Start groups without end, as they are admitted.

        Groups in flight in an earlier call are lost, and are issued again.
        """
        self.scheduler.again(self.in_flight.values())
        if self.in_flight:
            self.ledger.reissue_live()
        self.in_flight.clear()
        self._group_rollout.clear()
        self._last_commit = None

        async with asyncio.TaskGroup() as group:
            while True:
                for _ in range(self._admissible()):
                    request = self.scheduler.issue()
                    if request is None:
                        # No task is left: ``collect`` has to check again, and ends the run.
                        self._notify()
                        break
                    self.in_flight[request.number] = request
                    commit: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    group.create_task(
                        self._produce(request, runner, finish, self._last_commit, commit)
                    )
                    self._last_commit = commit
                await self._change()

    def _admissible(self) -> int:
        """How many groups may start now. Without staleness, only while a step waits for them."""
        if self._stopping or (self.config.algorithm.synchronous and not self._collecting):
            return 0
        return self.scheduler.admissible(
            ready=self.ready.survivors + self._taken,
            in_flight=len(self.in_flight),
            acceptance=self.finished.acceptance.value,
        )

    async def _produce(
        self,
        request: GroupRequest,
        runner: GroupRunner,
        finish: Finish,
        previous_commit: asyncio.Future[None] | None,
        commit: asyncio.Future[None],
    ) -> None:
        """Roll out and finish one group, then resolve ``commit``.

        In deterministic mode groups are committed in request order: each waits for
        ``previous_commit``.
        """
        try:
            group = await self._group_rollout.rollout_group(
                request, self.dataset[request.index], runner
            )
            if previous_commit is not None and self.config.rollout.deterministic:
                # A cancelled group must not cancel the future of the previous group.
                await asyncio.shield(previous_commit)
            group = await finish(group)
            quarantine_reason = self.finished.commit(group)
            if quarantine_reason:
                self.quarantine(group.task, "", quarantine_reason)
            # Both before the waiters wake up: how many groups may start depends on them.
            self._group_rollout.forget(request.number)
            del self.in_flight[request.number]
            self._notify()
        finally:
            # Also after an error: the next group waits for this future.
            if not commit.done():
                commit.set_result(None)

    async def collect(
        self,
        version: Version,
        inherited: Mapping[int, int],
        fetch_batch: FetchBatch = _nothing_lost,
    ) -> Collected:
        """Wait until the step's target is ready, or its budget is spent; rank and cut.

        ``version`` is the version that will train. ``fetch_batch`` keeps the payloads, and returns
        the lost trajectories, which are excluded and replaced. Raises GenerationBudgetSpent,
        ConfigError (no task is left), Preempted.
        """
        self._collecting = True
        self._notify()
        try:
            while True:
                if self._stopping:
                    raise Preempted("asked to stop")
                self.ready.expire(version, inherited)
                if not self._may_train(self._must_wait(version, inherited)):
                    await self._change()
                    continue
                selection = self.ready.select()
                # Groups may become ready during ``fetch_batch``; this step must not touch them.
                numbers = {group.number for group in self.ready.groups}
                lost_ids = await fetch_batch(selection.train)
                if not lost_ids:
                    break
                self.lose(lost_ids)
        finally:
            self._collecting = False
        self.ready.take(selection, numbers)

        # After the last attempt: the cost of lost payloads still belongs to this step's budget.
        self.scheduler.begin_step()

        self._taken = sum(len(group.kept) for group in selection.train)
        finished_groups = tuple(self.finished.groups)
        self.finished.groups = []
        drop_counts = dict(self.ready.dropped)
        self.ready.dropped = Counter()
        return Collected(
            selection.train,
            finished_groups,
            drop_counts,
            self.finished.acceptance.value,
            self.finished.buffer.stats(),
        )

    def synced(self, version: Version) -> None:
        """Note that the engines serve ``version``.

        The groups of the last step are trained, and no longer count against the staleness bound.
        """
        self._group_rollout.version = version
        self._taken = 0
        self._notify()

    def _must_wait(self, version: Version, inherited: Mapping[int, int]) -> bool:
        """Whether this step must wait for groups in flight.

        It waits for a synchronous round, or for a group that is too old for the next step.
        """
        algorithm = self.config.algorithm
        if algorithm.synchronous:
            return bool(self.in_flight or (self.scheduler.one_round and self.scheduler.reissue))
        return algorithm.staleness.when_late == "wait" and self._group_rollout.any_due(
            version, inherited
        )

    def _may_train(self, must_wait: bool) -> bool:
        """Whether to train now.

        Raises GenerationBudgetSpent when the target cannot be reached any more, and ConfigError
        when that is because all tasks are quarantined.
        """
        algorithm = self.config.algorithm
        survivors = self.ready.survivors
        is_spent = self.scheduler.spent
        has_target = survivors >= algorithm.target and not must_wait
        more_will_come = self.in_flight or self.scheduler.reissue or not is_spent
        if not has_target and more_will_come:
            return False

        used_batches = algorithm.filtering.max_generation_batches if is_spent else 0
        statuses: Counter[str] = Counter()
        unscored = []
        cut = 0
        for group in self.finished.groups:
            for member in group.members:
                if member.status is not None:
                    statuses[f"{member.status.state}[{member.status.reason}]"] += 1
                    cut += member.summary.cut
                if isinstance(member.outcome, Unscored):
                    unscored.append(member.outcome)
        try:
            return enough(
                survivors,
                algorithm.target,
                used_batches,
                algorithm.filtering,
                statuses,
                unscored,
                cut,
            )
        except GenerationBudgetSpent:
            if self.scheduler.exhausted:
                raise self.scheduler.no_task() from None
            raise

    def lose(self, ids: Collection[TrajectoryId]) -> None:
        """Exclude scored trajectories whose payloads are lost.

        Others replace them outside the step's budget, up to its size.
        """
        self._reporter.event(incidents.PayloadLost(sorted(map(str, ids))))
        self.scheduler.make_up_for(self.finished.lose(ids))
        self.ready.lose(ids)
        self._notify()

    async def _change(self) -> None:
        """Wait for the next change after this call. The watchdog bounds the wait."""
        waiter = asyncio.get_running_loop().create_future()
        self._change_waiters.append(waiter)
        await waiter

    def _notify(self) -> None:
        """Wake all coroutines that wait in ``_change``."""
        waiters = self._change_waiters
        self._change_waiters = []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def clear_quarantine(self) -> list[str]:
        """Issue quarantined tasks again, as if none had ever failed. Returns their ids."""
        ids = sorted(self.scheduler.quarantined)
        self.scheduler.quarantined.clear()
        self.finished.history.clear()
        return ids

    def quarantine(self, task: Task, path: str, reason: str) -> None:
        """Never play this task again, and record the reason."""
        if self.scheduler.quarantine(task, path, reason):
            self._notify()

    def stop(self) -> None:
        """Begin no more groups; ``collect`` raises Preempted."""
        self._stopping = True
        self._notify()

    def close(self) -> None:
        """End the run: groups in flight are cancelled, ready groups will not be trained."""
        for request in self.in_flight.values():
            for id in request.ids(self.config.algorithm.group_size):
                if self.ledger.state_of(id) is not None:
                    self.ledger.move(id, Status(TrajectoryState.CANCELLED))
        self.in_flight.clear()
        self.ready.close()

    def state(self) -> dict[str, Any]:
        """The present state for the checkpoint.

        It has plain values, and ``HeldValue`` (rayloop/rollout/plain.py) for payloads.
        """
        return {
            "scheduler": self.scheduler.state(self.in_flight.values()),
            "ready": self.ready.state(),
            "finished": self.finished.state(),
            "alarms": self.alarms.state(),
            "blame": self.finished.history.state(),
        }

    def restore(self, state: Mapping[str, Any], store: Store) -> None:
        """Continue where ``state`` was taken: groups that were in flight will be issued again.

        ``store`` keeps a payload. Raises CheckpointError when data, seed or shuffling have changed.
        A row that the data no longer has keeps its id.
        """
        tasks = {task.id: task for task in self.dataset}

        def task(id: str) -> Task:
            return tasks.get(id) or Task(id, ())

        state = with_present_keys(state)
        self.scheduler.restore(state["scheduler"])
        self.ready.restore(state["ready"], store, task)
        self.finished.restore(state["finished"], store, task)
        self.alarms.restore(state["alarms"])
        self.finished.history.restore(state["blame"])
        self.in_flight.clear()
        self._taken = 0
