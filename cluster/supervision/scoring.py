"""RewardCalls on the reward pool: what a reward actor's loss, a lost payload or a deadline is, it is never a number."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import suppress

from rayloop.actors.fates import object_lost
from rayloop.actors.handles import resolved
from rayloop.actors.lost import brief
from rayloop.actors.reward import RewardActor
from rayloop.cluster.supervision.pool import ATTEMPTS
from rayloop.cluster.supervision.pools import Pools
from rayloop.core import incidents
from rayloop.core.events import Emit
from rayloop.core.failures import WorkerLost
from rayloop.core.groups import Group, Outcome, Unscored, UnscoredKind
from rayloop.core.types import Ref, Task, Trajectory
from rayloop.rewards.settings import RewardSettings
from rayloop.run.folder import RolloutRecord


class RewardCalls:
    """One call scores what was played together. One that is made again elsewhere may score twice, which costs nothing but time."""

    def __init__(self, settings: RewardSettings, services: Pools, emit: Emit) -> None:
        self._settings, self._services, self._emit = settings, services, emit

    async def score(self, payloads: Sequence[Ref[Trajectory]], task: Task, step: int) -> list[Outcome]:
        """One outcome per payload. An actor around which something fails (a full disk) has not the last word: another one is asked
        once, about those that it left unscored; with ``reward.per: group`` about all, whose outcomes belong together."""
        slots: set[int] = set()
        try:
            outcomes = await self._ask(payloads, task, step, slots)
        except WorkerLost as error:
            return [Unscored(UnscoredKind.REWARD_UNAVAILABLE, str(error))] * len(payloads)
        again = [number for number, outcome in enumerate(outcomes) if _is(outcome, UnscoredKind.REWARD_UNAVAILABLE)]
        if not again or self._services.reward.size == 1:
            return outcomes
        if self._settings.per == "group":
            again = [n for n, outcome in enumerate(outcomes) if not _is(outcome, UnscoredKind.PAYLOAD_LOST)]
        with suppress(WorkerLost):  # what the first one said stands
            second = await self._ask([payloads[number] for number in again], task, step, slots)
            for number, outcome in zip(again, second, strict=True):
                outcomes[number] = outcome
        return outcomes

    async def _ask(self, payloads: Sequence[Ref[Trajectory]], task: Task, step: int, slots: set[int]) -> list[Outcome]:
        """What some reward actor says, if possible not one of ``slots``; its own is added when something failed around it.

        The payloads travel with the call. Only when one of them is lost does the actor fetch them, since it then says which. Raises
        WorkerLost.
        """
        deadline = 2 * self._settings.timeout + 10
        calls = self._services.reward.within(deadline, ATTEMPTS, _unable, slots)
        try:
            return await calls.call(RewardActor.score, task, step, *map(resolved, payloads))
        except Exception as error:
            if not object_lost(error):
                raise
            return await calls.call(RewardActor.score_those_left, list(payloads), task, step)

    async def describe(self, group: Group) -> tuple[list[RolloutRecord], dict[str, bytes]]:
        """Records and images of a group's trajectories, for ``rollouts/``. Nothing when the payloads are gone."""
        members = [m for m in group.members if m.payload is not None]
        bare = dataclasses.replace(group, members=tuple(dataclasses.replace(m, payload=None, reference=None) for m in members))
        try:
            reward = self._services.reward.within(self._settings.timeout, ATTEMPTS)
            return await reward.call(RewardActor.describe, bare, *(resolved(m.payload) for m in members if m.payload))
        except Exception as error:
            if not isinstance(error, WorkerLost) and not object_lost(error):
                raise
            self._emit(incidents.RolloutsNotWritten(group.number, why=brief(error)))
            return [], {}


def _unable(outcomes: Sequence[Outcome]) -> bool:
    return any(_is(outcome, UnscoredKind.REWARD_UNAVAILABLE) for outcome in outcomes)


def _is(outcome: Outcome, kind: UnscoredKind) -> bool:
    return isinstance(outcome, Unscored) and outcome.kind is kind
