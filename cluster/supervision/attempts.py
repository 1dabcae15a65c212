"""Plays and scores the episodes of a group on the pools until each is over.

A group's first attempt is one call (of at most ``environment.episodes_at_once``); an episode
without a result is played again in its own call, since it may have ended its actor.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
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
from rayloop.cluster.supervision.pool import Pool
from rayloop.core import incidents
from rayloop.core.events import Emit
from rayloop.core.failures import Cause, Diverged, Failure, Scope
from rayloop.core.groups import Group, Member, Outcome, Scored, Unscored
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
from rayloop.run.held_out import Play
from rayloop.run.lifetime import EPISODES, below
from rayloop.run.records.rollouts import RolloutRecord, jsonable

T = TypeVar("T")
Begins = Callable[[RolloutRequest], None]
BadData = Callable[[Task, str, str], None]
"""Gets a task, the file at fault and the reason."""
EVALUATION_EPISODES_AT_ONCE = 128
"""Episodes of an evaluation that are played at once."""
FREE_ATTEMPTS = 10
"""Attempts of an episode that are not charged to it: another episode ended its actor."""
NEVER = Failure(Cause.LOST, Scope.BYSTANDER, retryable=True, why="never played")


@dataclass
class _Episode:
    """An episode until it is ``over``: it was played, or its last ``failure`` stands.

    ``attempt``: the number of the next attempt; ``paid``: the attempts charged to the episode;
    ``doubted``: the actors that found its data bad, and their failures.
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
        task = self.request.task
        no_version = Version(0, 0)
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
            first_version=no_version,
            last_version=no_version,
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
        self.config = config
        self.services = services
        self.reissued = 0
        self.playing = 0
        self.evaluation: tuple[int, int] | None = None
        self.admission = ConcurrencyLimit()
        self._emit = emit
        self._bad_data = on_bad_data or self.emit_bad_data
        self.history = history or FailureHistory(config.environment)
        self.calls = RolloutCalls(services, driver, config.environment, self.history)
        self.rewards = RewardCalls(config.reward, services, emit)

    def metrics(self) -> dict[str, float]:
        """Episodes played again so far, and the load of the engines."""
        return {"rollout/reissued": float(self.reissued), **self.admission.metrics}

    def emit_bad_data(self, task: Task, path: str, reason: str) -> None:
        """Emit an event, for tasks that are not trained on.

        Their ids mean other tasks than the same ids of the training file.
        """
        self._emit(incidents.BadData(task.id, path, why=reason))

    async def play(
        self,
        asked: Sequence[RolloutRequest],
        step: int,
        begins: Begins = lambda request: None,
        bad_data: BadData | None = None,
    ) -> list[Member]:
        """Play and score episodes of one task for step ``step``.

        Each call's episodes are scored at once, or all together at the end (``reward.per: group``).
        ``begins`` is called before each attempt; ``bad_data`` replaces ``on_bad_data``.
        """
        parts = [asked] if self.config.reward.per == "group" else self._parts(asked)
        members_by_part = await asyncio.gather(
            *(self._play(part, step, begins, bad_data) for part in parts)
        )
        return list(chain.from_iterable(members_by_part))

    async def _play(
        self,
        requests: Sequence[RolloutRequest],
        step: int,
        begins: Begins,
        bad_data: BadData | None,
    ) -> list[Member]:
        self.playing += len(requests)
        try:
            episodes = await self._until_over(requests, begins, bad_data)
            payloads = [episode.played[1] for episode in episodes if episode.played]
            scores: Sequence[Outcome] = ()
            if payloads:
                scores = await self.rewards.score(payloads, requests[0].task, step)
            remaining_scores = iter(scores)

            members = []
            for episode in episodes:
                if episode.played:
                    summary, payload = episode.played
                    members.append(Member(summary, next(remaining_scores), payload))
                else:
                    outcome = Unscored.of(episode.failure)
                    members.append(Member(episode.no_summary(), outcome))
            return members
        finally:
            self.playing -= len(requests)

    def _parts(self, episodes: Sequence[T]) -> list[Sequence[T]]:
        """The episodes of each call."""
        size = self.config.environment.episodes_at_once or len(episodes)
        return [episodes[begin : begin + size] for begin in range(0, len(episodes), size)]

    async def episodes(self, asked: Sequence[RolloutRequest]) -> list[Failure | Played]:
        """The results of episodes of one group, which are not scored."""
        episodes = await self._until_over(asked, lambda request: None, None)
        return [episode.played or episode.failure for episode in episodes]

    async def _until_over(
        self, requests: Sequence[RolloutRequest], begins: Begins, bad_data: BadData | None
    ) -> list[_Episode]:
        """Play episodes of one group, again on other actors while infrastructure fails."""
        episodes = [_Episode(request) for request in requests]

        async def play_in_one_call(part: Sequence[_Episode]) -> None:
            lost = await self._attempt(part, begins, bad_data)
            unfinished = [episode for episode in part if not episode.over]
            if lost:
                # One of them may have ended their actor, and must not end the others again.
                for episode in unfinished:
                    await play_by_itself(episode)
            else:
                await asyncio.gather(*map(play_by_itself, unfinished))

        async def play_by_itself(episode: _Episode) -> None:
            while not episode.over:
                await self._attempt([episode], begins, bad_data)

        await asyncio.gather(*map(play_in_one_call, self._parts(episodes)))
        return episodes

    async def _attempt(
        self, episodes: Sequence[_Episode], begins: Begins, bad_data: BadData | None
    ) -> bool:
        """Play these episodes once more, in one call.

        Returns whether they were lost with their actor.
        """
        # Other episodes of the group may have hung by now,
        # and each further one costs a whole timeout.
        reason = self.history.hangs(episodes[0].request.id.group)
        if reason:
            for episode in episodes:
                episode.failure = Failure(Cause.HUNG, Scope.EPISODE, retryable=False, why=reason)
                episode.over = True
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
                continue
            # Another actor played the task that these actors could not read.
            # The pool itself counts the misses of engines.
            for lease, failure in episode.doubted:
                if failure.of_actor:
                    self.calls.environment_failed(episode.request, lease, failure)
            episode.played = result
            episode.over = True
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

        previous = episode.failure
        episode.failure = failure
        is_bad_data = failure.cause is Cause.BAD_DATA
        if is_bad_data:
            actor = answer.environment if failure.of_actor else answer.engine
            episode.doubted.append((actor, failure))
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
        # Bad data is charged in any case, so that a task which is never confirmed ends.
        caused_by_others = shared or failure.scope is Scope.BYSTANDER
        if is_bad_data or not caused_by_others:
            episode.paid += 1

        attempts = self.config.environment.attempts
        # Two actors have to agree about bad data, even where one attempt is allowed.
        charged_attempts = max(attempts, 2) if is_bad_data else attempts
        same_bug_again = not failure.retryable and failure.why == previous.why
        episode.over = (
            episode.paid >= charged_attempts
            or same_bug_again
            or episode.attempt >= attempts + FREE_ATTEMPTS
        )

    def _confirmed(self, doubted: Sequence[tuple[Lease[Any], Failure]]) -> bool:
        """Whether two actors found the data bad.

        They must be on two nodes if there are two. In a pool of one, one actor is enough.
        """
        nodes: set[str] = set()
        for _, failure in doubted:
            nodes |= self._pool_of(failure).homes
        if len(nodes) > 1:
            return len({lease.node for lease, _ in doubted}) > 1

        actors = {(failure.of_actor, lease.slot) for lease, failure in doubted}
        _, last_failure = doubted[-1]
        return len(actors) >= min(2, self._pool_of(last_failure).size)

    def _pool_of(self, failure: Failure) -> Pool[Any]:
        """The pool of the actor that failed."""
        return self.services.environment if failure.of_actor else self.services.rollout


async def play(
    asked: Sequence[Play],
    config: RunConfig,
    player: EpisodeRunner,
    step: int,
    keep: Callable[[Item, dict[str, bytes]], None],
    report: Callable[[Member], None],
) -> list[Item]:
    """Play all held-out answers that are ``asked``, outside of the ledger.

    The answers of an arm to a task are a group. ``keep`` gets each item at once, with its group's
    images by hash; ``report`` gets each member, which has the traceback.
    """
    indices_by_group: dict[tuple[str, str], list[int]] = {}
    for index, answer in enumerate(asked):
        indices_by_group.setdefault((answer.arm, answer.task.id), []).append(index)

    gate = ConcurrencyLimit(EVALUATION_EPISODES_AT_ONCE)
    items: dict[int, Item] = {}

    async def play_group(indices: Sequence[int]) -> None:
        # Training counts its groups from 1, and the history knows a group by its number.
        group = -1 - indices[0]
        requests = [
            _request(config, asked[index], TrajectoryId(group, sample))
            for sample, index in enumerate(indices)
        ]
        async with gate.room(len(indices)):
            try:
                members = await player.play(requests, step, bad_data=player.emit_bad_data)
            finally:
                player.history.forget(group)

        for member in members:
            report(member)

        task = asked[indices[0]].task
        records, images = await player.rewards.describe(Group(group, task, tuple(members)))
        for sample, (index, member) in enumerate(zip(indices, members, strict=True)):
            sample_records = [record for record in records if record.sample == sample]
            items[index] = _item(asked[index], member, sample_records)
            keep(items[index], images)
        player.evaluation = len(items), len(asked)

    player.evaluation = 0, len(asked)
    try:
        await asyncio.gather(*map(play_group, indices_by_group.values()))
    finally:
        player.evaluation = None
    return [items[index] for index in range(len(asked))]


def _request(config: RunConfig, answer: Play, id: TrajectoryId) -> RolloutRequest:
    # The seed of sample 0 does not depend on its number.
    sample = [answer.sample] if answer.sample else []
    seed = derive(config.seed, "evaluation", answer.task.id, *sample)
    episode = dict(below(config.evaluation.over, EPISODES))
    return RolloutRequest(answer.task, id, 0, seed, answer.sampling, episode=episode)


def _item(answer: Play, member: Member, records: Sequence[RolloutRecord]) -> Item:
    """The item of an answer that was played."""
    outcome = member.outcome
    scored = outcome if isinstance(outcome, Scored) else None
    unscored = None if isinstance(outcome, Scored) else f"{outcome.kind}: {outcome.reason}"
    turns = tuple(chain.from_iterable(record.turns for record in records))
    return Item(
        answer.arm,
        answer.task.id,
        answer.task.source,
        answer.sample,
        reward=scored.value if scored else None,
        components=scored.components if scored else {},
        unscored=unscored,
        text="\n".join(turn.text for turn in turns if turn.sampled),
        truth=jsonable(answer.task.ground_truth),
        images=tuple(chain.from_iterable(record.images for record in records)),
        cut=member.summary.cut and member.summary.end_reason is not EndReason.OVER_LENGTH,
        turns=turns if answer.arm == RIGHT else (),
    )
