"""Finished groups: which are ready, what a step takes of them, and what they show about tasks and
the acceptance rate.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from rayloop.core.groups import Group, Member, Status, TrajectoryState, Unscored, UnscoredKind
from rayloop.core.ledger import Ledger
from rayloop.core.types import Task, TrajectoryId, Version
from rayloop.grpo.alarms import Alarms
from rayloop.grpo.replay import ReplayBuffer
from rayloop.grpo.selection import Selection, select
from rayloop.grpo.settings import AlgorithmSettings
from rayloop.grpo.staleness import AcceptanceRate, expired
from rayloop.rollout.plain import (
    Own,
    group_from_plain,
    member_from_plain,
    plain_group,
    plain_member,
)
from rayloop.run.config import RunConfig


class ReadyGroups:
    """Finished groups with something to train on, in request order."""

    def __init__(self, settings: AlgorithmSettings, ledger: Ledger) -> None:
        self.settings, self.ledger = settings, ledger
        self.groups: list[Group] = []
        """Never changed, but replaced by another list."""
        self.dropped: Counter[str] = Counter()
        """Stale and surplus members since the last step, by ``state/source`` (for metrics)."""
        self._counted: tuple[list[Group], int] = (self.groups, 0)
        self._fresh: dict[int, Group] = {}
        """Groups without a member that is too old for ``_fresh_for``, the version of the last call
        of ``expire``.
        """
        self._fresh_for: tuple[Version, Mapping[int, int]] | None = None

    @property
    def survivors(self) -> int:
        """Trajectories that are ready to be trained."""
        # The list is replaced at each change, so its identity shows whether the count is current.
        if self._counted[0] is not self.groups:
            self._counted = self.groups, sum(len(group.kept) for group in self.groups)
        return self._counted[1]

    def add(self, group: Group) -> None:
        """A finished group; one of which nothing was kept is not ready."""
        if group.kept:
            self.groups = sorted([*self.groups, group], key=lambda g: g.number)

    def expire(self, version: Version, inherited: Mapping[int, int]) -> None:
        """Members too old for ``version`` become stale.

        Called at every change, so it remembers the groups that it found fresh.
        """
        limit = self.settings.staleness.max_staleness
        if self._fresh_for != (version, inherited):
            self._fresh_for, self._fresh = (version, dict(inherited)), {}
        unseen = [group for group in self.groups if self._fresh.get(group.number) is not group]
        now = {group.number: expired(group, version, limit, inherited) for group in unseen}
        if changed := [now[group.number] for group in unseen if now[group.number] is not group]:
            self.settle(changed)
            self.groups = [g for group in self.groups if (g := now.get(group.number, group)).kept]
        self._fresh.update(now)

    def select(self) -> Selection:
        """The step's target, by rank; nothing is taken yet."""
        return select(
            self.groups,
            self.settings.target,
            self.settings.filtering,
            oldest_first=self.settings.carry_over,
        )

    def take(self, chosen: Selection, among: Collection[int]) -> None:
        """The step trains on ``chosen.train``, of the groups ``among`` (numbers).

        Others of these compete again or are surplus.
        """
        self.settle(chosen.train)
        self.groups = [group for group in self.groups if group.number not in among]
        if self.settings.carry_over:
            self.groups = sorted([*chosen.left_over, *self.groups], key=lambda g: g.number)
        else:
            self.settle(
                _with_status(g, Status(TrajectoryState.SURPLUS, "left_over"))
                for g in chosen.left_over
            )

    def lose(self, ids: Collection[TrajectoryId]) -> None:
        """The payloads of these trajectories are gone."""
        remaining = [without(group, ids) for group in self.groups]
        self.settle(remaining)
        self.groups = [group for group in remaining if group.kept]

    async def complete(self, annotate: Callable[[Group], Awaitable[Group]]) -> None:
        """Annotate members without reference log-probs (of a run without a KL term): no step with a
        KL term could train on them.
        """
        for group in [g for g in self.groups if any(m.reference is None for m in g.kept)]:
            annotated = await annotate(group)
            self.groups = [annotated if g.number == group.number else g for g in self.groups]

    def settle_trained(self, groups: Iterable[Group]) -> None:
        """The kept members of these groups were trained."""
        for member in self._live(groups):
            if member.kept:
                self.ledger.move(member.summary.id, Status(TrajectoryState.TRAINED))

    def settle(self, groups: Iterable[Group]) -> None:
        """Members of these groups that have a status meet it, unless they have before."""
        for member in self._live(groups):
            if member.status is not None:
                self.end(member, member.status)

    def end(self, member: Member, status: Status) -> None:
        """A member's final state, when it will not be trained."""
        self.ledger.move(member.summary.id, status)
        if status.state in (TrajectoryState.STALE, TrajectoryState.SURPLUS):
            self.dropped[f"{status.state}/{member.summary.source or 'unnamed'}"] += 1

    def _live(self, groups: Iterable[Group]) -> Iterable[Member]:
        # The ledger counted a replayed member in the group that played it.
        members = (member for group in groups for member in group.members if not member.replayed)
        return (member for member in members if self.ledger.state_of(member.summary.id) is not None)

    def close(self) -> None:
        """The run is over: none of these will be trained."""
        self.settle(
            _with_status(group, Status(TrajectoryState.SURPLUS, "run_ended"))
            for group in self.groups
        )
        self.groups = []

    def state(self) -> dict[str, Any]:
        """Plain values, and ``HeldValue`` ones for payloads."""
        return {
            "groups": [plain_group(group) for group in self.groups],
            "dropped": dict(self.dropped),
        }

    def restore(self, state: Mapping[str, Any], own: Own, task: Callable[[str], Task]) -> None:
        """Go on where ``state`` was taken; ``own`` keeps what payloads it brings, ``task`` finds a
        row by its id.
        """
        self.groups = [group_from_plain(group, own, task) for group in state["groups"]]
        self.dropped = Counter(state["dropped"])


def without(group: Group, ids: Collection[TrajectoryId]) -> Group:
    """The group after the payloads of these trajectories were lost.

    Rewards and advantages of the others stay.
    """
    status = Status(TrajectoryState.EXCLUDED, UnscoredKind.PAYLOAD_LOST)
    gone = {i: m for i, m in enumerate(group.members) if m.kept and m.summary.id in ids}
    return group.map({i: replace(m.bare(), status=status) for i, m in gone.items()})


def _with_status(group: Group, status: Status) -> Group:
    return group.map({i: replace(m, status=status) for i, m in enumerate(group.members) if m.kept})


class Quarantine(Protocol):
    """Remembers in how many groups tasks failed (cluster/supervision/history.py)."""

    def ended(self, group: int, task: str, failed: bool) -> str:
        """A group ended, ``failed`` for some of its members.

        Returns why to quarantine its task, or "".
        """

    def clear(self) -> None:
        """Forget all failures."""

    def state(self) -> dict[str, int]:
        """Plain values for the checkpoint."""

    def restore(self, groups_failed: Mapping[str, int]) -> None:
        """Take over what ``state`` returned."""


class FinishedGroups:
    """The groups that ended since the last step, as they were after the filters; what was kept of
    them went to ``ready``.
    """

    def __init__(
        self,
        config: RunConfig,
        ledger: Ledger,
        ready: ReadyGroups,
        alarms: Alarms,
        blame: Quarantine,
    ) -> None:
        self.ledger, self.ready, self.alarms, self.blame = ledger, ready, alarms, blame
        self.groups: list[Group] = []
        self.buffer = ReplayBuffer(config.algorithm.replay, config.seed)
        settings = config.algorithm
        self.acceptance = AcceptanceRate(
            4 * settings.target, 1 / settings.filtering.max_generation_batches
        )
        self._injected: dict[int, tuple[Group, Member | None]] = {}

    def replay(self, group: Group, step: int) -> Group:
        """Let a stored success take a member's place (ARPO).

        Takes effect in buffer and ledger when the group is committed.
        """
        injection = self.buffer.inject(group, step)
        self._injected[group.number] = (group, injection.displaced)
        return injection.group

    def commit(self, group: Group) -> str:
        """Take a finished group in: what was kept is ready, the rest has its status.

        Returns why to quarantine its task, or "". Raises AlarmStopped or GraderBroken.
        """
        played = self._account_for_replay(group)
        for member in group.members:
            if not member.replayed:
                self.ledger.move(member.summary.id, member.status or Status(TrajectoryState.READY))
        self.acceptance.observe(len(group.kept), len(group.members))
        self.groups.append(group)
        self.alarms.groups(played)
        kinds = [m.outcome.kind for m in played if isinstance(m.outcome, Unscored)]
        why = self.blame.ended(
            group.number, group.task.id, UnscoredKind.ENVIRONMENT_FAILURE in kinds
        )
        self.ready.add(group)
        return why

    def _account_for_replay(self, group: Group) -> tuple[Member, ...]:
        """The members that were played for this group: a displaced one instead of what took its
        place.
        """
        fresh, displaced = self._injected.pop(group.number)
        self.buffer.store(fresh)
        if displaced is None or displaced.status is None:
            return group.members
        self.ready.end(displaced, displaced.status)
        self.ledger.replay()
        return displaced, *group.members[1:]

    def lose(self, ids: Collection[TrajectoryId]) -> int:
        """The payloads of these trajectories are gone.

        Returns how many were live; others are stored for replay.
        """
        live = [id for id in ids if self.ledger.state_of(id) is not None]
        self.alarms.lost(live)
        self.buffer.forget(ids)
        self._injected = {
            request: (without(group, ids), gone)
            for request, (group, gone) in self._injected.items()
        }
        self.groups = [without(group, ids) for group in self.groups]
        return len(live)

    def state(self) -> dict[str, Any]:
        """Plain values, and ``HeldValue`` for payloads of the replay buffer.

        Groups that are not committed are in flight.
        """
        stored = self.buffer.state().items()
        return {
            "groups": [plain_group(group.bare()) for group in self.groups],
            "replay": {
                task: [plain_member(member) for member in members] for task, members in stored
            },
            "acceptance": self.acceptance.state(),
        }

    def restore(self, state: Mapping[str, Any], own: Own, task: Callable[[str], Task]) -> None:
        """Go on where ``state`` was taken; ``own`` keeps what payloads it brings, ``task`` finds a
        row by its id.
        """
        self.groups = [group_from_plain(group, own, task) for group in state["groups"]]
        self.buffer.restore(
            {
                task: [member_from_plain(m, own) for m in members]
                for task, members in state["replay"].items()
            }
        )
        self.acceptance.restore(state["acceptance"])
        self._injected.clear()
