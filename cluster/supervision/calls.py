"""Calls that play or score episodes.

They decide on which actor and engine an episode is played, and for how long, and return the result
of each episode. A call that fails as a whole becomes a ``Failure`` of each of its episodes.
verdict.py decides what is done about it.
"""

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol, cast

import ray

from rayloop.actors.environment import EnvironmentActor
from rayloop.actors.failures import brief, is_lost, is_spent, object_lost
from rayloop.actors.handles import Handle, resolved, submit_split
from rayloop.actors.lease import Lease, LeasesEngines
from rayloop.actors.reward import RewardActor
from rayloop.actors.rollout import RolloutActor
from rayloop.cluster.supervision.pool import CALL_ATTEMPTS, Calls, Pool
from rayloop.core import incidents
from rayloop.core.deadlines import with_deadline
from rayloop.core.events import Emit
from rayloop.core.failures import Failure, WorkerLost
from rayloop.core.groups import Group, Outcome, Ref, Unscored, UnscoredKind
from rayloop.core.types import RolloutRequest, Task, Trajectory
from rayloop.envs.episode import CLOSE_TIMEOUT_S
from rayloop.rewards.settings import RewardSettings
from rayloop.rollout.failed_episodes import FailureHistory
from rayloop.rollout.verdict import Call, LostCall, Record
from rayloop.run.records.rollouts import RolloutRecord
from rayloop.run.sections import EnvironmentSettings

MARGIN = CLOSE_TIMEOUT_S + 30.0
"""Seconds that a call may take beyond ``environment.episode_timeout``.

An actor ends an episode itself after ``environment.episode_timeout``. The time of an episode begins
when it gets room on the actor (``RolloutCalls._deadline``).
"""


class Pools(Protocol):
    """The pools that play and score (cluster/services.py)."""

    environment: Pool[EnvironmentActor]
    rollout: Pool[RolloutActor]
    reward: Pool[RewardActor]


class RolloutCalls:
    """Calls that run episodes. Leases count episodes in both pools, until their call has ended.

    ``settings``: how long an episode may take, and how many an actor plays at once.
    """

    def __init__(
        self,
        services: Pools,
        driver: Handle[LeasesEngines],
        settings: EnvironmentSettings,
        history: FailureHistory,
    ) -> None:
        self._services = services
        self._driver = driver
        self._settings = settings
        self._history = history
        self._engines: dict[str, int] = {}

    async def run_episodes(self, requests: Sequence[RolloutRequest], avoid: Record) -> Call:
        """Run episodes of a group in one call.

        If possible, the environment actor and the engine are not in ``avoid``.
        """
        environments = self._services.environment
        rollout = self._services.rollout
        group = requests[0].id.group
        count = len(requests)
        lease = await environments.lease(avoid=avoid.environments, count=count)

        try:
            engine = await rollout.lease(str(group), avoid.engines, count)
            # Before the call: an episode may lose its engine and ask for another one at once.
            self._engines.update((_key(request), engine.worker) for request in requests)
            return await self._answered(Call(requests, lease, engine), lease, engine)
        except BaseException:
            environments.release(lease.worker, count=count)
            for request in requests:
                # A cancellation may come while it waits for an engine.
                if _key(request) in self._engines:
                    self.release_engine(request)
            raise

    async def _answered(
        self, call: Call, lease: Lease[EnvironmentActor], engine: Lease[RolloutActor]
    ) -> Call:
        """The call with its results. Raises all errors but the loss of the environment actor."""
        environments = self._services.environment
        requests = call.requests
        count = len(requests)
        self._history.begins(requests[0].id.group, lease.worker)
        deadline = self._deadline(lease)
        answer, *payloads = submit_split(
            lease.handle, 1 + count, EnvironmentActor.run_episodes, requests, engine, self._driver
        )
        try:
            what = f"{_named(requests)} of task {requests[0].task.id} on {environments.name(lease)}"
            heads = await with_deadline(deadline, answer, what, lease.handle)
        except asyncio.CancelledError:
            # Ray does not cancel a call with the task that awaits it; the actor would play on.
            ray.cancel(answer)
            raise
        except Exception as error:
            if not is_lost(error):
                raise
            lost = LostCall(
                str(error),
                brief(error),
                is_spent(error),
                isinstance(error, WorkerLost),
                lease.worker in environments.ended,
            )
            return call._replace(results=[lost.failure] * count, lost=lost)

        # An episode that was played has a payload.
        refs = cast(Sequence[Ref[Trajectory]], payloads)
        results = [
            head if isinstance(head, Failure) else (head, ref)
            for head, ref in zip(heads, refs, strict=True)
        ]
        return call._replace(results=results)

    def _deadline(self, lease: Lease[EnvironmentActor]) -> float:
        """Seconds for a call whose episodes may first wait for room.

        Episodes get room in the order in which they came, and the leases of the actor count this
        call's episodes and all that may have come before.
        """
        timeout = self._settings.episode_timeout
        at_once = self._settings.episodes_at_once
        worker = self._services.environment.workers.get(lease.worker)
        if worker is None or at_once is None:
            return timeout + MARGIN
        earlier_rounds = math.ceil(worker.leases / at_once) - 1
        return earlier_rounds * (timeout + CLOSE_TIMEOUT_S) + timeout + MARGIN

    def release_engine(self, request: RolloutRequest, well: bool | None = None) -> None:
        """End the lease of an episode's engine. ``well``: whether it did its work, if known."""
        engine = self._engines.pop(_key(request))
        self._services.rollout.release(engine, str(request.id.group), well)

    async def replace_engine(self, episode: str, lost: int, why: str) -> Lease[RolloutActor]:
        """Lease another engine for an episode, and take engine ``lost`` out of service.

        A request of the episode failed on it.
        """
        pool = self._services.rollout
        pool.lost(lost, f"a request of episode {episode} failed: {why}")
        affinity = episode.partition("/")[0]
        lease = await pool.lease(affinity)
        if episode in self._engines:
            self._engines[episode] = lease.worker
        else:
            # The episode was cancelled while it waited.
            pool.release(lease.worker, affinity)
        return lease


class RewardCalls:
    """Calls that score episodes. One call scores the episodes that were played together.

    A lost actor, a lost payload or a deadline is never a number.
    """

    def __init__(self, settings: RewardSettings, services: Pools, emit: Emit) -> None:
        self._settings = settings
        self._services = services
        self._emit = emit

    async def score(
        self, payloads: Sequence[Ref[Trajectory]], task: Task, step: int
    ) -> list[Outcome]:
        """One outcome per payload.

        A payload that is ``reward_unavailable`` on one actor is scored once more, by another one;
        with ``reward.per: group``, together with the rest of the group.
        """
        slots: set[int] = set()
        try:
            outcomes = await self._ask(payloads, task, step, slots)
        except WorkerLost as error:
            return [Unscored(UnscoredKind.REWARD_UNAVAILABLE, str(error))] * len(payloads)

        if not _unable(outcomes) or self._services.reward.size == 1:
            return outcomes
        retried = []
        for number, outcome in enumerate(outcomes):
            in_group = self._settings.per == "group" and not _is(outcome, UnscoredKind.PAYLOAD_LOST)
            if in_group or _is(outcome, UnscoredKind.REWARD_UNAVAILABLE):
                retried.append(number)
        # If the second call is lost, the first outcomes stand.
        with suppress(WorkerLost):
            retried_payloads = [payloads[number] for number in retried]
            second = await self._ask(retried_payloads, task, step, slots)
            for number, outcome in zip(retried, second, strict=True):
                outcomes[number] = outcome
        return outcomes

    async def _ask(
        self, payloads: Sequence[Ref[Trajectory]], task: Task, step: int, slots: set[int]
    ) -> list[Outcome]:
        """The outcomes of a reward actor, if possible one that is not in ``slots``.

        Its slot is added to ``slots`` when something failed there. The payloads travel with the
        call; when one is lost, the actor fetches them, to find out which. Raises WorkerLost.
        """
        # A reward actor asks its grader twice at most; ten seconds are for the way there and back.
        timeout = 2 * self._settings.timeout + 10
        calls = Calls(self._services.reward, timeout, CALL_ATTEMPTS, _unable, slots)
        try:
            return await calls.call(RewardActor.score, task, step, *map(resolved, payloads))
        except Exception as error:
            if not object_lost(error):
                raise
            return await calls.call(RewardActor.score_those_left, list(payloads), task, step)

    async def describe(self, group: Group) -> tuple[list[RolloutRecord], dict[str, bytes]]:
        """Records and images of a group's trajectories, for ``rollouts/``.

        Nothing when the payloads are lost.
        """
        members = [member for member in group.members if member.payload is not None]
        # Ray resolves a reference only where it is an argument
        # itself; nested ones would travel unresolved.
        payloads = [resolved(member.payload) for member in members if member.payload]
        bare_members = tuple(replace(member, payload=None, ref_logprobs=None) for member in members)
        bare_group = replace(group, members=bare_members)
        try:
            reward = Calls(self._services.reward, self._settings.timeout, CALL_ATTEMPTS)
            return await reward.call(RewardActor.describe, bare_group, *payloads)
        except Exception as error:
            if not isinstance(error, WorkerLost) and not object_lost(error):
                raise
            self._emit(incidents.RolloutsNotWritten(group.number, why=brief(error)))
            return [], {}


def _key(request: RolloutRequest) -> str:
    return f"{request.id}@{request.attempt}"


def _named(requests: Sequence[RolloutRequest]) -> str:
    """The episodes of one call, for messages."""
    first = _key(requests[0])
    last = _key(requests[-1])
    return f"episode {first}" if len(requests) == 1 else f"episodes {first} to {last}"


def _unable(outcomes: Sequence[Outcome]) -> bool:
    return any(_is(outcome, UnscoredKind.REWARD_UNAVAILABLE) for outcome in outcomes)


def _is(outcome: Outcome, kind: UnscoredKind) -> bool:
    return isinstance(outcome, Unscored) and outcome.kind is kind
