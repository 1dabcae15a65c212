"""Calls that play or score episodes: on which actor and engine, for how long, and the result of
each episode. A call that fails as a whole becomes a ``Failure`` of each of its episodes.
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
from rayloop.cluster.supervision.pool import ATTEMPTS, Pool
from rayloop.core import incidents
from rayloop.core.deadlines import WAITS, with_deadline
from rayloop.core.events import Emit
from rayloop.core.failures import Cause, Failure, Scope, WorkerLost
from rayloop.core.groups import Group, Outcome, Unscored, UnscoredKind
from rayloop.core.types import Ref, RolloutRequest, Summary, Task, Trajectory
from rayloop.envs.episode import CLOSE_TIMEOUT
from rayloop.rewards.settings import RewardSettings
from rayloop.run.config import EnvironmentSettings
from rayloop.run.folder import RolloutRecord

Played = tuple[Summary, Ref[Trajectory]]
"""An episode that was played, and its payload, which the driver owns and does not open."""
MARGIN = CLOSE_TIMEOUT + 30.0
"""Seconds that a call may take beyond ``environment.episode_timeout``, at which its actor ends
every episode itself. An episode that waited for room has its whole time from then on
(``RolloutCalls._deadline``).
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
    """Leases count episodes, in both pools, until their call has ended.

    ``settings``: how long an episode may take, and how many an actor plays at once.
    """

    def __init__(
        self,
        services: Pools,
        driver: Handle[LeasesEngines],
        settings: EnvironmentSettings,
        history: FailureHistory,
    ) -> None:
        self._services, self._driver, self._settings, self._history = (
            services,
            driver,
            settings,
            history,
        )
        self._engines: dict[str, int] = {}

    async def play(self, requests: Sequence[RolloutRequest], avoid: Avoid) -> Attempted:
        """Play episodes of a group, if possible on an environment actor and an engine that are not
        in ``avoid``.
        """
        environments, rollout = self._services.environment, self._services.rollout
        group, count = requests[0].id.group, len(requests)
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
        within = self._deadline(lease)
        answer, *payloads = submit_split(
            lease.handle, 1 + count, EnvironmentActor.play, requests, engine, self._driver
        )

        heads: Sequence[Summary | Failure] = ()
        try:
            what = f"{_named(requests)} of task {requests[0].task.id} on {environments.name(lease)}"
            heads = await with_deadline(within, answer, what, lease.handle)
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

        results = zip(
            heads, cast(Sequence[Ref[Trajectory]], payloads), strict=True
        )  # what was played has a payload
        return Attempted(
            lease, engine, [one if isinstance(one, Failure) else (one, ref) for one, ref in results]
        )

    def _deadline(self, lease: Lease[EnvironmentActor]) -> float:
        """Seconds for a call whose episodes may first wait for room.

        Room goes to those who came first, and the leases of the actor count this call's episodes
        and all that may have come before.
        """
        timeout, at_once = self._settings.episode_timeout, self._settings.episodes_at_once
        worker = self._services.environment.workers.get(lease.worker)
        if worker is None or at_once is None:
            return timeout + MARGIN
        before = math.ceil(worker.leases / at_once) - 1
        return before * (timeout + CLOSE_TIMEOUT) + timeout + MARGIN

    def _release(
        self,
        requests: Sequence[RolloutRequest],
        lease: Lease[Any],
        heads: Sequence[Summary | Failure],
    ) -> None:
        """A call that went well in part went well for its environment actor.

        Its engine is judged by each episode.
        """
        wells = [_went_well(one) for one in heads] or [(None, None)] * len(requests)
        actors = {well for well, _ in wells}
        well = True if True in actors else False if False in actors else None
        self._services.environment.release(lease.worker, well=well, count=len(requests))
        # Successes last: an engine that served one of these episodes must not end with a miss.
        for request, (_, served) in sorted(
            zip(requests, wells, strict=True), key=lambda pair: pair[1][1] is True
        ):
            self._services.rollout.release(
                self._engines.pop(_key(request)), str(request.id.group), served
            )

    def _record(
        self,
        requests: Sequence[RolloutRequest],
        lease: Lease[Any],
        heads: Sequence[Summary | Failure],
    ) -> None:
        """Failures first: an actor on which some of a group went well is not sick.

        ``EpisodeRunner`` counts bad data.
        """
        for request, one in zip(requests, heads, strict=True):
            if isinstance(one, Failure) and one.of_actor and one.cause is not Cause.BAD_DATA:
                self.environment_failed(request, lease, one)
        for one in heads:
            if not isinstance(one, Failure):
                self._history.succeeded(lease.worker)

    def _lost(self, request: RolloutRequest, lease: Lease[Any], error: Exception) -> Failure:
        """The failure of episodes whose actor is gone: because of one of them, or of another call
        (``Scope.BYSTANDER``).
        """
        pool, why = self._services.environment, f"the environment actor was lost: {brief(error)}"

        # Retired first, so that the next test takes these episodes for bystanders.
        if is_spent(error):
            pool.retire(lease.worker, brief(error))
        if lease.worker in pool.ended:
            return Failure(Cause.LOST, Scope.BYSTANDER, retryable=True, why=why)
        hung = isinstance(error, WorkerLost)
        failure = Failure(
            Cause.HUNG if hung else Cause.LOST,
            Scope.PROCESS if hung else Scope.EPISODE,
            retryable=True,
            why=why,
        )
        # In this order: the first call may retire the actor
        # without a charge, and the second does nothing then.
        self.environment_failed(request, lease, failure)
        pool.lost(lease.worker, error)
        return failure

    def environment_failed(
        self, request: RolloutRequest, lease: Lease[Any], failure: Failure
    ) -> None:
        """Replace the actor when its process holds a call that hangs, or when the failure is the
        actor's own.
        """
        pool = self._services.environment
        sick = self._history.failed(
            request.id.group, request.task.id, lease.worker, pool.place(lease), failure
        )
        if failure.scope is Scope.PROCESS or sick:
            pool.retire(lease.worker, sick or failure.why, charged=bool(sick))

    async def replace_engine(self, episode: str, lost: int, why: str) -> Lease[RolloutActor]:
        """A request of an episode failed on engine ``lost``: take it out of service, lease another
        for the episode.
        """
        pool = self._services.rollout
        pool.lost(lost, f"a request of episode {episode} failed: {why}")
        affinity = episode.partition("/")[0]
        lease = await pool.lease(affinity)
        if episode in self._engines:
            self._engines[episode] = lease.worker
        else:  # the episode was cancelled meanwhile
            pool.release(lease.worker, affinity)
        return lease


class RewardCalls:
    """One call scores what was played together.

    A lost actor, a lost payload or a deadline is never a number.
    """

    def __init__(self, settings: RewardSettings, services: Pools, emit: Emit) -> None:
        self._settings, self._services, self._emit = settings, services, emit

    async def score(
        self, payloads: Sequence[Ref[Trajectory]], task: Task, step: int
    ) -> list[Outcome]:
        """One outcome per payload.

        What is ``reward_unavailable`` on one actor is scored once more, by another one; with
        ``reward.per: group``, together with the rest of the group.
        """
        slots: set[int] = set()
        try:
            outcomes = await self._ask(payloads, task, step, slots)
        except WorkerLost as error:
            return [Unscored(UnscoredKind.REWARD_UNAVAILABLE, str(error))] * len(payloads)

        again = [
            number
            for number, outcome in enumerate(outcomes)
            if _is(outcome, UnscoredKind.REWARD_UNAVAILABLE)
        ]
        if not again or self._services.reward.size == 1:
            return outcomes
        if self._settings.per == "group":
            again = [
                n
                for n, outcome in enumerate(outcomes)
                if not _is(outcome, UnscoredKind.PAYLOAD_LOST)
            ]
        with suppress(WorkerLost):  # the first outcomes stand
            second = await self._ask([payloads[number] for number in again], task, step, slots)
            for number, outcome in zip(again, second, strict=True):
                outcomes[number] = outcome
        return outcomes

    async def _ask(
        self, payloads: Sequence[Ref[Trajectory]], task: Task, step: int, slots: set[int]
    ) -> list[Outcome]:
        """The outcomes of some reward actor, if possible not in ``slots``, to which its slot is
        added when something failed there. The payloads travel with the call; when one is lost, the
        actor fetches them, to find out which. Raises WorkerLost.
        """
        # A reward actor asks its grader twice at most; ten seconds are for the way there and back.
        calls = self._services.reward.within(
            2 * self._settings.timeout + 10, ATTEMPTS, _unable, slots
        )
        try:
            return await calls.call(RewardActor.score, task, step, *map(resolved, payloads))
        except Exception as error:
            if not object_lost(error):
                raise
            return await calls.call(RewardActor.score_those_left, list(payloads), task, step)

    async def describe(self, group: Group) -> tuple[list[RolloutRecord], dict[str, bytes]]:
        """Records and images of a group's trajectories, for ``rollouts/``.

        Nothing when the payloads are gone.
        """
        members = [m for m in group.members if m.payload is not None]
        # Ray resolves references only as arguments of
        # their own; nested ones would travel unresolved.
        bare = replace(
            group, members=tuple(replace(m, payload=None, reference=None) for m in members)
        )
        try:
            reward = self._services.reward.within(self._settings.timeout, ATTEMPTS)
            return await reward.call(
                RewardActor.describe, bare, *(resolved(m.payload) for m in members if m.payload)
            )
        except Exception as error:
            if not isinstance(error, WorkerLost) and not object_lost(error):
                raise
            self._emit(incidents.RolloutsNotWritten(group.number, why=brief(error)))
            return [], {}


def _key(request: RolloutRequest) -> str:
    return f"{request.id}@{request.attempt}"


def _named(requests: Sequence[RolloutRequest]) -> str:
    """The episodes of one call, for people."""
    first, last = _key(requests[0]), _key(requests[-1])
    return f"episode {first}" if len(requests) == 1 else f"episodes {first} to {last}"


def _went_well(head: Summary | Failure) -> tuple[bool | None, bool | None]:
    """Whether an episode shows that its environment actor, and its engine, work; None where it
    shows nothing.
    """
    if not isinstance(head, Failure):
        return True, True
    return (
        (False, None) if head.of_actor else (None, False if head.cause is Cause.BAD_DATA else None)
    )


def _unable(outcomes: Sequence[Outcome]) -> bool:
    return any(_is(outcome, UnscoredKind.REWARD_UNAVAILABLE) for outcome in outcomes)


def _is(outcome: Outcome, kind: UnscoredKind) -> bool:
    return isinstance(outcome, Unscored) and outcome.kind is kind
