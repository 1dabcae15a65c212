"""Calls that play or score episodes.

They decide on which actor and engine an episode is played, and for how long, and return the result
of each episode. A call that fails as a whole becomes a ``Failure`` of each of its episodes.
attempts.py decides what is done about it.
"""

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import ray

from rayloop.actors.environment import EnvironmentActor
from rayloop.actors.failures import brief, is_lost, is_spent, object_lost
from rayloop.actors.handles import Handle, resolved, submit_split
from rayloop.actors.lease import Lease, LeasesEngines
from rayloop.actors.reward import RewardActor
from rayloop.actors.rollout import RolloutActor
from rayloop.cluster.supervision.history import FailureHistory
from rayloop.cluster.supervision.pool import CALL_ATTEMPTS, Pool
from rayloop.core import incidents
from rayloop.core.deadlines import WAITS, with_deadline
from rayloop.core.events import Emit
from rayloop.core.failures import Cause, Failure, Scope, WorkerLost
from rayloop.core.groups import Group, Outcome, Unscored, UnscoredKind
from rayloop.core.types import Ref, RolloutRequest, Summary, Task, Trajectory
from rayloop.envs.episode import CLOSE_TIMEOUT_S
from rayloop.rewards.settings import RewardSettings
from rayloop.run.records.rollouts import RolloutRecord
from rayloop.run.sections import EnvironmentSettings

Played = tuple[Summary, Ref[Trajectory]]
"""An episode that was played, and its payload, which the driver owns and does not open."""
MARGIN = CLOSE_TIMEOUT_S + 30.0
"""Seconds that a call may take beyond ``environment.episode_timeout``.

At that time its actor ends every episode itself. An episode that waited for room has its whole time
from then on (``RolloutCalls._deadline``).
"""


class Pools(Protocol):
    """The pools that play and score (cluster/services.py)."""

    environment: Pool[EnvironmentActor]
    rollout: Pool[RolloutActor]
    reward: Pool[RewardActor]


@dataclass
class Avoid:
    """Slots on which an episode failed: it is played on other nodes, or at least in other slots."""

    environments: set[int] = field(default_factory=set)
    engines: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Attempted:
    """Where episodes were played, and the result of each.

    ``lost``: their actor ended, and one of them may be the reason.
    """

    environment: Lease[EnvironmentActor]
    engine: Lease[RolloutActor]
    results: list[Failure | Played]
    lost: bool = False


class RolloutCalls:
    """Calls that play episodes. Leases count episodes in both pools, until their call has ended.

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

    async def play(self, requests: Sequence[RolloutRequest], avoid: Avoid) -> Attempted:
        """Play episodes of a group in one call.

        If possible, the environment actor and the engine are not in ``avoid``.
        """
        environments = self._services.environment
        rollout = self._services.rollout
        group = requests[0].id.group
        count = len(requests)
        lease = await environments.lease(avoid=avoid.environments, count=count)

        try:
            engine = await rollout.lease(str(group), avoid.engines, count)
        except BaseException:
            # A cancellation while waiting for an engine must
            # give the environment's lease back as well.
            environments.release(lease.worker, count=count)
            raise

        # Before the call: an episode may lose its engine and ask for another one at once.
        self._engines.update((_key(request), engine.worker) for request in requests)
        self._history.begins(group, lease.worker)
        deadline = self._deadline(lease)
        answer, *payloads = submit_split(
            lease.handle, 1 + count, EnvironmentActor.play, requests, engine, self._driver
        )

        heads: Sequence[Summary | Failure] = ()
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
            failure = self._lost(requests[0], lease, error)
            return Attempted(lease, engine, [failure] * count, lost=failure.of_actor)
        finally:
            self._release(requests, lease, heads)

        self._record(requests, lease, heads)
        WAITS.played(heads, environments.name(lease), rollout.name(engine))

        # An episode that was played has a payload.
        refs = cast(Sequence[Ref[Trajectory]], payloads)
        results = [
            head if isinstance(head, Failure) else (head, ref)
            for head, ref in zip(heads, refs, strict=True)
        ]
        return Attempted(lease, engine, results)

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

    def _release(
        self,
        requests: Sequence[RolloutRequest],
        lease: Lease[Any],
        heads: Sequence[Summary | Failure],
    ) -> None:
        """End the leases of a call.

        A call that went well in part went well for its environment actor. Its engine is judged by
        each episode.
        """
        outcomes = [_went_well(head) for head in heads] or [(None, None)] * len(requests)
        actor_outcomes = {actor_well for actor_well, _ in outcomes}
        well: bool | None = None
        if True in actor_outcomes:
            well = True
        elif False in actor_outcomes:
            well = False
        self._services.environment.release(lease.worker, well=well, count=len(requests))

        engine_outcomes = [
            (request, engine_well)
            for request, (_, engine_well) in zip(requests, outcomes, strict=True)
        ]
        # Successes last: an engine that served one of these episodes must not end with a miss.
        engine_outcomes.sort(key=lambda outcome: outcome[1] is True)
        for request, engine_well in engine_outcomes:
            engine = self._engines.pop(_key(request))
            self._services.rollout.release(engine, str(request.id.group), engine_well)

    def _record(
        self,
        requests: Sequence[RolloutRequest],
        lease: Lease[Any],
        heads: Sequence[Summary | Failure],
    ) -> None:
        """Count the failures and successes of an environment actor.

        Failures first: an actor on which some of a group went well is not sick. ``EpisodeRunner``
        counts bad data.
        """
        for request, head in zip(requests, heads, strict=True):
            if isinstance(head, Failure) and head.of_actor and head.cause is not Cause.BAD_DATA:
                self.environment_failed(request, lease, head)
        for head in heads:
            if not isinstance(head, Failure):
                self._history.succeeded(lease.worker)

    def _lost(self, request: RolloutRequest, lease: Lease[Any], error: Exception) -> Failure:
        """The failure of episodes whose actor was lost.

        One of them is the reason, or another call is (``Scope.BYSTANDER``).
        """
        pool = self._services.environment
        reason = f"the environment actor was lost: {brief(error)}"

        # Retired first, so that the next test takes these episodes for bystanders.
        if is_spent(error):
            pool.retire(lease.worker, brief(error))
        if lease.worker in pool.ended:
            return Failure(Cause.LOST, Scope.BYSTANDER, retryable=True, why=reason)
        hung = isinstance(error, WorkerLost)
        failure = Failure(
            Cause.HUNG if hung else Cause.LOST,
            Scope.PROCESS if hung else Scope.EPISODE,
            retryable=True,
            why=reason,
        )
        # In this order: the first call may retire the actor
        # without a charge, and the second does nothing then.
        self.environment_failed(request, lease, failure)
        pool.lost(lease.worker, error)
        return failure

    def environment_failed(
        self, request: RolloutRequest, lease: Lease[Any], failure: Failure
    ) -> None:
        """Count a failure of an environment actor, and replace the actor if needed.

        It is replaced when its process holds a call that hangs, or when the actor is to blame.
        """
        pool = self._services.environment
        sick = self._history.failed(
            request.id.group, request.task.id, lease.worker, pool.place(lease), failure
        )
        if failure.scope is Scope.PROCESS or sick:
            pool.retire(lease.worker, sick or failure.why, charged=bool(sick))

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

        unavailable = [
            number
            for number, outcome in enumerate(outcomes)
            if _is(outcome, UnscoredKind.REWARD_UNAVAILABLE)
        ]
        if not unavailable or self._services.reward.size == 1:
            return outcomes
        retried = unavailable
        if self._settings.per == "group":
            retried = [
                number
                for number, outcome in enumerate(outcomes)
                if not _is(outcome, UnscoredKind.PAYLOAD_LOST)
            ]
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
        calls = self._services.reward.within(timeout, CALL_ATTEMPTS, _unable, slots)
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
        bare_group = replace(group, members=tuple(member.bare() for member in members))
        try:
            reward = self._services.reward.within(self._settings.timeout, CALL_ATTEMPTS)
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


def _went_well(head: Summary | Failure) -> tuple[bool | None, bool | None]:
    """Whether an episode shows that its environment actor, and its engine, work.

    None where it shows nothing.
    """
    if not isinstance(head, Failure):
        return True, True
    if head.of_actor:
        return False, None
    if head.cause is Cause.BAD_DATA:
        return None, False
    return None, None


def _unable(outcomes: Sequence[Outcome]) -> bool:
    return any(_is(outcome, UnscoredKind.REWARD_UNAVAILABLE) for outcome in outcomes)


def _is(outcome: Outcome, kind: UnscoredKind) -> bool:
    return isinstance(outcome, Unscored) and outcome.kind is kind
