"""Plays and scores the episodes of a group on the pools until each is over.

A group's first attempt is one call (of at most ``environment.episodes_at_once``); an episode
without a result is played again alone, since it may have ended its actor.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from rayloop.actors.handles import Handle
from rayloop.actors.lease import Lease, LeasesEngines
from rayloop.cluster.supervision.calls import (
    Attempted,
    Avoid,
    Played,
    Pools,
    RewardCalls,
    RolloutCalls,
)
from rayloop.cluster.supervision.history import FailureHistory
from rayloop.core import incidents
from rayloop.core.events import Emit
from rayloop.core.failures import Cause, Diverged, Failure, Scope
from rayloop.core.groups import Group, Member, Scored, Unscored
from rayloop.core.types import (
    EndReason,
    RolloutRequest,
    Summary,
    Task,
    TrajectoryId,
    Version,
    derive,
)
from rayloop.measure.controls import RIGHT, Item
from rayloop.rollout.scheduler import ConcurrencyLimit
from rayloop.run.config import RunConfig
from rayloop.run.folder import RolloutRecord, jsonable
from rayloop.run.held_out import Play
from rayloop.run.lifetime import EPISODES, below

T = TypeVar("T")
Begins = Callable[[RolloutRequest], None]
BadData = Callable[[Task, str, str], None]
"""Gets a task, the file at fault and the reason."""
AT_ONCE = 128
"""Episodes of an evaluation that are played at once."""
SPARED = 10
"""Attempts of an episode that are not charged to it, because its actor was ended on account of
another one.
"""
NEVER = Failure(Cause.LOST, Scope.BYSTANDER, retryable=True, why="never played")


@dataclass
class _Episode:
    """An episode until it is ``over``: it was played, or its last ``failure`` stands.

    ``attempt``: the number of the next one; ``paid``: the attempts charged to it; ``doubted``: the
    actors that found its data bad, and their failures.
    """

    request: RolloutRequest
    failure: Failure = NEVER
    played: Played | None = None
    over: bool = False
    attempt: int = 0
    paid: int = 0
    avoid: Avoid = field(default_factory=Avoid)
    doubted: list[tuple[Lease[Any], Failure]] = field(default_factory=list)

    def no_summary(self) -> Summary:
        """The summary of an episode that was not played."""
        nothing, task = Version(0, 0), self.request.task
        return Summary(
            self.request.id,
            max(self.attempt - 1, 0),
            task.id,
            task.source,
            EndReason.ENVIRONMENT_FAILURE,
            length=0,
            sampled_tokens=0,
            turns=0,
            images=0,
            observation_images=0,
            images_consistent=True,
            first_version=nothing,
            last_version=nothing,
        )


class EpisodeRunner:
    """``play`` always returns members: scored, or unscored with the reason.

    It raises only what must end the run. ``playing``: episodes given to ``play`` that are not over.
    ``evaluation``: answers played and asked for, during an evaluation.
    """

    def __init__(
        self,
        config: RunConfig,
        services: Pools,
        driver: Handle[LeasesEngines],
        emit: Emit,
        on_bad_data: BadData | None = None,
        history: FailureHistory | None = None,
    ) -> None:
        self.config, self.services = config, services
        self.reissued = self.playing = 0
        self.evaluation: tuple[int, int] | None = None
        self.admission = ConcurrencyLimit()
        self._emit, self._bad_data = emit, on_bad_data or self.emit_bad_data
        self.history = history or FailureHistory(config.environment)
        self.calls = RolloutCalls(services, driver, config.environment, self.history)
        self.rewards = RewardCalls(config.reward, services, emit)

    def metrics(self) -> dict[str, float]:
        """Episodes played again so far, and the load of the engines."""
        return {"rollout/reissued": float(self.reissued), **self.admission.metrics}

    def emit_bad_data(self, task: Task, path: str, reason: str) -> None:
        """Emit an event, for tasks that are not trained on: their ids mean other tasks than those
        of the training file.
        """
        self._emit(incidents.BadData(task.id, path, why=reason))

    async def play(
        self,
        asked: Sequence[RolloutRequest],
        step: int,
        begins: Begins = lambda request: None,
        bad_data: BadData | None = None,
    ) -> list[Member]:
        """Play and score episodes of one task for step ``step``: each call's episodes at once, or
        all together at the end (``reward.per: group``). ``begins`` is called before each attempt;
        ``bad_data`` replaces ``on_bad_data``.
        """
        parts = [asked] if self.config.reward.per == "group" else self._parts(asked)
        members = await asyncio.gather(
            *(self._play(part, step, begins, bad_data) for part in parts)
        )
        return [member for part in members for member in part]

    async def _play(
        self, asked: Sequence[RolloutRequest], step: int, begins: Begins, bad_data: BadData | None
    ) -> list[Member]:
        self.playing += len(asked)
        try:
            episodes = await self._until_over(asked, begins, bad_data)
            payloads = [episode.played[1] for episode in episodes if episode.played]
            outcomes = iter(
                await self.rewards.score(payloads, asked[0].task, step) if payloads else ()
            )
            return [
                (
                    Member(episode.played[0], next(outcomes), episode.played[1])
                    if episode.played
                    else Member(episode.no_summary(), Unscored.of(episode.failure))
                )
                for episode in episodes
            ]
        finally:
            self.playing -= len(asked)

    def _parts(self, episodes: Sequence[T]) -> list[Sequence[T]]:
        """The episodes of each call."""
        size = self.config.environment.episodes_at_once or len(episodes)
        return [episodes[begin : begin + size] for begin in range(0, len(episodes), size)]

    async def episodes(self, asked: Sequence[RolloutRequest]) -> list[Failure | Played]:
        """The results of episodes of one group, which are not scored."""
        return [
            episode.played or episode.failure
            for episode in await self._until_over(asked, lambda request: None, None)
        ]

    async def _until_over(
        self, asked: Sequence[RolloutRequest], begins: Begins, bad_data: BadData | None
    ) -> list[_Episode]:
        """Play episodes of one group, again elsewhere while infrastructure fails."""
        episodes = [_Episode(request) for request in asked]

        async def together(part: Sequence[_Episode]) -> None:
            lost = await self._attempt(part, begins, bad_data)
            left = [episode for episode in part if not episode.over]
            if (
                lost
            ):  # one of them may have ended their actor, and must not take the others with it again
                for episode in left:
                    await alone(episode)
            else:
                await asyncio.gather(*map(alone, left))

        async def alone(episode: _Episode) -> None:
            while not episode.over:
                await self._attempt([episode], begins, bad_data)

        await asyncio.gather(*map(together, self._parts(episodes)))
        return episodes

    async def _attempt(
        self, episodes: Sequence[_Episode], begins: Begins, bad_data: BadData | None
    ) -> bool:
        """Play these once more, in one call. Returns whether they were lost with their actor."""
        # Other episodes of the group may have hung meanwhile,
        # and each further one costs a whole timeout.
        if hangs := self.history.hangs(episodes[0].request.id.group):
            for episode in episodes:
                episode.failure, episode.over = (
                    Failure(Cause.HUNG, Scope.EPISODE, retryable=False, why=hangs),
                    True,
                )
            return False
        self.reissued += sum(episode.attempt > 0 for episode in episodes)

        # The lease is taken inside: an episode that waits for room holds no actor.
        async with self.admission.room(len(episodes)):
            for episode in episodes:
                # Only here: the weights that begin an episode are those served when it is admitted.
                begins(episode.request)
            requests = [replace(episode.request, attempt=episode.attempt) for episode in episodes]
            answer = await self.calls.play(requests, episodes[0].avoid)

        for episode, result in zip(episodes, answer.results, strict=True):
            episode.attempt += 1
            if isinstance(result, Failure):
                shared = answer.lost and len(episodes) > 1
                self._decide(episode, result, answer, shared, bad_data or self._bad_data)
            else:
                for (
                    lease,
                    former,
                ) in episode.doubted:  # another actor played the task that these could not read
                    if former.of_actor:  # the pool counts the misses of engines
                        self.calls.environment_failed(episode.request, lease, former)
                episode.played, episode.over = result, True
        return answer.lost

    def _decide(
        self, episode: _Episode, failure: Failure, answer: Attempted, shared: bool, report: BadData
    ) -> None:
        """Decide whether an episode is played again.

        An attempt is not charged when another episode ended the actor, or may have (``shared``).
        The same bug on a second actor is not tried a third time. Data is bad when ``_confirmed``.
        Raises Diverged.
        """
        if failure.cause is Cause.DIVERGED:
            raise Diverged(failure.why)

        before, episode.failure = episode.failure, failure
        if bad := failure.cause is Cause.BAD_DATA:
            episode.doubted.append(
                (answer.environment if failure.of_actor else answer.engine, failure)
            )
            if self._confirmed(episode.doubted):
                report(episode.request.task, failure.path, failure.why)
                episode.over = True
                return
            # The second opinion must come from another engine, too.
            episode.avoid.engines.add(answer.engine.slot)
        elif failure.cause is Cause.OVER_LONG:
            episode.over = True
            return

        self._emit(
            incidents.EpisodeFailed(str(episode.request.id), episode.attempt - 1, why=failure.why)
        )
        episode.avoid.environments.add(answer.environment.slot)
        # Bad data is paid for in any case, so that a task which is never confirmed ends.
        episode.paid += bad or not (shared or failure.scope is Scope.BYSTANDER)

        attempts = self.config.environment.attempts
        episode.over = (
            # Two actors have to agree about bad data, even where one attempt is allowed.
            episode.paid >= (max(attempts, 2) if bad else attempts)
            or (not failure.retryable and failure.why == before.why)
            or episode.attempt >= attempts + SPARED
        )

    def _confirmed(self, doubted: Sequence[tuple[Lease[Any], Failure]]) -> bool:
        """Whether two actors found the data bad, on two nodes if there are; one, in a pool of one."""
        services = self.services
        pools = {
            own: services.environment if own else services.rollout
            for own in {f.of_actor for _, f in doubted}
        }
        if len({node for pool in pools.values() for node in pool.homes}) > 1:
            return len({lease.node for lease, _ in doubted}) > 1
        by = {(failure.of_actor, lease.slot) for lease, failure in doubted}
        return len(by) >= min(2, pools[doubted[-1][1].of_actor].size)


async def play(
    asked: Sequence[Play],
    config: RunConfig,
    player: EpisodeRunner,
    step: int,
    keep: Callable[[Item, dict[str, bytes]], None],
    report: Callable[[Member], None],
) -> list[Item]:
    """Play all held-out answers that are ``asked``, outside of the ledger; those of an arm to a
    task are a group. ``keep`` gets each item at once, with its group's images by hash; ``report``
    gets each member, which has the traceback.
    """
    together: dict[tuple[str, str], list[int]] = {}
    for index, one in enumerate(asked):
        together.setdefault((one.arm, one.task.id), []).append(index)

    gate = ConcurrencyLimit(AT_ONCE)
    items: dict[int, Item] = {}

    async def some(indices: Sequence[int]) -> None:
        # Training counts its groups from 1, and the history knows a group by its number.
        group = -1 - indices[0]
        requests = [
            _request(config, asked[index], TrajectoryId(group, n))
            for n, index in enumerate(indices)
        ]
        async with gate.room(len(indices)):
            try:
                members = await player.play(requests, step, bad_data=player.emit_bad_data)
            finally:
                player.history.forget(group)

        for member in members:
            report(member)

        records, images = await player.rewards.describe(
            Group(group, asked[indices[0]].task, tuple(members))
        )
        for number, (index, member) in enumerate(zip(indices, members, strict=True)):
            items[index] = _item(
                asked[index], member, [one for one in records if one.sample == number]
            )
            keep(items[index], images)
        player.evaluation = len(items), len(asked)

    player.evaluation = 0, len(asked)
    try:
        await asyncio.gather(*map(some, together.values()))
    finally:
        player.evaluation = None
    return [items[index] for index in range(len(asked))]


def _request(config: RunConfig, asked: Play, id: TrajectoryId) -> RolloutRequest:
    seed = derive(
        config.seed, "evaluation", asked.task.id, *([asked.sample] if asked.sample else [])
    )
    return RolloutRequest(
        asked.task,
        id,
        0,
        seed,
        asked.sampling,
        episode=dict(below(config.evaluation.over, EPISODES)),
    )


def _item(asked: Play, member: Member, records: Sequence[RolloutRecord]) -> Item:
    scored = member.outcome if isinstance(member.outcome, Scored) else None
    return Item(
        asked.arm,
        asked.task.id,
        asked.task.source,
        asked.sample,
        reward=scored.value if scored else None,
        components=scored.components if scored else {},
        unscored=(
            None
            if isinstance(member.outcome, Scored)
            else f"{member.outcome.kind}: {member.outcome.reason}"
        ),
        text="\n".join(turn.text for record in records for turn in record.turns if turn.sampled),
        truth=jsonable(asked.task.ground_truth),
        images=tuple(image for record in records for image in record.images),
        cut=member.summary.cut and member.summary.end_reason is not EndReason.OVER_LENGTH,
        turns=(
            tuple(turn for record in records for turn in record.turns) if asked.arm == RIGHT else ()
        ),
    )
