"""Plays and scores the episodes of a group on the pools until each is over.

A group's first attempt is one call (of at most ``environment.episodes_at_once``); an episode
without a result is played again in its own call, since it may have ended its actor.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from rayloop.actors.handles import Handle
from rayloop.actors.lease import LeasesEngines
from rayloop.cluster.supervision.calls import Pools, RewardCalls, RolloutCalls
from rayloop.core import incidents
from rayloop.core.deadlines import WAITS
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
from rayloop.rollout.failed_episodes import FailureHistory
from rayloop.rollout.scheduler import ConcurrencyLimit
from rayloop.rollout.verdict import Call, Context, EpisodeResult, Next, Record, Settle, verdict
from rayloop.run.config import RunConfig
from rayloop.run.held_out import AnswerRequest
from rayloop.run.lifetime import EPISODES, below
from rayloop.run.records.rollouts import RolloutRecord, jsonable

Begins = Callable[[RolloutRequest], None]
BadData = Callable[[Task, str, str], None]
"""Gets a task, the broken file and the reason."""
EVALUATION_EPISODES_AT_ONCE = 128
"""Episodes of an evaluation that are played at once."""


def _ignore(request: RolloutRequest) -> None:
    """Nothing counts the beginnings of the episode."""


@dataclass
class _Episode:
    """An episode until it is ``over``: it was played, or its last failure stands.

    ``begins`` is called before each attempt; ``report`` gets its data when that is bad. ``node``:
    the name of the node on which it was played.
    """

    request: RolloutRequest
    begins: Begins
    report: BadData
    result: EpisodeResult | None = None
    over: bool = False
    record: Record = field(default_factory=Record)
    node: str = ""

    def no_summary(self) -> Summary:
        """The summary of an episode that was not played."""
        task = self.request.task
        no_version = Version(0, 0)
        return Summary(
            self.request.id,
            max(self.record.attempts - 1, 0),
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
    """``rollout_group`` always returns members: scored, or unscored with the reason.

    It raises only what must end the run. ``running``: episodes given to ``rollout_group`` that are
    not over. ``evaluation``: answers played and asked for, during an evaluation.
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
        self.running = 0
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

    async def rollout_group(
        self,
        asked: Sequence[RolloutRequest],
        step: int,
        begins: Begins = _ignore,
        bad_data: BadData | None = None,
    ) -> list[Member]:
        """Play and score episodes of one task for step ``step``.

        Each call's episodes are scored at once, or all together at the end (``reward.per: group``).
        ``begins`` is called before each attempt; ``bad_data`` replaces ``on_bad_data``.
        """
        report = bad_data or self._bad_data
        episodes = [_Episode(request, begins, report) for request in asked]
        parts = [episodes] if self.config.reward.per == "group" else self._parts(episodes)
        members_by_part = await asyncio.gather(*(self._rollout_part(part, step) for part in parts))
        return list(chain.from_iterable(members_by_part))

    async def _rollout_part(self, episodes: Sequence[_Episode], step: int) -> list[Member]:
        self.running += len(episodes)
        try:
            await self._until_over(episodes)
            payloads = [episode.result[1] for episode in episodes if episode.result]
            scores: Sequence[Outcome] = ()
            if payloads:
                scores = await self.rewards.score(payloads, episodes[0].request.task, step)
            remaining_scores = iter(scores)

            members = []
            for episode in episodes:
                if episode.result:
                    summary, payload = episode.result
                    outcome = next(remaining_scores)
                    self.history.lost_episodes.played(outcome, episode.node)
                    members.append(Member(summary, outcome, payload))
                else:
                    unscored = Unscored.of(episode.record.failure)
                    members.append(Member(episode.no_summary(), unscored))
            return members
        finally:
            self.running -= len(episodes)

    def _parts(self, episodes: Sequence[_Episode]) -> list[Sequence[_Episode]]:
        """The episodes of each call."""
        size = self.config.environment.episodes_at_once or len(episodes)
        return [episodes[begin : begin + size] for begin in range(0, len(episodes), size)]

    async def run_episodes(self, asked: Sequence[RolloutRequest]) -> list[Failure | EpisodeResult]:
        """The results of episodes of one group, which are not scored."""
        episodes = [_Episode(request, _ignore, self._bad_data) for request in asked]
        await self._until_over(episodes)
        return [episode.result or episode.record.failure for episode in episodes]

    async def _until_over(self, episodes: Sequence[_Episode]) -> None:
        """Play episodes of one group, again on other actors while infrastructure fails."""

        async def run_in_one_call(part: Sequence[_Episode]) -> None:
            lost = await self._attempt(part)
            unfinished = [episode for episode in part if not episode.over]
            if lost:
                # One of them may have ended their actor, and must not end the others again.
                for episode in unfinished:
                    await run_by_itself(episode)
            else:
                await asyncio.gather(*map(run_by_itself, unfinished))

        async def run_by_itself(episode: _Episode) -> None:
            while not episode.over:
                await self._attempt([episode])

        await asyncio.gather(*map(run_in_one_call, self._parts(episodes)))

    async def _attempt(self, episodes: Sequence[_Episode]) -> bool:
        """Play these episodes once more, in one call.

        Returns whether they were lost with their actor.
        """
        # Other episodes of the group may have hung by now,
        # and each further one costs a whole timeout.
        reason = self.history.hangs(episodes[0].request.id.group)
        if reason:
            failure = Failure(Cause.HUNG, Scope.EPISODE, retryable=False, why=reason)
            for episode in episodes:
                episode.record = episode.record._replace(failure=failure)
                episode.over = True
            return False
        self.reissued += sum(episode.record.attempts > 0 for episode in episodes)

        # The lease is taken inside: an episode that waits for room holds no actor.
        async with self.admission.room(len(episodes)):
            for episode in episodes:
                # Not earlier: an episode begins with the weights served when it is admitted.
                episode.begins(episode.request)
            requests = [
                replace(episode.request, attempt=episode.record.attempts) for episode in episodes
            ]
            call = await self.calls.run_episodes(requests, episodes[0].record)
            # Nothing is awaited until the verdict is carried out: its facts stay true.
            self._carry_out(call, episodes)
        return call.lost is not None and call.lost.failure.of_actor

    def _carry_out(self, call: Call, episodes: Sequence[_Episode]) -> None:
        """Do what the verdict on a call says. Raises Diverged."""
        pool = self.services.environment
        context = Context(
            self.config.environment.attempts,
            [episode.record for episode in episodes],
            pool,
            self.services.rollout,
            self.history.processes,
            self.history.successes,
        )
        result = verdict(call, context)
        pool.release(call.environment.worker, well=result.actor_worked, count=len(episodes))
        for worker, why, charged, spares_others in result.replacements:
            pool.lost(worker, why, charged, spares_others)
        for settle in result.episodes:
            self._settle(episodes[settle.episode], settle, call)

    def _settle(self, episode: _Episode, settle: Settle, call: Call) -> None:
        request = episode.request
        self.calls.release_engine(call.requests[settle.episode], settle.engine_worked)
        result = call.results[settle.episode]
        episode.record = settle.record
        episode.over = settle.next is not Next.AGAIN
        episode.node = self.services.environment.node_name(call.environment)
        if isinstance(result, Failure):
            self._report(episode, settle, result)
        else:
            self.history.succeeded(call.environment.worker)
            episode.result = result
            name = self.services.environment.name(call.environment)
            WAITS.record_episodes(result[:1], name, self.services.rollout.name(call.engine))

        for seat, failure in settle.charges:
            place = self.services.environment.place(seat)
            self.history.failed(request.id.group, request.task.id, seat.worker, place, failure)

    def _report(self, episode: _Episode, settle: Settle, failure: Failure) -> None:
        """Count an attempt that failed, and report it. Raises Diverged."""
        self.history.lost_episodes.failed(failure, episode.node)
        request = episode.request
        if settle.next is Next.END_RUN:
            raise Diverged(failure.why)
        if settle.next is Next.BAD_DATA:
            episode.report(request.task, failure.path, failure.why)
        elif settle.next is not Next.TOO_LONG:
            failed = incidents.EpisodeFailed(
                str(request.id),
                episode.record.attempts - 1,
                why=failure.why,
                cause=str(failure.cause),
                node=episode.node,
                server=failure.server,
            )
            self._emit(failed)


async def evaluate_answers(
    asked: Sequence[AnswerRequest],
    runner: EpisodeRunner,
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

    async def answer_group(indices: Sequence[int]) -> None:
        # Training counts its groups from 1, and the history knows a group by its number.
        group = -1 - indices[0]
        requests = [
            _request(runner.config, asked[index], TrajectoryId(group, sample))
            for sample, index in enumerate(indices)
        ]
        async with gate.room(len(indices)):
            try:
                members = await runner.rollout_group(requests, step, bad_data=runner.emit_bad_data)
            finally:
                runner.history.forget(group)

        for member in members:
            report(member)

        task = asked[indices[0]].task
        records, images = await runner.rewards.describe(Group(group, task, tuple(members)))
        for sample, (index, member) in enumerate(zip(indices, members, strict=True)):
            sample_records = [record for record in records if record.sample == sample]
            items[index] = _item(asked[index], member, sample_records)
            keep(items[index], images)
        runner.evaluation = len(items), len(asked)

    runner.evaluation = 0, len(asked)
    try:
        await asyncio.gather(*map(answer_group, indices_by_group.values()))
    finally:
        runner.evaluation = None
    return [items[index] for index in range(len(asked))]


def _request(config: RunConfig, answer: AnswerRequest, id: TrajectoryId) -> RolloutRequest:
    # The seed of sample 0 does not depend on its number.
    sample = [answer.sample] if answer.sample else []
    seed = derive(config.seed, "evaluation", answer.task.id, *sample)
    episode = dict(below(config.evaluation.over, EPISODES))
    return RolloutRequest(answer.task, id, 0, seed, answer.sampling, episode=episode)


def _item(answer: AnswerRequest, member: Member, records: Sequence[RolloutRecord]) -> Item:
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
