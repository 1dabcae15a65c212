"""One call of an environment actor, which plays episodes of a group: on which actor and engine, how long, and what it says of them.

What failed with the call as a whole becomes the failure of each of its episodes here; what is done about failures is decided
by whoever calls (cluster/loop/episode_runner.py).
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
from rayloop.cluster.roles.services import Services
from rayloop.core.deadlines import with_deadline
from rayloop.core.failures import WorkerLost
from rayloop.core.groups import RolloutFailed, Unscored, UnscoredKind
from rayloop.core.types import Ref, RolloutRequest, Summary, Trajectory
from rayloop.envs.episode import CLOSE_TIMEOUT
from rayloop.rollout.blame import Blame

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
class Answer:
    """Where episodes were played, and what became of each. ``lost``: their actor is gone, and one of them may have ended it."""

    environment: Lease[EnvironmentActor]
    engine: Lease[RolloutActor]
    results: list[RolloutFailed | Played]
    lost: bool = False


class RolloutCalls:
    """Leases count episodes, in both pools, until their call has ended."""

    def __init__(self, services: Services, driver: Handle[LeasesEngines], timeout: float, blame: Blame) -> None:
        """``timeout``: seconds for an episode."""
        self._services, self._driver, self._timeout, self.blame = services, driver, timeout, blame
        self._engines: dict[str, int] = {}

    async def play(self, requests: Sequence[RolloutRequest], avoid: Avoid) -> Answer:
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
        self.blame.begins(group, lease.worker)
        answer, *payloads = submit_split(lease.handle, 1 + count, EnvironmentActor.play, requests, engine, self._driver)
        said: Sequence[Summary | RolloutFailed] = ()
        try:
            what = f"{_named(requests)} of task {requests[0].task.id} on {environments.name(lease)}"
            said = await with_deadline(self._timeout + MARGIN, answer, what, lease.handle)
        except asyncio.CancelledError:
            ray.cancel(answer)
            raise
        except Exception as error:
            if not is_lost(error):
                raise
            failures = self._lost(requests, lease, error)
            return Answer(lease, engine, list(failures), lost=failures[0].own)
        finally:
            self._release(requests, lease, said)
        self._assign_blame(requests, lease, said)
        results = zip(said, cast(Sequence[Ref[Trajectory]], payloads), strict=True)  # what was played has a payload
        return Answer(lease, engine, [one if isinstance(one, RolloutFailed) else (one, ref) for one, ref in results])

    def _release(self, requests: Sequence[RolloutRequest], lease: Lease[Any], said: Sequence[Summary | RolloutFailed]) -> None:
        """A call that went well in part went well for its environment actor: one that cannot play plays nothing. Engines answer for
        each episode."""
        wells = [_went_well(one) for one in said] or [(None, None)] * len(requests)
        told = {well for well, _ in wells}
        well = True if True in told else False if False in told else None
        self._services.environment.release(lease.worker, well=well, count=len(requests))
        for request, (_, served) in sorted(zip(requests, wells, strict=True), key=lambda pair: pair[1][1] is True):
            self._services.rollout.release(self._engines.pop(_key(request)), str(request.id.group), served)

    def _assign_blame(self, requests: Sequence[RolloutRequest], lease: Lease[Any], said: Sequence[Summary | RolloutFailed]) -> None:
        """Failures first: an actor on which some of a group went well is not sick."""
        for request, one in zip(requests, said, strict=True):
            if isinstance(one, RolloutFailed) and one.own and one.outcome.kind is UnscoredKind.ENVIRONMENT_FAILURE:
                self.environment_failed(request, lease, one)
        for one in said:
            if not isinstance(one, RolloutFailed):
                self.blame.succeeded(lease.worker)

    def _lost(self, requests: Sequence[RolloutRequest], lease: Lease[Any], error: Exception) -> list[RolloutFailed]:
        """The episodes' actor is gone. It was their own doing unless it was ended because of another one."""
        pool, why = self._services.environment, f"the environment actor was lost: {brief(error)}"
        if is_spent(error):
            pool.retire(lease.worker, brief(error))
        own = lease.worker not in pool.ended
        outcome, hung = Unscored(UnscoredKind.ENVIRONMENT_FAILURE, why), isinstance(error, WorkerLost)
        failed = [RolloutFailed(request.id, request.attempt, outcome, own=own, hung=hung) for request in requests]
        if own:
            self.environment_failed(requests[0], lease, failed[0])
            pool.lost(lease.worker, error)
        return failed

    def environment_failed(self, request: RolloutRequest, lease: Lease[Any], failed: RolloutFailed) -> None:
        """Replace the actor when its process holds a call that hangs, or when the failure is the actor's own."""
        pool, why, ids = self._services.environment, failed.outcome.reason, (request.id.group, request.task.id)
        sick = self.blame.failed(*ids, lease.worker, pool.place(lease), why, hung=failed.hung, contained=failed.contained)
        if (failed.hung and not failed.contained) or sick:
            pool.retire(lease.worker, sick or why, charged=bool(sick))

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
    """Of one call, for people."""
    if len(requests) == 1:
        return f"episode {_key(requests[0])}"
    return f"episodes {_key(requests[0])} to {_key(requests[-1])}"


def _went_well(said: Summary | RolloutFailed) -> tuple[bool | None, bool | None]:
    """Whether an episode says that its environment actor, and its engine, do their work; None where it says nothing."""
    if not isinstance(said, RolloutFailed):
        return True, True
    bad = said.outcome.kind is UnscoredKind.BAD_DATA
    return (False, None) if said.own else (None, False if bad else None)
