"""Weight sync to the rollout engines, and the check at the start that weights arrive
(docs/algorithm.md, sections 10 and 11).
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any

from rayloop.actors.failures import brief, object_lost
from rayloop.actors.handles import Handle, submit
from rayloop.actors.policy import LogprobGap, PolicyRank
from rayloop.actors.rollout import RolloutActor
from rayloop.cluster.services import TrainingServices
from rayloop.cluster.supervision.attempts import EpisodeRunner
from rayloop.cluster.supervision.policy_group import LOADING
from rayloop.core import events, incidents
from rayloop.core.deadlines import with_deadline
from rayloop.core.failures import (
    AnswerLate,
    DataFailure,
    EnvironmentFailed,
    Failure,
    LogprobMismatch,
    PolicyLost,
    WeightSyncError,
    WorkerLost,
)
from rayloop.core.groups import Unscored, UnscoredKind
from rayloop.core.types import RolloutRequest, Task, TrajectoryId, Version, derive
from rayloop.run.config import RunConfig
from rayloop.run.reporter import Reporter
from rayloop.transports.seam import WeightTransport, WeightUpdate, transport

VISIBLE = 10.0
"""A perturbation is visible when it moves the log-probs by this many times what engines and trainer
differ by anyway.
"""
PROBES = 4
"""Training tasks played for the log-prob check, the self-test and the drift check."""
FAILING = 4
"""The check at the start ends the run when it has played no task and so many have failed;
``PROBES`` or more.
"""
LOGPROB_CHECK = "log-prob check"
"""The purpose of the probes of the log-prob check.

The self-test's probes have the name of the changed parameters as theirs.
"""
SELF_TEST_TOKENS = 32
"""Maximum tokens of an answer of the self-test, whose first tokens show whether weights arrived."""
ARRIVED = 1 / 3
"""Changed weights have arrived when engines and trainer differ by at most this share of the change.
"""
LOADS, LOAD_FACTOR, LOAD_FLOOR = 5, 20.0, 60.0
"""A load may take this many times what the longest of so many before it took, and this many seconds
in any case.
"""


class WeightSync:
    """Brings the policy's weights into every engine; the transport sees it as
    ``rayloop.transports.seam.Rollouts``.
    """

    def __init__(self, config: RunConfig, services: TrainingServices, reporter: Reporter) -> None:
        self.config, self.services, self.reporter = config, services, reporter
        self._current: WeightUpdate[Any] | None = None
        self._kept, self._gone = asyncio.Event(), asyncio.Event()
        self.making = asyncio.Lock()
        """Held from the beginning of an update until its weights are synced."""
        self._unplayable: set[str] = set()
        self._loads, self._spares, self._order = deque[float](maxlen=LOADS), True, 0

    @cached_property
    def _transport(self) -> WeightTransport[Any]:
        return transport(self.config.transport, self.services.weights)

    async def send(self, version: Version) -> None:
        """Load ``version`` into all engines in service.

        Raises WeightSyncError, and PolicyLost when weights were lost.
        """
        try:
            # Ranks that share GPUs with the engines must be awake before they can gather weights.
            await self.services.sharing.to_policy()
            try:
                await self._transport.deliver(self.services.policy, self, version)
            except AnswerLate as late:
                await self._send_again(version, late)
        except Exception as error:
            if object_lost(error):
                # The driver recovers from PolicyLost: it rebuilds
                # the ranks and syncs the checkpoint's weights.
                raise PolicyLost(
                    f"the weights of version {version} were lost while they were synced:"
                    f" {brief(error)}"
                ) from error
            raise

    async def _send_again(self, version: Version, late: AnswerLate) -> None:
        """Export and load ``version`` once more: a transfer that a broken link interrupted may not
        go on, and one of a new object does. An engine that is late again is replaced.
        """
        self.reporter.event(incidents.WeightsLost(str(version), why=brief(late)))
        self._spares = False
        try:
            await self.services.sharing.to_policy()
            await self._transport.deliver(self.services.policy, self, version)
        finally:
            self._spares = True

    def _patience(self) -> float:
        """Seconds for a load: a multiple of what the last ones took, at most a sixth of
        ``policy.step_timeout``.
        """
        longest = self.config.sync_timeout
        return (
            min(longest, max(LOAD_FLOOR, LOAD_FACTOR * max(self._loads)))
            if self._loads
            else longest
        )

    @property
    def members(self) -> tuple[int, ...]:
        """Serial numbers of the engines in service."""
        return tuple(self.services.rollout.workers)

    def keep(self, update: WeightUpdate[Any]) -> None:
        """New engines load this update from now on."""
        self._current = update
        self._gone.clear()
        self._kept.set()

    async def load(self, update: WeightUpdate[Any]) -> None:
        """Load an update into every engine in service.

        Raises the first failure, when all have ended, and AnswerLate when one that is ``kept``, and
        so can be exported again, takes much longer than those before.
        """
        await self.services.sharing.to_rollout()
        kept, longest = update is self._current, self.config.sync_timeout
        within = self._patience() if kept else longest
        spares = kept and self._spares and within < longest
        now = asyncio.get_running_loop().time
        began = now()
        engines = self.services.rollout.within(within, spares=spares)
        # Before the calls: an engine then drops an older load whose source arrives late.
        self._order += 1
        await engines.everywhere(RolloutActor.load, update.manifest, update.source, self._order)
        took = now() - began
        if kept and took < within:  # else an engine was replaced
            self._loads.append(took)

    def fell_back(self, version: Version, error: Exception) -> None:
        """Emit that the transport's own way failed; a slower one follows."""
        self.reporter.event(incidents.BroadcastFailedEvent(str(version), why=brief(error)))

    async def admit(self, engine: Handle[RolloutActor]) -> None:
        """Load the current weights into a new engine, if there are any.

        Waits for others when these are lost.
        """
        patience = max(self.config.recovery.start_timeout, LOADING) + self.config.sync_timeout
        loaded, within = None, self._patience()
        while self._current is not None and self._current is not loaded:
            # A newer update may have been kept during this
            # load, and an engine must not serve the older one.
            loaded = self._current
            try:
                update = loaded
                if isinstance(loaded.source, asyncio.Task):
                    # Several engines await this copy; without the
                    # shield one deadline would cancel it for all.
                    update = await with_deadline(
                        patience, asyncio.shield(loaded.source), "the copy of weights that are sent"
                    )
                answer = submit(
                    engine, RolloutActor.load, update.manifest, update.source, self._order
                )
                await with_deadline(within, answer, "load of a new rollout engine", engine)
            except Exception as error:
                late = isinstance(error, AnswerLate) and within < self.config.sync_timeout
                if not (late or object_lost(error) or isinstance(error, PolicyLost)):
                    raise
                if (
                    late
                    # its transfer may not go on, and one of a new object does; after that the engine is
                    # to blame
                ):
                    within = self.config.sync_timeout
                # Otherwise newer weights were kept in the meantime, and the loop loads those.
                if loaded is self._current:
                    self._kept.clear()
                    self._gone.set()
                    self.reporter.event(
                        incidents.WeightsLost(str(loaded.manifest.version), why=brief(error))
                    )
                    await with_deadline(
                        patience, self._kept.wait(), "weights in place of those that were lost"
                    )

    async def remake(self, version: Callable[[], Version]) -> None:
        """Sync weights again that were lost with their node, while the run goes on.

        Raises PolicyLost when the ranks were on it.
        """
        while True:
            await self._gone.wait()
            async with self.making:
                # The update that held the lock may have replaced the lost weights already.
                if self._gone.is_set():
                    await self.send(version())

    async def verify(self, version: Version, tasks: Sequence[Task], player: EpisodeRunner) -> None:
        """Check log-probs at step 0, then the self-test, on ``tasks``.

        Raises LogprobMismatch or WeightSyncError, or warns.
        """
        self._unplayable.clear()
        try:
            await self._logprob_check(tasks, player)
            if self.config.weight_sync.logprob_check != "stop":
                await self._self_test(version, tasks, player)
        except (LogprobMismatch, WeightSyncError) as error:
            if self.config.weight_sync.logprob_check != "warn":
                raise
            self.reporter.event(incidents.LogprobWarning(why=str(error)))
            await self.send(
                version
            )  # a self-test that ended early left changed weights in the engines

    async def _logprob_check(self, tasks: Sequence[Task], player: EpisodeRunner) -> None:
        self._probes = await self._probe(tasks, player, LOGPROB_CHECK)
        found = self._unchanged = await self._compare(self._probes, swap_images=True)
        self.reporter.event(events.LogprobCheck(**found.report(), tolerance=self.config.tolerance))
        # Written as ``not a <= b``, so that NaN fails as well.
        if not found.mean <= self.config.tolerance:
            raise LogprobMismatch(
                f"rollout and trainer disagree: mean |log-prob difference| {found.mean:.2e} over"
                f" {found.tokens} sampled tokens, {self.config.tolerance:.0e} is allowed. Check"
                " that engine and trainer use the same weights, dtype, attention, pixels,"
                " temperature and banned tokens"
            )

        if found.images and not found.swapped > found.mean:
            raise LogprobMismatch(
                f"swapping the images of {found.images} probes changed the trainer's log-probs by"
                f" {found.swapped:.2e} on average: the pixels do not reach the model"
            )

    async def observe(
        self, tasks: Sequence[Task], player: EpisodeRunner, step: int
    ) -> float | None:
        """Mean |log-prob difference| in nats between engines and trainer, over fresh episodes of
        ``PROBES`` tasks, other ones at each step. None, with an event, when nothing could be
        compared. The ranks must hold nothing fetched.
        """
        draw = random.Random(derive(self.config.seed, "probe", "drift", step))
        chosen = draw.sample(list(tasks), min(PROBES, len(tasks)))
        sampling = self.config.rollout.sampling.sampling()
        requests = [
            RolloutRequest(
                task,
                TrajectoryId(-1 - i, 0),
                0,
                derive(self.config.seed, "probe", "drift", step, task.id),
                sampling,
            )
            for i, task in enumerate(chosen)
        ]

        played = await asyncio.gather(
            *(self._episode("drift", request, player) for request in requests)
        )
        payloads = [payload for payload in played if not isinstance(payload, Unscored)]
        try:
            if not payloads:
                raise WorkerLost(f"none of {len(chosen)} tasks could be played")
            found = await self._compare(payloads)
        except WorkerLost as error:
            self.reporter.event(incidents.DriftUnknown(why=str(error)))
            return None

        self.reporter.event(events.LogprobCheck(**found.report(), tolerance=self.config.drift))
        return found.mean

    async def _compare(self, payloads: Sequence[Any], *, swap_images: bool = False) -> LogprobGap:
        async with self.services.sharing.ranks_between():
            return await self.services.policy.compare(payloads, swap_images=swap_images)

    async def _episode(self, purpose: str, request: RolloutRequest, player: EpisodeRunner) -> Any:
        """The payload of a fresh episode, or, with an event, why there is none."""
        try:
            [played] = await player.episodes([request])
        finally:
            # Probes use their negative numbers again, and failures of one would count for the next.
            player.history.forget(request.id.group)
        if not isinstance(played, Failure):
            return played[1]
        self.reporter.event(incidents.ProbeFailed(purpose, request.task.id, why=played.why))
        return Unscored.of(played)

    async def _self_test(
        self, version: Version, tasks: Sequence[Task], player: EpisodeRunner
    ) -> None:
        """Sync visibly changed weights, one parameter group at a time; the engines must follow.

        Restores the weights.
        """
        groups, *_ = await self.services.policy.all(PolicyRank.parameter_groups)
        # Versions below the real one: the last send, of the restored weights, is then the newest.
        for number, group in enumerate(groups, start=-len(groups)):
            if group in ("vision", "merger") and not self._unchanged.images:
                self.reporter.event(events.SelfTest(group, skipped="no probe has an image"))
                continue
            try:  # a perturbation that is cancelled here goes on at the ranks
                await self.services.policy.all(PolicyRank.perturb, group)
                await self.send(
                    Version(version.lineage, version.step + number)
                )  # rising: older ones are pruned
                moved, probes = await asyncio.gather(
                    self._compare(self._probes), self._probe(tasks, player, group)
                )
                follows = await self._compare(probes)
            finally:
                await self.services.policy.all(PolicyRank.restore_parameters)
            self.reporter.event(events.SelfTest(group, moved=moved.mean, follows=follows.mean))
            self._judge(group, moved, follows)

        await self.send(version)

    def _judge(self, group: str, moved: LogprobGap, follows: LogprobGap) -> None:
        """``moved``: the trainer after the change against before; ``follows``: the engines against
        the trainer, after it.
        """
        # ``not a > b``, so that NaN fails as well.
        if not moved.mean > VISIBLE * self._unchanged.mean:
            raise WeightSyncError(
                f"perturbing the {group} weights moved log-probs by only {moved.mean:.2e}, and"
                f" engine and trainer differ by {self._unchanged.mean:.2e} anyway: the self-test"
                " could not see whether they arrive. Set weight_sync.logprob_check=stop to leave"
                " the self-test out"
            )

        # In bfloat16 two implementations of a network with this much noise differ by more than
        # those of a sound one.
        share = ARRIVED * moved.mean
        allowed = share if self.config.rounds else min(self.config.tolerance, share)
        if not follows.mean <= allowed:
            raise WeightSyncError(
                f"syncing changed {group} weights moved the trainer's log-probs by"
                f" {moved.mean:.2e}, but the engines' are {follows.mean:.2e} away from them"
                f" ({allowed:.0e} is allowed): this part did not arrive"
            )

    async def _probe(self, tasks: Sequence[Task], player: EpisodeRunner, purpose: str) -> list[Any]:
        """Payloads of fresh episodes on the first ``PROBES`` tasks that can be played; fewer after
        ``FAILING`` failures. A task that fails is not tried again, since it may have cost several
        deadlines. Raises EnvironmentFailed when no task could be played, or DataFailure where only
        the rows are to blame.
        """
        payloads: list[Any] = []
        failed: list[Unscored] = []
        sampling = self.config.rollout.sampling.sampling()
        if purpose != LOGPROB_CHECK:
            most = min(sampling.max_tokens, SELF_TEST_TOKENS)
            sampling = replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most))

        playable = (
            (number, task) for number, task in enumerate(tasks) if task.id not in self._unplayable
        )
        while chosen := list(islice(playable, min(PROBES - len(payloads), FAILING - len(failed)))):
            requests = [
                RolloutRequest(
                    task,
                    TrajectoryId(-1 - number, 0),
                    0,
                    derive(self.config.seed, "probe", purpose, task.id),
                    sampling,
                )
                for number, task in chosen
            ]
            answers = await asyncio.gather(
                *(self._episode(purpose, request, player) for request in requests)
            )
            for (_, task), played in zip(chosen, answers, strict=True):
                if isinstance(played, Unscored):
                    failed.append(played)
                    self._unplayable.add(task.id)
                else:
                    payloads.append(played)

        if not payloads:
            reason = (
                f"none of {len(failed)} tasks could be played for the {purpose} probe:"
                f" {failed[-1].reason if failed else ''}"
            )
            if all(outcome.kind is UnscoredKind.BAD_DATA for outcome in failed):
                raise DataFailure(self.config.data.train, reason)
            raise EnvironmentFailed(reason)
        return payloads
