"""Plays and scores one trajectory on the pools, whatever dies meanwhile. Training, evaluation and probes share it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import ray

from actors.lease import Lease
from actors.lost import object_lost
from cluster.admission import Admission
from cluster.config import RunConfig
from cluster.pool import brief, is_lost
from cluster.services import Services
from cluster.waits import within
from rayloop.core.failures import WorkerLost
from rayloop.core.runfolder import RolloutRecord
from rayloop.core.seeds import derive
from rayloop.core.types import (
    EndReason,
    Group,
    Member,
    Outcome,
    PlayFailed,
    PlayRequest,
    Summary,
    Task,
    TrajectoryId,
    Unscored,
    UnscoredKind,
    Version,
)


def requests(config: RunConfig, task: Task, ids: Sequence[TrajectoryId], visit: int) -> list[PlayRequest]:
    """The episodes of one group: what each samples follows from the run's seed, the task, the sample and the visit."""
    sampling = config.rollout.sampling.sampling()
    cohort = len(ids) if config.rollout.deterministic else None
    return [PlayRequest(task, i, 0, derive(config.seed, task.id, i.sample, visit), sampling, cohort) for i in ids]


class Player:
    """``play`` always returns a member: scored, or unscored with the reason. It raises only what must end the run."""

    def __init__(
        self,
        config: RunConfig,
        services: Services,
        driver: Any,
        on_event: Callable[..., None],
        on_bad_data: Callable[[Task, str, str], None],
    ) -> None:
        self.config, self.services = config, services
        self.reissued = 0
        self.playing = 0
        """Calls of ``play`` under way."""
        self.evaluation: tuple[int, int] | None = None
        """Answers there and asked for, during an evaluation."""
        self.admission = Admission()
        self._driver, self._event, self._bad_data = driver, on_event, on_bad_data
        self._engines: dict[str, int] = {}

    def metrics(self) -> dict[str, float]:
        return {"rollout/reissued": float(self.reissued), **self.admission.metrics}

    async def play(self, request: PlayRequest, step: int, begins: Callable[[], None] = lambda: None) -> Member:
        """Play and score. ``step`` is the step that the trajectory is meant for; ``begins`` is called at each attempt, when the
        episode is let into the engines: no token of it was sampled before."""
        self.playing += 1
        try:
            played = await self.episode(request, begins)
            if isinstance(played, PlayFailed):
                return Member(_no_summary(request, played), played.outcome)
            summary, payload = played
            return Member(summary, await self.score(payload, request, step), payload)
        finally:
            self.playing -= 1

    async def episode(
        self, request: PlayRequest, begins: Callable[[], None] = lambda: None
    ) -> PlayFailed | tuple[Summary, Any]:
        """Play again elsewhere while infrastructure fails. A re-issue keeps sample index and seed; its attempt grows."""
        failed = PlayFailed(request.id, request.attempt, Unscored(UnscoredKind.ENVIRONMENT_FAILURE, "never played"))
        for attempt in range(self.config.environment.attempts):
            self.reissued += attempt > 0
            async with self.admission.room():
                begins()
                result = await self._play_once(dataclasses.replace(request, attempt=attempt))
            if not isinstance(result, PlayFailed):
                return result
            failed = result
            if failed.outcome.kind is UnscoredKind.BAD_DATA:
                self._bad_data(request.task, failed.path, failed.outcome.reason)
            if failed.outcome.kind is not UnscoredKind.ENVIRONMENT_FAILURE:
                break
            self._event("episode_failed", trajectory=str(request.id), attempt=attempt, why=failed.outcome.reason)
        return failed

    async def _play_once(self, request: PlayRequest) -> PlayFailed | tuple[Summary, Any]:
        environments, key, affinity = (
            self.services.environment,
            f"{request.id}@{request.attempt}",
            str(request.id.group),
        )
        environment = await environments.lease()
        try:
            engine = await self.services.rollout.lease(affinity)
        except BaseException:
            environments.release(environment.worker)
            raise
        self._engines[key] = engine.worker
        result, payload = environment.handle.play.options(num_returns=2).remote(request, engine, self._driver)
        try:
            what = f"episode {key} of task {request.task.id} on {environments.name(environment)}"
            summary = await within(self.config.environment.episode_timeout, result, what, environment.handle)
        except asyncio.CancelledError:
            ray.cancel(result)
            raise
        except Exception as error:
            if not is_lost(error):
                raise
            environments.lost(environment.worker, error)
            reason = Unscored(UnscoredKind.ENVIRONMENT_FAILURE, f"the environment actor was lost: {brief(error)}")
            return PlayFailed(request.id, request.attempt, reason)
        finally:
            environments.release(environment.worker)
            self.services.rollout.release(self._engines.pop(key), affinity)
        if isinstance(summary, PlayFailed):
            if summary.hung:
                environments.lost(environment.worker, summary.outcome.reason)
            return summary
        return summary, payload

    async def replace_engine(self, episode: str, lost: int, why: str) -> Lease:
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

    async def score(self, payload: Any, request: PlayRequest, step: int) -> Outcome:
        """Ask the reward pool. A dead reward actor, a lost payload or a deadline is never a number."""
        c = self.config.reward
        try:
            outcome: Outcome = await self.services.reward.call(
                "score", payload, request.task, step, deadline=2 * c.timeout + 10, attempts=c.attempts
            )
        except WorkerLost as error:
            return Unscored(UnscoredKind.REWARD_UNAVAILABLE, str(error))
        except Exception as error:
            if object_lost(error):
                return Unscored(UnscoredKind.PAYLOAD_LOST, brief(error))
            raise
        return outcome

    async def describe(self, group: Group) -> tuple[list[RolloutRecord], dict[str, bytes]]:
        """Records and images of a group's trajectories, for ``rollouts/``. Nothing when the payloads are gone."""
        members = [m for m in group.members if m.payload is not None]
        bare = dataclasses.replace(
            group, members=tuple(dataclasses.replace(m, payload=None, reference=None) for m in members)
        )
        c = self.config.reward
        try:
            found: tuple[list[RolloutRecord], dict[str, bytes]] = await self.services.reward.call(
                "describe", bare, *(m.payload for m in members), deadline=c.timeout, attempts=c.attempts
            )
        except Exception as error:
            if not isinstance(error, WorkerLost) and not object_lost(error):
                raise
            self._event("rollouts_not_written", group=group.issue, why=brief(error))
            return [], {}
        return found


def _no_summary(request: PlayRequest, failed: PlayFailed) -> Summary:
    """The summary of an episode that produced nothing."""
    nothing = Version(0, 0)
    return Summary(
        request.id, failed.attempt, request.task.id, request.task.source, EndReason.ENVIRONMENT_FAILURE,
        length=0, sampled_tokens=0, turns=0, images=0, observation_images=0, images_consistent=True,
        first_version=nothing, last_version=nothing,
    )  # fmt: skip
