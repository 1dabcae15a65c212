"""Plays groups of tasks without end, and gives a step those that it trains on.

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
from rayloop.rollout.finished import FinishedGroups, Quarantine, ReadyGroups
from rayloop.rollout.plain import Own
from rayloop.rollout.scheduler import GroupRequest, GroupRollout, GroupScheduler, Player
from rayloop.run.config import RunConfig
from rayloop.run.order import Reports
from rayloop.run.records.step_metrics import Collected

Finish = Callable[[Group], Awaitable[Group]]
Hold = Callable[[tuple[Group, ...]], Awaitable[Collection[TrajectoryId]]]


async def _nothing_lost(groups: tuple[Group, ...]) -> Collection[TrajectoryId]:
    return ()


class RolloutManager:
    """Connects scheduler, finished and ready groups.

    ``in_flight``: the groups being played, by number.
    """

    def __init__(
        self,
        config: RunConfig,
        ledger: Ledger,
        dataset: Dataset,
        reporter: Reports,
        blame: Quarantine,
    ) -> None:
        self.config, self.ledger, self.dataset, self._reporter = config, ledger, dataset, reporter
        self.scheduler = GroupScheduler(config, dataset, ledger, reporter.bad_row)
        self.ready = ReadyGroups(config.algorithm, ledger)
        self.alarms = Alarms(
            config.alarms,
            config.drift,
            config.reward.source.use,
            reporter.event,
            dropout=config.policy.engine.drops_out,
            compares_states=config.algorithm.advantage.kind == "gigpo",
        )
        self.finished = FinishedGroups(config, ledger, self.ready, self.alarms, blame)
        self.in_flight: dict[int, GroupRequest] = {}
        self._playing = GroupRollout(config, self._notify)
        self._taken = 0
        """Trajectories that a step has taken and that are not known to be trained: they fill the
        bound on staleness.
        """
        self._collecting = self._stopping = False
        self._waiting: list[asyncio.Future[None]] = []
        self._last_commit: asyncio.Future[None] | None = None

    async def run(self, player: Player, finish: Finish) -> None:
        """Start groups without end, as admitted.

        Groups in flight in an earlier call are lost, and are issued again.
        """
        self.scheduler.again(self.in_flight.values())
        if self.in_flight:
            self.ledger.reissue_live()
        self.in_flight.clear()
        self._playing.clear()
        self._last_commit = None

        async with asyncio.TaskGroup() as group:
            while True:
                for _ in range(self._admissible()):
                    if (request := self.scheduler.issue()) is None:
                        # No task is left: ``collect`` has to look again, and ends the run.
                        self._notify()
                        break
                    self.in_flight[request.number] = request
                    done = asyncio.get_running_loop().create_future()
                    group.create_task(
                        self._produce(request, player, finish, self._last_commit, done)
                    )
                    self._last_commit = done
                await self._change()

    def _admissible(self) -> int:
        """How many groups may start now. Without staleness, only while a step waits for them."""
        synchronous = self.config.algorithm.staleness.max_staleness == 0
        if self._stopping or (synchronous and not self._collecting):
            return 0
        occupied, rate = self.ready.survivors + self._taken, self.finished.acceptance.value
        return self.scheduler.admissible(
            ready=occupied, in_flight=len(self.in_flight), acceptance=rate
        )

    async def _produce(
        self,
        request: GroupRequest,
        player: Player,
        finish: Finish,
        before: asyncio.Future[None] | None,
        done: asyncio.Future[None],
    ) -> None:
        """Play and finish one group.

        In deterministic mode groups are committed in request order: ``before`` is the one before.
        """
        try:
            group = await self._playing.play(request, self.dataset[request.index], player)
            if before is not None and self.config.rollout.deterministic:
                # A cancelled group must not cancel the future of the group before it.
                await asyncio.shield(before)
            group = await finish(group)
            if why := self.finished.commit(group):
                self.quarantine(group.task, "", why)
            # Counted out before anybody is woken: how many groups may start depends on both.
            self._playing.forget(request.number)
            del self.in_flight[request.number]
            self._notify()
        finally:
            # Also after an error: the next group waits for this future.
            if not done.done():
                done.set_result(None)

    async def collect(
        self, version: Version, inherited: Mapping[int, int], hold: Hold = _nothing_lost
    ) -> Collected:
        """Wait until the step's target is ready, or its budget is spent; rank and cut.

        ``version`` is the one that will train. ``hold`` keeps the payloads, and returns the
        trajectories that are lost, which are excluded and made up for. Raises
        GenerationBudgetSpent, ConfigError (no task is left), Stalled, Preempted.
        """
        self._collecting = True
        self._notify()
        try:
            while True:
                if self._stopping:
                    raise Preempted("asked to stop")
                self.ready.expire(version, inherited)
                if not self._enough(self._owed(version, inherited)):
                    await self._change()
                    continue
                chosen = self.ready.select()
                # Groups may become ready while ``hold`` waits; this step must not touch them.
                among = {group.number for group in self.ready.groups}
                if not (lost := await hold(chosen.train)):
                    break
                self.lose(lost)
        finally:
            self._collecting = False
        self.ready.take(chosen, among)

        # After the last try: what lost payloads cost still belongs to this step's budget.
        self.scheduler.begin_step()

        self._taken = sum(len(group.kept) for group in chosen.train)
        finished, self.finished.groups = tuple(self.finished.groups), []
        dropped, self.ready.dropped = self.ready.dropped, Counter()
        return Collected(
            chosen.train,
            finished,
            dict(dropped),
            self.finished.acceptance.value,
            self.finished.buffer.stats(),
        )

    def synced(self, version: Version) -> None:
        """Engines serve ``version``: the groups of the step before are trained, and no longer count
        against the staleness bound.
        """
        self._playing.version, self._taken = version, 0
        self._notify()

    def _owed(self, version: Version, inherited: Mapping[int, int]) -> bool:
        """Whether this step must wait for groups in flight: a synchronous round, or a group too old
        for the next step.
        """
        c = self.config.algorithm.staleness
        if c.max_staleness == 0:
            return bool(self.in_flight or (self.scheduler.one_round and self.scheduler.reissue))
        return c.when_late == "wait" and self._playing.any_due(version, inherited)

    def _enough(self, owed: bool) -> bool:
        """Whether to train now.

        ``owed`` is awaited; the budget is spent with nothing in flight, or all tasks quarantined.
        """
        c, survivors, spent = self.config.algorithm, self.ready.survivors, self.scheduler.spent
        if not (survivors >= c.target and not owed) and (
            self.in_flight or self.scheduler.reissue or not spent
        ):
            return False

        used = c.filtering.max_generation_batches if spent else 0
        members = [member for group in self.finished.groups for member in group.members]
        statuses = Counter(
            f"{m.status.state}[{m.status.reason}]" for m in members if m.status is not None
        )
        unscored = [m.outcome for m in members if isinstance(m.outcome, Unscored)]
        try:
            cut = sum(member.status is not None and member.summary.cut for member in members)
            return enough(survivors, c.target, used, c.filtering, statuses, unscored, cut)
        except GenerationBudgetSpent:
            if self.scheduler.exhausted:
                raise self.scheduler.no_task() from None
            raise

    def lose(self, ids: Collection[TrajectoryId]) -> None:
        """The payloads of these scored trajectories are gone.

        Others replace them beside the step's budget, up to its size.
        """
        self._reporter.event(incidents.PayloadLost(sorted(map(str, ids))))
        self.scheduler.make_up_for(self.finished.lose(ids))
        self.ready.lose(ids)
        self._notify()

    async def _change(self) -> None:
        """Wait until something happens after this call. The watchdog bounds the wait."""
        changed = asyncio.get_running_loop().create_future()
        self._waiting.append(changed)
        await changed

    def _notify(self) -> None:
        """Wake all who wait in ``_change``."""
        waiting, self._waiting = self._waiting, []
        for changed in waiting:
            if not changed.done():
                changed.set_result(None)

    def clear_quarantine(self) -> list[str]:
        """Issue quarantined tasks again, as if none had ever failed. Returns their ids."""
        cleared = sorted(self.scheduler.quarantined)
        self.scheduler.quarantined.clear()
        self.finished.blame.clear()
        return cleared

    def quarantine(self, task: Task, path: str, reason: str) -> None:
        """Never play this task again, and write down why."""
        if self.scheduler.quarantine(task, path, reason):
            self._notify()

    def stop(self) -> None:
        """Begin nothing more; ``collect`` raises Preempted."""
        self._stopping = True
        self._notify()

    def close(self) -> None:
        """The run is over: what is still being played is cancelled, what is ready will not be
        trained.
        """
        for request in self.in_flight.values():
            for id in request.ids(self.config.algorithm.group_size):
                if self.ledger.state_of(id) is not None:
                    self.ledger.move(id, Status(TrajectoryState.CANCELLED))
        self.in_flight.clear()
        self.ready.close()

    def state(self) -> dict[str, Any]:
        """Of this moment, for the checkpoint: plain values, and ``HeldValue`` ones
        (rayloop/rollout/plain.py) for payloads.
        """
        return {
            "issuer": self.scheduler.state(self.in_flight.values()),
            "ready": self.ready.state(),
            "finished": self.finished.state(),
            "alarms": self.alarms.state(),
            "blame": self.finished.blame.state(),
        }

    def restore(self, state: Mapping[str, Any], own: Own) -> None:
        """Go on where ``state`` was taken: groups that were in flight will be issued again.

        ``own`` keeps a payload. Raises CheckpointError when data, seed or shuffling have changed. A
        row that the data no longer has keeps its id.
        """
        tasks = {task.id: task for task in self.dataset}

        def task(id: str) -> Task:
            return tasks.get(id) or Task(id, ())

        self.scheduler.restore(state["issuer"])
        self.ready.restore(state["ready"], own, task)
        self.finished.restore(state["finished"], own, task)
        self.alarms.restore(state["alarms"])
        self.finished.blame.restore(state["blame"])
        self.in_flight.clear()
        self._taken = 0
