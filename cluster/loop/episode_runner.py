"""Plays and scores one trajectory on the pools, whatever dies meanwhile. Training, evaluation and probes share it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import ray

from actors.environment import EnvironmentActor
from actors.handles import Handle, resolved, submit_pair
from actors.lease import Lease, LeasesEngines
from actors.lost import brief, is_lost, is_spent, object_lost
from actors.reward import RewardActor
from actors.rollout import RolloutActor
from cluster.roles.pool import ATTEMPTS, Calls
from cluster.roles.services import Services
from rayloop.core import incidents
from rayloop.core.deadlines import with_deadline
from rayloop.core.events import Tell
from rayloop.core.failures import WorkerLost
from rayloop.core.groups import Group, Member, Outcome, PlayFailed, Unscored, UnscoredKind
from rayloop.core.references import Ref
from rayloop.core.types import EndReason, PlayRequest, Summary, Task, Trajectory, Version
from rayloop.production.blame import Blame
from rayloop.production.concurrency import ConcurrencyLimit
from rayloop.run.config import RunConfig
from rayloop.run.folder import RolloutRecord

R = TypeVar("R")
BadData = Callable[[Task, str, str], None]
"""What is told of a task, the file at fault and the reason."""
SPARED = 10
"""Times that an episode is played again because its actor was ended on account of another one, before it is given up."""


@dataclass
class _Avoid:
    """Slots on which an episode failed already."""

    environments: set[int] = field(default_factory=set)
    engines: set[int] = field(default_factory=set)


class EpisodeRunner:
    """``play`` always returns a member: scored, or unscored with the reason. It raises only what must end the run."""

    def __init__(
        self,
        config: RunConfig,
        services: Services,
        driver: Handle[LeasesEngines],
        tell: Tell,
        on_bad_data: BadData | None = None,
        blame: Blame | None = None,
    ) -> None:
        self.config, self.services = config, services
        self.reissued = 0
        self.playing = 0
        """Calls of ``play`` under way."""
        self.evaluation: tuple[int, int] | None = None
        """Answers there and asked for, during an evaluation."""
        self.admission = ConcurrencyLimit()
        self._driver, self._tell, self._bad_data = driver, tell, on_bad_data or self.tell_bad_data
        self._engines: dict[str, int] = {}
        self.blame = blame or Blame(config.environment)

    def metrics(self) -> dict[str, float]:
        return {"rollout/reissued": float(self.reissued), **self.admission.metrics}

    def tell_bad_data(self, task: Task, path: str, reason: str) -> None:
        """An event, for tasks that nobody trains on: their ids say nothing about tasks of the training file."""
        self._tell(incidents.BadData(task.id, path, why=reason))

    async def play(
        self,
        request: PlayRequest,
        step: int,
        begins: Callable[[], None] = lambda: None,
        bad_data: BadData | None = None,
    ) -> Member:
        """Play and score. ``step`` is the step that the trajectory is meant for; ``begins`` is called at each attempt, when the
        episode is let into the engines: no token of it was sampled before; ``bad_data`` instead of ``on_bad_data``."""
        self.playing += 1
        try:
            played = await self.episode(request, begins, bad_data)
            if isinstance(played, PlayFailed):
                return Member(_no_summary(request, played), played.outcome)
            summary, payload = played
            return Member(summary, await self.score(payload, request, step), payload)
        finally:
            self.playing -= 1

    async def play_together(
        self,
        asked: Sequence[PlayRequest],
        step: int,
        begins: Callable[[PlayRequest], None] = lambda request: None,
        bad_data: BadData | None = None,
    ) -> list[Member]:
        """Play several episodes of one task, and score them at once when the last has ended (``reward.per: group``).

        Those that could not be played have no part in it.
        """
        self.playing += len(asked)
        try:
            played = await asyncio.gather(*(self.episode(r, partial(begins, r), bad_data) for r in asked))
            payloads = [one[1] for one in played if not isinstance(one, PlayFailed)]
            outcomes = iter(await self.score_group(payloads, asked[0].task, step) if payloads else ())
            return [
                Member(_no_summary(request, one), one.outcome)
                if isinstance(one, PlayFailed)
                else Member(one[0], next(outcomes), one[1])
                for request, one in zip(asked, played, strict=True)
            ]
        finally:
            self.playing -= len(asked)

    async def episode(
        self, request: PlayRequest, begins: Callable[[], None] = lambda: None, bad_data: BadData | None = None
    ) -> PlayFailed | tuple[Summary, Ref[Trajectory]]:
        """Play again elsewhere while infrastructure fails. A re-issue keeps sample index and seed; its attempt grows.

        Only what failed by itself is one of ``environment.attempts``; the same bug on a second actor is not tried a third time, and
        nothing more is once too many episodes of the group hung. Bad data is what two actors say; what one alone says is held
        against that actor when another one plays the task.
        """
        failed = PlayFailed(request.id, request.attempt, Unscored(UnscoredKind.ENVIRONMENT_FAILURE, "never played"))
        avoid = _Avoid()
        doubted: list[tuple[Lease[Any], PlayFailed]] = []
        attempts, paid, before = self.config.environment.attempts, 0, ""
        for attempt in range(attempts + SPARED):
            if hangs := self.blame.hangs(request.id.group):
                return dataclasses.replace(failed, outcome=Unscored(UnscoredKind.ENVIRONMENT_FAILURE, hangs))
            self.reissued += attempt > 0
            async with self.admission.room():
                begins()
                lease, engine, result = await self._play_once(dataclasses.replace(request, attempt=attempt), avoid)
            if not isinstance(result, PlayFailed):
                self._refuted(request, doubted)
                return result
            failed, why = result, result.outcome.reason
            if bad := failed.outcome.kind is UnscoredKind.BAD_DATA:
                doubted.append((lease if failed.own else engine, failed))
                if self._confirmed(doubted):
                    (bad_data or self._bad_data)(request.task, failed.path, why)
                    break
                avoid.engines.add(engine.slot)
            elif failed.outcome.kind is not UnscoredKind.ENVIRONMENT_FAILURE:
                break
            self._tell(incidents.EpisodeFailed(str(request.id), attempt, why=why))
            avoid.environments.add(lease.slot)
            paid += failed.own or bad or lease.worker not in self.services.environment.ended
            if paid >= (max(attempts, 2) if bad else attempts) or (failed.bug and why == before):
                break
            before = why
        return failed

    async def _play_once(
        self, request: PlayRequest, avoid: _Avoid
    ) -> tuple[Lease[EnvironmentActor], Lease[RolloutActor], PlayFailed | tuple[Summary, Ref[Trajectory]]]:
        """On an environment actor and an engine whose slots are not ones to ``avoid``, if there are others; both, and what came of
        it."""
        environments, key, affinity = (
            self.services.environment,
            f"{request.id}@{request.attempt}",
            str(request.id.group),
        )
        lease = await environments.lease(avoid=avoid.environments)
        try:
            engine = await self.services.rollout.lease(affinity, avoid.engines)
        except BaseException:
            environments.release(lease.worker)
            raise
        self._engines[key] = engine.worker
        self.blame.begins(request.id.group, lease.worker)
        result, payload = submit_pair(lease.handle, EnvironmentActor.play, request, engine, self._driver)
        well, served = None, None
        try:
            what = f"episode {key} of task {request.task.id} on {environments.name(lease)}"
            summary = await with_deadline(self.config.environment.episode_timeout, result, what, lease.handle)
            well, served = _went_well(summary)
        except asyncio.CancelledError:
            ray.cancel(result)
            raise
        except Exception as error:
            if not is_lost(error):
                raise
            return lease, engine, self._lost(request, lease, error)
        finally:
            environments.release(lease.worker, well=well)
            self.services.rollout.release(self._engines.pop(key), affinity, served)
        if not isinstance(summary, PlayFailed):
            self.blame.succeeded(lease.worker)
            return lease, engine, (summary, cast(Ref[Trajectory], payload))  # one that was played has a payload
        if summary.own and summary.outcome.kind is UnscoredKind.ENVIRONMENT_FAILURE:
            self._environment_failed(request, lease, summary)
        return lease, engine, summary

    def _confirmed(self, doubted: Sequence[tuple[Lease[Any], PlayFailed]]) -> bool:
        """Whether as many actors found the data bad as can be asked, up to two."""
        by = {(failed.own, lease.slot) for lease, failed in doubted}
        pool = self.services.environment if doubted[-1][1].own else self.services.rollout
        return len(by) >= min(2, pool.size)

    def _refuted(self, request: PlayRequest, doubted: Sequence[tuple[Lease[Any], PlayFailed]]) -> None:
        """Another actor played a task whose data these found bad. Engines have their misses in the pool."""
        for lease, failed in doubted:
            if failed.own:
                self._environment_failed(request, lease, failed)

    def _lost(self, request: PlayRequest, lease: Lease[Any], error: Exception) -> PlayFailed:
        """The episode's actor is gone. It was the episode's own doing unless it was ended because of another one."""
        pool, why = self.services.environment, f"the environment actor was lost: {brief(error)}"
        if is_spent(error):
            pool.retire(lease.worker, brief(error))
        own = lease.worker not in pool.ended
        outcome, hung = Unscored(UnscoredKind.ENVIRONMENT_FAILURE, why), isinstance(error, WorkerLost)
        failed = PlayFailed(request.id, request.attempt, outcome, own=own, hung=hung)
        if own:
            self._environment_failed(request, lease, failed)
            pool.lost(lease.worker, error)
        return failed

    def _environment_failed(self, request: PlayRequest, lease: Lease[Any], failed: PlayFailed) -> None:
        """Replace the actor when its process holds a call that hangs, or when the failure is the actor's own."""
        pool, why, ids = self.services.environment, failed.outcome.reason, (request.id.group, request.task.id)
        sick = self.blame.failed(*ids, lease.worker, lease.slot, why, hung=failed.hung, contained=failed.contained)
        if (failed.hung and not failed.contained) or sick:
            pool.retire(lease.worker, sick or why, charged=bool(sick))

    async def replace_engine(self, episode: str, lost: int, why: str) -> Lease[RolloutActor]:
        """A request of an episode failed on engine ``lost``: take it out of service, lease another for the episode."""
        pool = self.services.rollout
        pool.lost(lost, f"a request of episode {episode} failed: {why}")
        affinity = episode.partition("/")[0]
        lease = await pool.lease(affinity)
        if episode in self._engines:
            self._engines[episode] = lease.worker
        else:  # the episode was cancelled meanwhile
            pool.release(lease.worker, affinity)
        return lease

    async def score(self, payload: Ref[Trajectory], request: PlayRequest, step: int) -> Outcome:
        """Ask the reward pool. A dead reward actor, a lost payload or a deadline is never a number; an actor around which something
        fails (a full disk) has not the last word."""
        asked = self._reward().call(RewardActor.score, resolved(payload), request.task, step)
        return await _or_unscored(asked)

    async def score_group(self, payloads: Sequence[Ref[Trajectory]], task: Task, step: int) -> list[Outcome]:
        """The same for what is scored together: one outcome per payload. A lost payload costs the others nothing."""
        found = await _or_unscored(self._reward().call(RewardActor.score_group, list(payloads), task, step))
        return [found] * len(payloads) if isinstance(found, Unscored) else found

    def _reward(self) -> Calls[RewardActor]:
        c = self.config.reward
        return self.services.reward.within(2 * c.timeout + 10, ATTEMPTS, _unavailable)

    async def describe(self, group: Group) -> tuple[list[RolloutRecord], dict[str, bytes]]:
        """Records and images of a group's trajectories, for ``rollouts/``. Nothing when the payloads are gone."""
        members = [m for m in group.members if m.payload is not None]
        bare = dataclasses.replace(
            group, members=tuple(dataclasses.replace(m, payload=None, reference=None) for m in members)
        )
        c = self.config.reward
        try:
            reward = self.services.reward.within(c.timeout, ATTEMPTS)
            return await reward.call(RewardActor.describe, bare, *(resolved(m.payload) for m in members if m.payload))
        except Exception as error:
            if not isinstance(error, WorkerLost) and not object_lost(error):
                raise
            self._tell(incidents.RolloutsNotWritten(group.issue, why=brief(error)))
            return [], {}


def _went_well(summary: Summary | PlayFailed) -> tuple[bool | None, bool | None]:
    """Whether an episode says that its environment actor, and its engine, do their work; None where it says nothing."""
    if not isinstance(summary, PlayFailed):
        return True, True
    bad = summary.outcome.kind is UnscoredKind.BAD_DATA
    return (False, None) if summary.own else (None, False if bad else None)


async def _or_unscored(call: Coroutine[Any, Any, R]) -> R | Unscored:
    """What a reward actor answers, or why nothing is scored."""
    try:
        return await call
    except WorkerLost as error:
        return Unscored(UnscoredKind.REWARD_UNAVAILABLE, str(error))
    except Exception as error:
        if object_lost(error):
            return Unscored(UnscoredKind.PAYLOAD_LOST, brief(error))
        raise


def _unavailable(answer: Outcome | list[Outcome]) -> bool:
    outcomes = answer if isinstance(answer, list) else [answer]
    return any(isinstance(o, Unscored) and o.kind is UnscoredKind.REWARD_UNAVAILABLE for o in outcomes)


def _no_summary(request: PlayRequest, failed: PlayFailed) -> Summary:
    """The summary of an episode that produced nothing."""
    nothing = Version(0, 0)
    return Summary(
        request.id, failed.attempt, request.task.id, request.task.source, EndReason.ENVIRONMENT_FAILURE,
        length=0, sampled_tokens=0, turns=0, images=0, observation_images=0, images_consistent=True,
        first_version=nothing, last_version=nothing,
    )  # fmt: skip
