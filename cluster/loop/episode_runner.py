"""Plays and scores the episodes of a group on the pools, whatever dies meanwhile. Training, evaluation and probes share it.

The first attempt of a group is one call (of at most ``environment.episodes_at_once``). An episode that it left without a result is
played again by itself: so one that ends its actor takes the others of its group with it once, and no more."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rayloop.actors.handles import Handle
from rayloop.actors.lease import Lease, LeasesEngines
from rayloop.actors.rollout import RolloutActor
from rayloop.cluster.loop.calls import Answer, Avoid, Played, RolloutCalls
from rayloop.cluster.loop.scoring import Scoring
from rayloop.cluster.roles.services import Services
from rayloop.core import incidents
from rayloop.core.events import Emit
from rayloop.core.groups import Group, Member, RolloutFailed, Unscored, UnscoredKind
from rayloop.core.types import EndReason, RolloutRequest, Summary, Task, Version
from rayloop.rollout.blame import Blame
from rayloop.rollout.concurrency import ConcurrencyLimit
from rayloop.run.config import RunConfig
from rayloop.run.folder import RolloutRecord

T = TypeVar("T")
Begins = Callable[[RolloutRequest], None]
BadData = Callable[[Task, str, str], None]
"""What is told of a task, the file at fault and the reason."""
SPARED = 10
"""Times that an episode is played again because its actor was ended on account of another one, before it is given up."""


@dataclass
class _Episode:
    """An episode until it is ``over``: it was played, or ``failed`` for good. ``attempt``: the number of the next one; ``paid``:
    those that it has to answer for; ``doubted``: who said that its data is bad, and what."""

    request: RolloutRequest
    failed: RolloutFailed
    played: Played | None = None
    over: bool = False
    attempt: int = 0
    paid: int = 0
    avoid: Avoid = field(default_factory=Avoid)
    doubted: list[tuple[Lease[Any], RolloutFailed]] = field(default_factory=list)

    def next(self) -> RolloutRequest:
        """Of the next attempt: it keeps sample index and seed."""
        return dataclasses.replace(self.request, attempt=self.attempt)


class EpisodeRunner:
    """``play`` always returns members: scored, or unscored with the reason. It raises only what must end the run."""

    def __init__(
        self,
        config: RunConfig,
        services: Services,
        driver: Handle[LeasesEngines],
        emit: Emit,
        on_bad_data: BadData | None = None,
        blame: Blame | None = None,
    ) -> None:
        self.config, self.services = config, services
        self.reissued = 0
        self.playing = 0
        """Episodes that ``play`` was asked for and has not given back."""
        self.evaluation: tuple[int, int] | None = None
        """Answers there and asked for, during an evaluation."""
        self.admission = ConcurrencyLimit()
        self._emit, self._bad_data = emit, on_bad_data or self.emit_bad_data
        self.blame = blame or Blame(config.environment)
        self._calls = RolloutCalls(services, driver, config.environment.episode_timeout, self.blame)
        self._scoring = Scoring(config.reward, services, emit)

    def metrics(self) -> dict[str, float]:
        return {"rollout/reissued": float(self.reissued), **self.admission.metrics}

    def emit_bad_data(self, task: Task, path: str, reason: str) -> None:
        """An event, for tasks that nobody trains on: their ids say nothing about tasks of the training file."""
        self._emit(incidents.BadData(task.id, path, why=reason))

    async def play(
        self, asked: Sequence[RolloutRequest], step: int, begins: Begins = lambda request: None, bad_data: BadData | None = None
    ) -> list[Member]:
        """Play and score episodes of one group, which have one task. ``step`` is the one that they are meant for; ``begins`` is
        called at each attempt, when the episode is let into the engines: no token of it was sampled before; ``bad_data`` instead
        of ``on_bad_data``.

        What one call played is scored at once; with ``reward.per: group`` all, when the last has ended. Episodes that could not be
        played have no part in it.
        """
        parts = [asked] if self.config.reward.per == "group" else self._parts(asked)
        members = await asyncio.gather(*(self._play(part, step, begins, bad_data) for part in parts))
        return [member for part in members for member in part]

    async def _play(self, asked: Sequence[RolloutRequest], step: int, begins: Begins, bad_data: BadData | None) -> list[Member]:
        self.playing += len(asked)
        try:
            played = await self.episodes(asked, begins, bad_data)
            payloads = [one[1] for one in played if not isinstance(one, RolloutFailed)]
            outcomes = iter(await self._scoring.score(payloads, asked[0].task, step) if payloads else ())
            return [
                Member(_no_summary(request, one), one.outcome)
                if isinstance(one, RolloutFailed)
                else Member(one[0], next(outcomes), one[1])
                for request, one in zip(asked, played, strict=True)
            ]
        finally:
            self.playing -= len(asked)

    def _parts(self, episodes: Sequence[T]) -> list[Sequence[T]]:
        """Those that one call plays, each."""
        size = self.config.environment.episodes_at_once or len(episodes)
        return [episodes[begin : begin + size] for begin in range(0, len(episodes), size)]

    # Attempts ------------------------------------------------------------------------------------------------------

    async def episodes(
        self, asked: Sequence[RolloutRequest], begins: Begins = lambda request: None, bad_data: BadData | None = None
    ) -> list[RolloutFailed | Played]:
        """What becomes of episodes of one group: played, if need be again elsewhere while infrastructure fails."""
        never = Unscored(UnscoredKind.ENVIRONMENT_FAILURE, "never played")
        episodes = [_Episode(request, RolloutFailed(request.id, 0, never)) for request in asked]

        async def together(part: Sequence[_Episode]) -> None:
            lost = await self._attempt(part, begins, bad_data)
            left = [episode for episode in part if not episode.over]
            if lost:  # one of them may have ended their actor: it shall not do that to the others again
                for episode in left:
                    await alone(episode)
            else:
                await asyncio.gather(*map(alone, left))

        async def alone(episode: _Episode) -> None:
            while not episode.over:
                await self._attempt([episode], begins, bad_data)

        await asyncio.gather(*map(together, self._parts(episodes)))
        return [episode.played or episode.failed for episode in episodes]

    async def _attempt(self, episodes: Sequence[_Episode], begins: Begins, bad_data: BadData | None) -> bool:
        """Play these once more, in one call. Returns whether they were lost with their actor."""
        if hangs := self.blame.hangs(episodes[0].request.id.group):
            given_up = Unscored(UnscoredKind.ENVIRONMENT_FAILURE, hangs)
            for episode in episodes:
                episode.failed, episode.over = dataclasses.replace(episode.failed, outcome=given_up), True
            return False
        self.reissued += sum(episode.attempt > 0 for episode in episodes)
        async with self.admission.room(len(episodes)):
            for episode in episodes:
                begins(episode.request)
            answer = await self._calls.play([episode.next() for episode in episodes], episodes[0].avoid)
        for episode, result in zip(episodes, answer.results, strict=True):
            episode.attempt += 1
            if isinstance(result, RolloutFailed):
                shared = answer.lost and len(episodes) > 1
                self._failed(episode, result, answer, shared, bad_data or self._bad_data)
            else:
                self._refuted(episode)
                episode.played, episode.over = result, True
        return answer.lost

    def _failed(self, episode: _Episode, failed: RolloutFailed, answer: Answer, shared: bool, emit: BadData) -> None:
        """Decide whether an episode is played again. Its attempts are limited by ``environment.attempts``.

        It does not pay for one that was ended on account of another episode, or lost with an actor that any of its call may have
        ended (``shared``). The same bug on a second actor is not tried a third time. Bad data is what two actors say, on
        two nodes if there are; what one alone says is held against that actor when another one plays the task.
        """
        before, episode.failed, why = episode.failed, failed, failed.outcome.reason
        if bad := failed.outcome.kind is UnscoredKind.BAD_DATA:
            episode.doubted.append((answer.environment if failed.own else answer.engine, failed))
            if self._confirmed(episode.doubted):
                emit(episode.request.task, failed.path, why)
                episode.over = True
                return
            episode.avoid.engines.add(answer.engine.slot)
        elif failed.outcome.kind is not UnscoredKind.ENVIRONMENT_FAILURE:
            episode.over = True
            return
        self._emit(incidents.EpisodeFailed(str(episode.request.id), failed.attempt, why=why))
        episode.avoid.environments.add(answer.environment.slot)
        spared = not failed.own and answer.environment.worker in self.services.environment.ended
        episode.paid += bad or not (spared or shared)
        attempts = self.config.environment.attempts
        episode.over = (
            episode.paid >= (max(attempts, 2) if bad else attempts)
            or (failed.bug and why == before.outcome.reason)
            or episode.attempt >= attempts + SPARED
        )

    def _confirmed(self, doubted: Sequence[tuple[Lease[Any], RolloutFailed]]) -> bool:
        """Whether as many actors found the data bad as can be asked, up to two; on two nodes, where those roles are on several."""
        pools = {own: self.services.environment if own else self.services.rollout for own in {f.own for _, f in doubted}}
        if len({node for pool in pools.values() for node in pool.homes}) > 1:
            return len({lease.node for lease, _ in doubted}) > 1
        by = {(failed.own, lease.slot) for lease, failed in doubted}
        return len(by) >= min(2, pools[doubted[-1][1].own].size)

    def _refuted(self, episode: _Episode) -> None:
        """Another actor played a task whose data these found bad. Engines have their misses in the pool."""
        for lease, failed in episode.doubted:
            if failed.own:
                self._calls.environment_failed(episode.request, lease, failed)

    async def replace_engine(self, episode: str, lost: int, why: str) -> Lease[RolloutActor]:
        """A request of an episode failed on engine ``lost``: take it out of service, lease another for the episode."""
        return await self._calls.replace_engine(episode, lost, why)

    async def describe(self, group: Group) -> tuple[list[RolloutRecord], dict[str, bytes]]:
        """Records and images of a group's trajectories, for ``rollouts/``. Nothing when the payloads are gone."""
        return await self._scoring.describe(group)


def _no_summary(request: RolloutRequest, failed: RolloutFailed) -> Summary:
    """The summary of an episode that produced nothing."""
    nothing = Version(0, 0)
    return Summary(
        request.id, failed.attempt, request.task.id, request.task.source, EndReason.ENVIRONMENT_FAILURE,
        length=0, sampled_tokens=0, turns=0, images=0, observation_images=0, images_consistent=True,
        first_version=nothing, last_version=nothing,
    )  # fmt: skip
