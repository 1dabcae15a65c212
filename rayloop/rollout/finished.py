"""Finished groups: the ready groups, and the groups that ended since the last step.

They also give the acceptance rate and the failures of tasks.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from rayloop.core.groups import Group, Member, Status, TrajectoryState, Unscored, UnscoredKind
from rayloop.core.ledger import Ledger
from rayloop.core.types import Task, TrajectoryId, Version
from rayloop.grpo.alarms import Alarms
from rayloop.grpo.replay import ReplayBuffer
from rayloop.grpo.selection import Selection, select
from rayloop.grpo.settings import AlgorithmSettings
from rayloop.grpo.staleness import AcceptanceRate, expired
from rayloop.rollout.failed_episodes import FailureHistory
from rayloop.rollout.plain import (
    Store,
    group_from_plain,
    member_from_plain,
    plain_group,
    plain_member,
)
from rayloop.run.config import RunConfig


class ReadyGroups:
    """Finished groups with something to train on, in request order."""

    def __init__(self, settings: AlgorithmSettings, ledger: Ledger) -> None:
        self.settings = settings
        self.ledger = ledger
        self.groups: list[Group] = []
        """The list is never changed, but replaced by another list."""
        self.dropped: Counter[str] = Counter()
        """Stale and surplus members since the last step, by ``state/source`` (for metrics)."""
        self._counted_groups = self.groups
        self._survivors = 0
        self._fresh: dict[int, Group] = {}
        """Number -> group without a member that is too old for ``_fresh_for``."""
        self._fresh_for: tuple[Version, Mapping[int, int]] | None = None
        """The arguments of the last call of ``expire``."""

    @property
    def survivors(self) -> int:
        """The number of trajectories that are ready to be trained."""
        # The list is replaced at each change, so its identity shows whether the count is current.
        if self._counted_groups is not self.groups:
            self._counted_groups = self.groups
            self._survivors = sum(len(group.kept) for group in self.groups)
        return self._survivors

    def add(self, group: Group) -> None:
        """Add a finished group; one without kept members is not ready."""
        if group.kept:
            self.groups = sorted([*self.groups, group], key=lambda group: group.number)

    def expire(self, version: Version, inherited: Mapping[int, int]) -> None:
        """Mark members that are too old for ``version`` as stale.

        It is called at every change, so it remembers the groups that it found fresh.
        """
        limit = self.settings.staleness.max_staleness
        if self._fresh_for != (version, inherited):
            self._fresh_for = (version, dict(inherited))
            self._fresh = {}
        groups = []
        expired_groups = []
        for group in self.groups:
            if self._fresh.get(group.number) is group:
                groups.append(group)
                continue
            fresh_group = expired(group, version, limit, inherited)
            if fresh_group is not group:
                expired_groups.append(fresh_group)
            if fresh_group.kept:
                groups.append(fresh_group)
            self._fresh[group.number] = fresh_group
        if expired_groups:
            self.settle(expired_groups)
            self.groups = groups

    def select(self) -> Selection:
        """Select the step's target by rank; nothing is taken yet."""
        return select(
            self.groups,
            self.settings.target,
            self.settings.filtering,
            oldest_first=not self.settings.synchronous,
        )

    def take(self, chosen: Selection, among: Collection[int]) -> None:
        """Take the groups ``chosen.train`` out of the list.

        ``among``: the numbers of all groups that ``select`` compared. The groups that it did not
        choose stay in the list, or are surplus in a synchronous run.
        """
        self.settle(chosen.train)
        self.groups = [group for group in self.groups if group.number not in among]
        if self.settings.synchronous:
            surplus = Status(TrajectoryState.SURPLUS, "left_over")
            self.settle(_with_status(group, surplus) for group in chosen.left_over)
        else:
            groups = [*chosen.left_over, *self.groups]
            self.groups = sorted(groups, key=lambda group: group.number)

    def lose(self, ids: Collection[TrajectoryId]) -> None:
        """Exclude the trajectories ``ids``, whose payloads are lost."""
        remaining = [without(group, ids) for group in self.groups]
        self.settle(remaining)
        self.groups = [group for group in remaining if group.kept]

    async def complete(self, annotate: Callable[[Group], Awaitable[Group]]) -> None:
        """Annotate members without reference log-probs (of a run without a KL term).

        No step with a KL term could train on them.
        """
        for group in self.groups:
            if all(member.ref_logprobs is not None for member in group.kept):
                continue
            annotated = await annotate(group)
            # Groups may have been added during the wait.
            self.groups = [
                annotated if other.number == group.number else other for other in self.groups
            ]

    def settle_trained(self, groups: Iterable[Group]) -> None:
        """Mark the kept members of these groups as trained."""
        for member in self._live(groups):
            if member.kept:
                self.ledger.move(member.summary.id, Status(TrajectoryState.TRAINED))

    def settle(self, groups: Iterable[Group]) -> None:
        """Move members of these groups to their status, unless they have ended already."""
        for member in self._live(groups):
            if member.status is not None:
                self.end(member, member.status)

    def end(self, member: Member, status: Status) -> None:
        """Move a member that will not be trained to its final state."""
        self.ledger.move(member.summary.id, status)
        if status.state in (TrajectoryState.STALE, TrajectoryState.SURPLUS):
            self.dropped[f"{status.state}/{member.summary.source or 'unnamed'}"] += 1

    def _live(self, groups: Iterable[Group]) -> Iterator[Member]:
        for group in groups:
            for member in group.members:
                # The ledger counted a replayed member in the group that played it.
                if not member.replayed and self.ledger.state_of(member.summary.id) is not None:
                    yield member

    def close(self) -> None:
        """End the run: no ready group will be trained."""
        surplus = Status(TrajectoryState.SURPLUS, "run_ended")
        self.settle(_with_status(group, surplus) for group in self.groups)
        self.groups = []

    def state(self) -> dict[str, Any]:
        """The state as plain values, with ``HeldValue`` for payloads."""
        return {
            "groups": [plain_group(group) for group in self.groups],
            "dropped": dict(self.dropped),
        }

    def restore(self, state: Mapping[str, Any], store: Store, task: Callable[[str], Task]) -> None:
        """Continue where ``state`` was taken.

        ``store`` keeps its payloads, ``task`` finds a row by its id.
        """
        self.groups = [group_from_plain(group, store, task) for group in state["groups"]]
        self.dropped = Counter(state["dropped"])


def without(group: Group, ids: Collection[TrajectoryId]) -> Group:
    """The group after the payloads of these trajectories were lost.

    Rewards and advantages of the others stay.
    """
    status = Status(TrajectoryState.EXCLUDED, UnscoredKind.PAYLOAD_LOST)
    replacements = {}
    for index, member in enumerate(group.members):
        if member.kept and member.summary.id in ids:
            replacements[index] = replace(member.bare(), status=status)
    return group.map(replacements)


def _with_status(group: Group, status: Status) -> Group:
    """The group with ``status`` for its kept members."""
    return group.map(
        {
            index: replace(member, status=status)
            for index, member in enumerate(group.members)
            if member.kept
        }
    )


class FinishedGroups:
    """The groups that ended since the last step, as they were after the filters.

    Their kept members went to ``ready``.
    """

    def __init__(
        self,
        config: RunConfig,
        ledger: Ledger,
        ready: ReadyGroups,
        alarms: Alarms,
        history: FailureHistory,
    ) -> None:
        self.ledger = ledger
        self.ready = ready
        self.alarms = alarms
        self.history = history
        self.groups: list[Group] = []
        algorithm = config.algorithm
        self.buffer = ReplayBuffer(algorithm.replay, config.seed)
        self.acceptance = AcceptanceRate(
            4 * algorithm.target, 1 / algorithm.filtering.max_generation_batches
        )
        self._injected: dict[int, tuple[Group, Member | None]] = {}
        """Group number -> the group as it was played, and its displaced member."""

    def replay(self, group: Group) -> Group:
        """Let a stored success take a member's place (ARPO).

        Buffer and ledger change when the group is committed.
        """
        injection = self.buffer.inject(group)
        self._injected[group.number] = (group, injection.displaced)
        return injection.group

    def commit(self, group: Group) -> str:
        """Take in a finished group: kept members are ready, the others have their status.

        Returns why to quarantine its task, or "". Raises AlarmStopped or GraderBroken.
        """
        played_members = self._account_for_replay(group)
        for member in group.members:
            if not member.replayed:
                self.ledger.move(member.summary.id, member.status or Status(TrajectoryState.READY))
        self.acceptance.observe(len(group.kept), len(group.members))
        self.groups.append(group)
        self.alarms.groups(played_members)
        outcomes = [member.outcome for member in played_members]
        kinds = [outcome.kind for outcome in outcomes if isinstance(outcome, Unscored)]
        failed = UnscoredKind.ENVIRONMENT_FAILURE in kinds
        reason = self.history.ended(group.number, group.task.id, failed)
        self.ready.add(group)
        return reason

    def _account_for_replay(self, group: Group) -> tuple[Member, ...]:
        """The members that were played for this group.

        They include a displaced member, and not the stored one that took its place.
        """
        fresh, displaced = self._injected.pop(group.number)
        self.buffer.store(fresh)
        if displaced is None or displaced.status is None:
            return group.members
        self.ready.end(displaced, displaced.status)
        self.ledger.replay()
        return displaced, *group.members[1:]

    def lose(self, ids: Collection[TrajectoryId]) -> int:
        """Exclude the trajectories ``ids``, whose payloads are lost.

        Returns how many were live; the others were stored for replay.
        """
        live_ids = [id for id in ids if self.ledger.state_of(id) is not None]
        self.alarms.lost(live_ids)
        self.buffer.forget(ids)
        self._injected = {
            number: (without(group, ids), displaced)
            for number, (group, displaced) in self._injected.items()
        }
        self.groups = [without(group, ids) for group in self.groups]
        return len(live_ids)

    def state(self) -> dict[str, Any]:
        """The state as plain values, with ``HeldValue`` for payloads of the replay buffer.

        Groups that are not committed are in flight.
        """
        replay = {}
        for task_id, members in self.buffer.state().items():
            replay[task_id] = [plain_member(member) for member in members]
        return {
            "groups": [plain_group(group.bare()) for group in self.groups],
            "replay": replay,
            "acceptance": self.acceptance.state(),
        }

    def restore(self, state: Mapping[str, Any], store: Store, task: Callable[[str], Task]) -> None:
        """Continue where ``state`` was taken.

        ``store`` keeps its payloads, ``task`` finds a row by its id.
        """
        self.groups = [group_from_plain(group, store, task) for group in state["groups"]]
        replay = {}
        for task_id, members in state["replay"].items():
            replay[task_id] = [member_from_plain(member, store) for member in members]
        self.buffer.restore(replay)
        self.acceptance.restore(state["acceptance"])
        self._injected.clear()
