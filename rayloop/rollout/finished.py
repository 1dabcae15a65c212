"""Finished groups: their ready members, and what their trajectories show about tasks, graders and the acceptance rate."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from rayloop.core.groups import Group, Member, Status, TrajectoryState, Unscored, UnscoredKind
from rayloop.core.ledger import Ledger
from rayloop.core.types import Task, TrajectoryId
from rayloop.grpo.alarms import Alarms
from rayloop.grpo.replay import ReplayBuffer
from rayloop.grpo.staleness import AcceptanceRate
from rayloop.rollout.plain import Own, group_from_plain, member_from_plain, plain_group, plain_member
from rayloop.rollout.ready import ReadyGroups, without
from rayloop.run.config import RunConfig


class Quarantine(Protocol):
    """Remembers in how many groups tasks failed (cluster/supervision/history.py)."""

    def ended(self, group: int, task: str, failed: bool) -> str:
        """A group ended, ``failed`` for some of its members. Returns why to quarantine its task, or ""."""

    def clear(self) -> None:
        """Forget all failures."""

    def state(self) -> dict[str, int]:
        """Plain values for the checkpoint."""

    def restore(self, groups_failed: Mapping[str, int]) -> None:
        """Take over what ``state`` returned."""


class FinishedGroups:
    """``groups`` ended since the last step, as they were after the filters; what was kept of them went to ``ready``."""

    def __init__(self, config: RunConfig, ledger: Ledger, ready: ReadyGroups, alarms: Alarms, blame: Quarantine) -> None:
        self.ledger, self.ready, self.alarms, self.blame = ledger, ready, alarms, blame
        self.groups: list[Group] = []
        self.buffer = ReplayBuffer(config.algorithm.replay, config.seed)
        settings = config.algorithm
        self.acceptance = AcceptanceRate(4 * settings.target, 1 / settings.filtering.max_generation_batches)
        self._injected: dict[int, tuple[Group, Member | None]] = {}

    def replay(self, group: Group, step: int) -> Group:
        """Let a stored success take a member's place (ARPO). Takes effect in buffer and ledger when the group is committed."""
        injection = self.buffer.inject(group, step)
        self._injected[group.number] = (group, injection.displaced)
        return injection.group

    def commit(self, group: Group) -> str:
        """Take a finished group in: what was kept is ready, the rest has its status. Returns why to quarantine its task, or "".

        Raises AlarmStopped or GraderBroken.
        """
        played = self._account_for_replay(group)
        for member in group.members:
            if not member.replayed:
                self.ledger.move(member.summary.id, member.status or Status(TrajectoryState.READY))
        self.acceptance.observe(len(group.kept), len(group.members))
        self.groups.append(group)
        self.alarms.groups(played)
        kinds = [m.outcome.kind for m in played if isinstance(m.outcome, Unscored)]
        why = self.blame.ended(group.number, group.task.id, UnscoredKind.ENVIRONMENT_FAILURE in kinds)
        self.ready.add(group)
        return why

    def _account_for_replay(self, group: Group) -> tuple[Member, ...]:
        """The members that were played for this group: a displaced one instead of what took its place."""
        fresh, displaced = self._injected.pop(group.number)
        self.buffer.store(fresh)
        if displaced is None or displaced.status is None:
            return group.members
        self.ready.end(displaced, displaced.status)
        self.ledger.replay()
        return displaced, *group.members[1:]

    def lose(self, ids: Collection[TrajectoryId]) -> int:
        """The payloads of these trajectories are gone. Returns how many were live; others are stored for replay."""
        live = [id for id in ids if self.ledger.state_of(id) is not None]
        self.alarms.lost(live)
        self.buffer.forget(ids)
        self._injected = {request: (without(group, ids), gone) for request, (group, gone) in self._injected.items()}
        self.groups = [without(group, ids) for group in self.groups]
        return len(live)

    def state(self) -> dict[str, Any]:
        """Plain values, and ``HeldValue`` for payloads of the replay buffer. Groups that are not committed are in flight."""
        stored = self.buffer.state().items()
        return {
            "groups": [plain_group(group.bare()) for group in self.groups],
            "replay": {task: [plain_member(member) for member in members] for task, members in stored},
            "acceptance": self.acceptance.state(),
        }

    def restore(self, state: Mapping[str, Any], own: Own, task: Callable[[str], Task]) -> None:
        """Go on where ``state`` was taken; ``own`` keeps what payloads it brings, ``task`` finds a row by its id."""
        self.groups = [group_from_plain(group, own, task) for group in state["groups"]]
        stored = state["replay"].items()
        self.buffer.restore({task: [member_from_plain(m, own) for m in members] for task, members in stored})
        self.acceptance.restore(state["acceptance"])
        self._injected.clear()
