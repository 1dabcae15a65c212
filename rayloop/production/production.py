"""Production: which task is played next, when, and what becomes of its group until a step takes it.

With ``max_staleness: 0`` groups start in rounds, only while the loop waits in ``collect``; a round ends before the next
begins, so nothing in flight survives a publish. Otherwise groups start whenever the staleness bound leaves room, and a step
waits for those in flight that would be too old for the next one (``staleness.when_late``). What it waits for has begun and
needs no further room, so the bound cannot keep it from ending; deadlines of episodes bound the wait.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence

from rayloop.core import incidents
from rayloop.core.failures import ConfigError, DataFailure, GenerationBudgetSpent, Preempted
from rayloop.core.groups import Fate, Group, Member, TrajectoryState, Unscored, UnscoredKind
from rayloop.core.ledger import Ledger
from rayloop.core.types import Task, TrajectoryId, Version
from rayloop.data.cursor import TaskCursor
from rayloop.data.dataset import Dataset
from rayloop.grpo.alarms import Alarms
from rayloop.grpo.filtering import Enough, generation_verdict, select
from rayloop.grpo.replay import ReplayBuffer
from rayloop.grpo.staleness import AcceptanceRate, expired, open_slots
from rayloop.production.blame import Blame
from rayloop.production.playing import Issue, Player, Playing
from rayloop.run.config import RunConfig
from rayloop.run.reporter import Reporter

Finish = Callable[[Group], Awaitable[Group]]
Hold = Callable[[tuple[Group, ...]], Awaitable[Collection[TrajectoryId]]]


async def _nothing_lost(groups: tuple[Group, ...]) -> Collection[TrajectoryId]:
    return ()


class Production:
    """``ready`` holds finished groups in issue order; ``in_flight`` what is being played."""

    def __init__(self, config: RunConfig, ledger: Ledger, reporter: Reporter) -> None:
        self.config, self.ledger, self.reporter = config, ledger, reporter
        self.dataset = self.read(config.data.train, config, reporter)
        self.cursor = TaskCursor(len(self.dataset), config.seed, config.data.shuffle)
        self.ready: list[Group] = []
        self.in_flight: dict[int, Issue] = {}
        self.buffer = ReplayBuffer(config.algorithm.replay, config.seed)
        self._playing = Playing(config, self._notify)
        self._injected: dict[int, tuple[Group, Member | None]] = {}
        self.reissue: list[Issue] = []
        self.one_round = True
        """Without staleness: what is issued again was one round, which is finished as it began; else it fills rounds of its own."""
        self.next_number = 0
        self.quarantined: set[str] = set()
        self.blame = Blame(config.environment)
        self.alarms = Alarms(config.alarms, config.drift, config.reward.source.use, reporter.event)
        settings = config.algorithm
        self.acceptance = AcceptanceRate(4 * settings.target, 1 / settings.filtering.max_generation_batches)
        self.finished: list[Group] = []
        """Groups that ended since the last step, as they were after the filters (for metrics)."""
        self.dropped: Counter[str] = Counter()
        """What became stale or surplus since the last step, by ``state/source`` (for metrics)."""
        self.issued_this_step = 0
        self._made_up_for = 0
        self._taken = 0
        self._collecting = False
        self._stopping = False
        self._bad: DataFailure | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self._last_commit: asyncio.Future[None] | None = None

    @staticmethod
    def read(path: str | None, config: RunConfig, reporter: Reporter) -> Dataset:
        """A dataset of the configuration; bad rows are quarantined, or raised when ``data.strict``."""
        assert path is not None
        dataset = Dataset(
            path, config.data.reader.build(), config.data.strict, reporter.bad_row, config.environment.kinds
        )
        if warning := dataset.warning():
            reporter.event(incidents.DataWarning(why=warning))
        return dataset

    # Starting groups -----------------------------------------------------------------------------------------------

    async def run(self, player: Player, finish: Finish) -> None:
        """Start groups for ever, as admitted. Groups of an earlier run of this method are gone: they are issued again."""
        self.reissue = sorted([*self.reissue, *self.in_flight.values()], key=lambda issue: issue.number)
        if self.in_flight:
            self.ledger.reissue_live()
        self.in_flight.clear()
        self._playing.clear()
        self._last_commit = None
        async with asyncio.TaskGroup() as group:
            while True:
                for _ in range(self._admissible()):
                    if (issue := self._next_issue()) is None:
                        self._notify()
                        break
                    self.in_flight[issue.number] = issue
                    self.ledger.issue(self._playing.ids(issue))
                    group.create_task(self._produce(issue, player, finish, self._turn()))
                await self._change()

    def _admissible(self) -> int:
        """How many groups may start now."""
        c = self.config.algorithm
        stale = c.staleness.max_staleness
        if self._stopping or (stale == 0 and (self.in_flight or not self._collecting)):
            return 0
        if stale == 0 and self.one_round and self.reissue:
            return len(self.reissue)
        rate = self.acceptance.value
        slots = open_slots(stale, c.target, self.survivors + self._taken, len(self.in_flight) * c.group_size, rate)
        wanted = slots / (c.group_size * rate)
        left = max(0, (stale + 1) * self._budget - self.issued_this_step) + len(
            self.reissue
        )  # which were counted before
        if stale:  # not one beyond the bound, which would only grow stale
            return min(math.floor(wanted), left)
        return min(c.filtering.groups_per_generation or math.ceil(wanted), left) if slots else 0

    @property
    def _budget(self) -> int:
        """Groups that one step may spend."""
        c = self.config.algorithm
        return c.filtering.max_generation_batches * (c.filtering.groups_per_generation or c.groups_per_step)

    @property
    def survivors(self) -> int:
        """Trajectories that are ready to be trained."""
        return sum(len(group.kept) for group in self.ready)

    def _next_issue(self) -> Issue | None:
        """None when every task is quarantined."""
        if self.reissue:
            issue = self.reissue.pop(0)  # counted in ``issued_this_step`` when it was first issued
            if self.ledger.may_issue(self._playing.ids(issue)):
                return issue
            self.next_number += 1  # groups have grown since: its ids would not
            return dataclasses.replace(issue, number=self.next_number)
        while not self._exhausted():
            index = self.cursor.next()
            if self.dataset[index].id not in self.quarantined:
                self.next_number += 1
                self.issued_this_step += 1
                return Issue(self.next_number, index, self.cursor.visits(index))
        return None

    def _no_task(self) -> ConfigError:
        return ConfigError(
            f"data.train: every one of the {len(self.dataset)} tasks is quarantined; see quarantine.jsonl"
        )

    def _exhausted(self) -> bool:
        return len(self.quarantined) >= len(self.dataset) and all(task.id in self.quarantined for task in self.dataset)

    def _turn(self) -> tuple[asyncio.Future[None] | None, asyncio.Future[None]]:
        """In deterministic mode groups are committed in issue order: each waits for the one before it."""
        mine = asyncio.get_running_loop().create_future()
        before, self._last_commit = self._last_commit, mine
        return (before if self.config.rollout.deterministic else None), mine

    async def _produce(
        self, issue: Issue, player: Player, finish: Finish,
        turn: tuple[asyncio.Future[None] | None, asyncio.Future[None]],
    ) -> None:  # fmt: skip
        """Play one group, wait for its turn, finish it."""
        before, done = turn
        try:
            group = await self._playing.play(issue, self.dataset[issue.index], player)
            if before is not None:
                await asyncio.shield(before)
            group = await finish(group)
            self._commit(group)
        finally:
            if not done.done():
                done.set_result(None)

    def _commit(self, group: Group) -> None:
        """Take a finished group in: what was kept is ready, the rest has its fate."""
        played = self._account_for_replay(group)
        for member in group.members:
            if not member.replayed:
                self.ledger.move(member.summary.id, member.fate or Fate(TrajectoryState.READY))
        self.acceptance.observe(len(group.kept), len(group.members))
        self.finished.append(group)
        self.alarms.groups(played)
        kinds = [m.outcome.kind for m in played if isinstance(m.outcome, Unscored)]
        if why := self.blame.ended(group.issue, group.task.id, UnscoredKind.ENVIRONMENT_FAILURE in kinds):
            self.quarantine(group.task, "", why)
        if group.kept:
            self.ready.append(group)
            self.ready.sort(key=lambda g: g.issue)
        self._playing.forget(group.issue)
        del self.in_flight[group.issue]
        self._notify()

    def replay(self, group: Group, step: int) -> Group:
        """Let a stored success take a member's place (ARPO). Takes effect in buffer and ledger when the group is committed."""
        injection = self.buffer.inject(group, step)
        self._injected[group.issue] = (group, injection.displaced)
        return injection.group

    def _account_for_replay(self, group: Group) -> tuple[Member, ...]:
        """The members that were played for this group: a displaced one instead of what took its place."""
        fresh, displaced = self._injected.pop(group.issue)
        self.buffer.store(fresh)
        if displaced is None or displaced.fate is None:
            return group.members
        self._end(displaced, displaced.fate)
        self.ledger.replay()
        return displaced, *group.members[1:]

    # Taking a step's groups ----------------------------------------------------------------------------------------

    async def collect(
        self, version: Version, inherited: dict[int, int], hold: Hold = _nothing_lost
    ) -> tuple[Group, ...]:
        """Wait until the step's target is ready, with all that must not wait longer, or its budget is spent; rank and cut.

        ``version`` is the one that will train, and ``hold`` makes sure that it can: it returns the trajectories that are lost,
        which are then excluded and made up for. Raises GenerationBudgetSpent, ConfigError (no task is left), Stalled, Preempted.
        """
        c = self.config.algorithm
        self._collecting = True
        self._notify()
        try:
            while True:
                if self._stopping:
                    raise Preempted("asked to stop")
                if self._bad is not None and self.config.data.strict:
                    raise self._bad
                self._expire(version, inherited)
                if self._verdict(self._owed(version, inherited)) is not Enough.TRAIN:
                    await self._change()
                    continue
                chosen = select(self.ready, c.target, c.filtering, oldest_first=c.carry_over)
                before = {group.issue for group in self.ready}
                if not (lost := await hold(chosen.train)):
                    break
                self.lose(lost)
        finally:
            self._collecting = False
        self.settle(chosen.train, None)
        self.ready = [
            group for group in self.ready if group.issue not in before
        ]  # those that came while they were fetched
        if c.carry_over:
            self.ready = sorted([*chosen.left_over, *self.ready], key=lambda g: g.issue)
        else:
            self.settle([_with_fate(g, Fate(TrajectoryState.SURPLUS, "left_over")) for g in chosen.left_over], None)
        self.issued_this_step = self._made_up_for = 0
        self._taken = sum(len(group.kept) for group in chosen.train)
        return chosen.train

    def published(self, version: Version) -> None:
        """Engines serve ``version``, and what the step before took is trained: until then it fills the bound on staleness."""
        self._playing.version, self._taken = version, 0
        self._notify()

    def forget_step(self) -> None:
        """The step is recorded: what was collected for its metrics begins anew."""
        self.finished.clear()
        self.dropped.clear()

    def _owed(self, version: Version, inherited: dict[int, int]) -> bool:
        """Whether what is being played belongs to this step: all of a synchronous round (a resumed one too), or a group that
        would be too old for the next step."""
        c = self.config.algorithm.staleness
        if c.max_staleness == 0:
            return bool(self.in_flight or (self.one_round and self.reissue))
        return c.when_late == "wait" and self._playing.any_due(version, inherited)

    def _verdict(self, owed: bool) -> Enough:
        """Train, or wait for more. What is ``owed`` is awaited; the budget is spent when nothing is in flight, also when every task
        is quarantined."""
        c = self.config.algorithm
        enough, none_left = self.survivors >= c.target and not owed, self._exhausted()
        spent = none_left or self.issued_this_step >= self._budget
        if not enough and (self.in_flight or self.reissue or not spent):
            return Enough.MORE
        used = c.filtering.max_generation_batches if spent else 0
        fates = Counter(
            f"{m.fate.state}[{m.fate.reason}]" for group in self.finished for m in group.members if m.fate is not None
        )
        unscored = [m.outcome for g in self.finished for m in g.members if isinstance(m.outcome, Unscored)]
        try:
            return generation_verdict(self.survivors, c.target, used, c.filtering, fates, unscored)
        except GenerationBudgetSpent:
            if none_left:
                raise self._no_task() from None
            raise

    def _expire(self, version: Version, inherited: dict[int, int]) -> None:
        """Members too old for ``version`` become stale."""
        limit = self.config.algorithm.staleness.max_staleness
        groups = [expired(group, version, limit, inherited) for group in self.ready]
        self.settle([now for now, before in zip(groups, self.ready, strict=True) if now is not before], None)
        self.ready = [group for group in groups if group.kept]

    def lose(self, ids: Collection[TrajectoryId]) -> None:
        """These trajectories were scored, and their payloads are gone with the node that held them: nobody can train on them.

        They are made up for at no cost to the step's budget, which is about filters, as often as that has groups.
        """
        self.reporter.event(incidents.PayloadLost(sorted(map(str, ids))))
        live = [id for id in ids if self.ledger.state_of(id) is not None]  # the others are stored for replay
        self.alarms.lost(live)
        again = min(math.ceil(len(live) / self.config.algorithm.group_size), self._budget - self._made_up_for)
        self._made_up_for += again
        self.issued_this_step -= again
        self.buffer.forget(ids)
        self._injected = {issue: (without(group, ids), gone) for issue, (group, gone) in self._injected.items()}
        self.finished = [without(group, ids) for group in self.finished]
        remaining = [without(group, ids) for group in self.ready]
        self.settle(remaining, None)
        self.ready = [group for group in remaining if group.kept]
        self._notify()

    def settle(self, groups: Sequence[Group], state: TrajectoryState | None) -> None:
        """Write final states into the ledger: ``state`` for kept members, or, with None, the new fates of the others."""
        for group in groups:
            for member in group.members:
                id = member.summary.id
                if member.replayed or self.ledger.state_of(id) is None:
                    continue
                if state is not None and member.kept:
                    self.ledger.move(id, Fate(state))
                elif state is None and member.fate is not None:
                    self._end(member, member.fate)

    def _end(self, member: Member, fate: Fate) -> None:
        """A member's final state, when it will not be trained."""
        self.ledger.move(member.summary.id, fate)
        if fate.state in (TrajectoryState.STALE, TrajectoryState.SURPLUS):
            self.dropped[f"{fate.state}/{member.summary.source or 'unnamed'}"] += 1

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

    # Tasks that fail -----------------------------------------------------------------------------------------------

    def quarantine(self, task: Task, path: str, reason: str) -> None:
        """Never play this task again, and write down why. With ``data.strict`` the run stops."""
        if task.id in self.quarantined:
            return
        self.quarantined.add(task.id)
        self._bad = DataFailure(self.dataset.where(task), f"{path}: {reason}" if path else reason)
        self.reporter.bad_row(self._bad)
        self._notify()

    def probe_tasks(self) -> list[Task]:
        """Those that the parity check and the self-test may play, in the dataset's order. Raises ConfigError when there is none."""
        if self._exhausted():
            raise self._no_task()
        return [task for task in self.dataset if task.id not in self.quarantined]

    def stop(self) -> None:
        self._stopping = True
        self._notify()

    def close(self) -> None:
        """The run is over: what is still being played is cancelled, what is ready will not be trained."""
        for issue in self.in_flight.values():
            for id in self._playing.ids(issue):
                if self.ledger.state_of(id) is not None:
                    self.ledger.move(id, Fate(TrajectoryState.CANCELLED))
        self.settle([_with_fate(group, Fate(TrajectoryState.SURPLUS, "run_ended")) for group in self.ready], None)
        self.in_flight.clear()
        self.ready = []


def without(group: Group, ids: Collection[TrajectoryId]) -> Group:
    """The group after the payloads of these trajectories were lost. Rewards and advantages of the others stay."""
    fate = Fate(TrajectoryState.EXCLUDED, UnscoredKind.PAYLOAD_LOST)
    gone = {i: m for i, m in enumerate(group.members) if m.kept and m.summary.id in ids}
    return group.map({i: dataclasses.replace(m.bare(), fate=fate) for i, m in gone.items()})


def _with_fate(group: Group, fate: Fate) -> Group:
    return group.map({i: dataclasses.replace(m, fate=fate) for i, m in enumerate(group.members) if m.kept})
