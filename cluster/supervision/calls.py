"""One call of an environment actor, which plays episodes of a group: on which actor and engine, how long, and what came of each.

A call that fails as a whole becomes a ``Failure`` of each of its episodes. What is done about it is decided in attempts.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import ray

from rayloop.actors.environment import EnvironmentActor
from rayloop.actors.fates import is_lost
from rayloop.actors.handles import Handle, submit_split
from rayloop.actors.lease import Lease, LeasesEngines
from rayloop.actors.lost import brief, is_spent
from rayloop.actors.rollout import RolloutActor
from rayloop.cluster.supervision.pools import Pools
from rayloop.cluster.supervision.quarantine import Blame
from rayloop.core.deadlines import with_deadline
from rayloop.core.failures import Cause, Failure, Scope, WorkerLost
from rayloop.core.types import Ref, RolloutRequest, Summary, Trajectory
from rayloop.envs.episode import CLOSE_TIMEOUT

Played = tuple[Summary, Ref[Trajectory]]
"""An episode that was played, and its payload, which the driver owns and does not open."""
MARGIN = CLOSE_TIMEOUT + 30.0
"""Seconds that a call may take beyond ``environment.episode_timeout``, at which its actor ends what is not over by itself."""


@dataclass
class Avoid:
    """Slots on which an episode failed already: it is played on other nodes, or at least in other slots."""

    environments: set[int] = field(default_factory=set)
    engines: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Attempted:
    """Where episodes were played, and what became of each. ``lost``: their actor ended, and one of them may be the reason."""

    environment: Lease[EnvironmentActor]
    engine: Lease[RolloutActor]
    results: list[Failure | Played]
    lost: bool = False


class RolloutCalls:
    """Leases count episodes, in both pools, until their call has ended. ``timeout``: seconds for an episode."""

    def __init__(self, services: Pools, driver: Handle[LeasesEngines], timeout: float, blame: Blame) -> None:
        self._services, self._driver, self._timeout, self._blame = services, driver, timeout, blame
        self._engines: dict[str, int] = {}

    async def play(self, requests: Sequence[RolloutRequest], avoid: Avoid) -> Attempted:
        """Play episodes of a group, on an environment actor and an engine that are not to be avoided if there are others."""
        environments, rollout = self._services.environment, self._services.rollout
        group, count = requests[0].id.group, len(requests)
        lease = await environments.lease(avoid=avoid.environments, count=count)
        try:
            engine = await rollout.lease(str(group), avoid.engines, count)
        except BaseException:
            environments.release(lease.worker, count=count)
            raise
        self._engines.update((_key(request), engine.worker) for request in requests)
        self._blame.begins(group, lease.worker)
        answer, *payloads = submit_split(lease.handle, 1 + count, EnvironmentActor.play, requests, engine, self._driver)
        heads: Sequence[Summary | Failure] = ()
        try:
            what = f"{_named(requests)} of task {requests[0].task.id} on {environments.name(lease)}"
            heads = await with_deadline(self._timeout + MARGIN, answer, what, lease.handle)
        except asyncio.CancelledError:
            ray.cancel(answer)
            raise
        except Exception as error:
            if not is_lost(error):
                raise
            failure = self._lost(requests[0], lease, error)
            return Attempted(lease, engine, [failure] * count, lost=failure.of_actor)
        finally:
            self._release(requests, lease, heads)
        self._assign_blame(requests, lease, heads)
        results = zip(heads, cast(Sequence[Ref[Trajectory]], payloads), strict=True)  # what was played has a payload
        return Attempted(lease, engine, [one if isinstance(one, Failure) else (one, ref) for one, ref in results])

    def _release(self, requests: Sequence[RolloutRequest], lease: Lease[Any], heads: Sequence[Summary | Failure]) -> None:
        """A call that went well in part went well for its environment actor: one that cannot play plays nothing. Engines answer for
        each episode."""
        wells = [_went_well(one) for one in heads] or [(None, None)] * len(requests)
        actors = {well for well, _ in wells}
        well = True if True in actors else False if False in actors else None
        self._services.environment.release(lease.worker, well=well, count=len(requests))
        for request, (_, served) in sorted(zip(requests, wells, strict=True), key=lambda pair: pair[1][1] is True):
            self._services.rollout.release(self._engines.pop(_key(request)), str(request.id.group), served)

    def _assign_blame(self, requests: Sequence[RolloutRequest], lease: Lease[Any], heads: Sequence[Summary | Failure]) -> None:
        """Failures first: an actor on which some of a group went well is not sick. Bad data is not held against an actor before
        another one plays the task."""
        for request, one in zip(requests, heads, strict=True):
            if isinstance(one, Failure) and one.of_actor and one.cause is not Cause.BAD_DATA:
                self.environment_failed(request, lease, one)
        for one in heads:
            if not isinstance(one, Failure):
                self._blame.succeeded(lease.worker)

    def _lost(self, request: RolloutRequest, lease: Lease[Any], error: Exception) -> Failure:
        """The episodes' actor is gone: one of them is the reason, unless it was ended because of another call."""
        pool, why = self._services.environment, f"the environment actor was lost: {brief(error)}"
        if is_spent(error):
            pool.retire(lease.worker, brief(error))
        if lease.worker in pool.ended:
            return Failure(Cause.LOST, Scope.BYSTANDER, retryable=True, why=why)
        hung = isinstance(error, WorkerLost)
        failure = Failure(Cause.HUNG if hung else Cause.LOST, Scope.PROCESS if hung else Scope.EPISODE, retryable=True, why=why)
        self.environment_failed(request, lease, failure)
        pool.lost(lease.worker, error)
        return failure

    def environment_failed(self, request: RolloutRequest, lease: Lease[Any], failure: Failure) -> None:
        """Replace the actor when its process holds a call that hangs, or when the failure is the actor's own."""
        pool = self._services.environment
        sick = self._blame.failed(request.id.group, request.task.id, lease.worker, pool.place(lease), failure)
        if failure.scope is Scope.PROCESS or sick:
            pool.retire(lease.worker, sick or failure.why, charged=bool(sick))

    async def replace_engine(self, episode: str, lost: int, why: str) -> Lease[RolloutActor]:
        """A request of an episode failed on engine ``lost``: take it out of service, lease another for the episode."""
        pool = self._services.rollout
        pool.lost(lost, f"a request of episode {episode} failed: {why}")
        affinity = episode.partition("/")[0]
        lease = await pool.lease(affinity)
        if episode in self._engines:
            self._engines[episode] = lease.worker
        else:  # the episode was cancelled meanwhile
            pool.release(lease.worker, affinity)
        return lease


def _key(request: RolloutRequest) -> str:
    return f"{request.id}@{request.attempt}"


def _named(requests: Sequence[RolloutRequest]) -> str:
    """The episodes of one call, for people."""
    if len(requests) == 1:
        return f"episode {_key(requests[0])}"
    return f"episodes {_key(requests[0])} to {_key(requests[-1])}"


def _went_well(head: Summary | Failure) -> tuple[bool | None, bool | None]:
    """Whether an episode shows that its environment actor, and its engine, do their work; None where it shows nothing."""
    if not isinstance(head, Failure):
        return True, True
    return (False, None) if head.of_actor else (None, False if head.cause is Cause.BAD_DATA else None)
