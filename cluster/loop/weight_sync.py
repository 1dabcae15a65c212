"""Weight sync to the rollout engines, and the check at the start that weights arrive.

docs/algorithm.md, sections 10 and 11.
"""

import asyncio
import random
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
from rayloop.cluster.supervision.policy_group import MIN_LOADING_TIMEOUT_S
from rayloop.cluster.supervision.pool import Calls
from rayloop.core import events, incidents
from rayloop.core.deadlines import Patience, with_deadline
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
from rayloop.core.types import RolloutRequest, Sampling, Task, TrajectoryId, Version, derive
from rayloop.run.config import RunConfig
from rayloop.run.reporter import Reporter
from rayloop.transports.seam import WeightTransport, WeightUpdate, transport

VISIBLE_FACTOR = 10.0
"""The factor by which a visible perturbation exceeds the usual log-prob difference."""
PROBE_TASKS = 4
"""Training tasks played for the log-prob check, the self-test and the drift check."""
MAX_FAILED_TASKS = 4
"""Failed tasks after which the check at the start ends a run that has played none.

At least ``PROBE_TASKS``.
"""
LOGPROB_CHECK = "log-prob check"
"""The purpose of the probes of the log-prob check.

The purpose of the self-test's probes is the name of the changed parameters.
"""
SELF_TEST_TOKENS = 32
"""Maximum tokens of an answer of the self-test, whose first tokens show whether weights arrived."""
ARRIVED_SHARE = 1 / 3
"""The share of the change by which engines and trainer may differ when weights have arrived."""
MIN_LOAD_TIMEOUT_S = 60.0
"""Seconds that a load may take in any case."""
MIN_BROADCAST_TIMEOUT_S = 120.0
"""Seconds that a load of a broadcast may take in any case."""


class WeightSync:
    """Brings the policy's weights into every engine.

    It is the ``rayloop.transports.seam.Rollouts`` of the transport.
    """

    def __init__(self, config: RunConfig, services: TrainingServices, reporter: Reporter) -> None:
        self.config = config
        self.services = services
        self.reporter = reporter
        self._current: WeightUpdate[Any] | None = None
        self._available = asyncio.Event()
        self._lost = asyncio.Event()
        self.update_lock = asyncio.Lock()
        """Held from the beginning of an update until its weights are synced."""
        self._unusable: set[str] = set()
        self._loads = Patience(config.sync_timeout, MIN_LOAD_TIMEOUT_S)
        self._broadcasts = Patience(config.sync_timeout, MIN_BROADCAST_TIMEOUT_S)
        self._spares = True
        self._order = 0

    @cached_property
    def _transport(self) -> WeightTransport[Any]:
        return transport(self.config.transport, self.services.weights)

    async def send(self, version: Version) -> None:
        """Load ``version`` into all engines in service.

        Raises WeightSyncError, and PolicyLost when weights were lost.
        """
        try:
            # Ranks that share GPUs with the engines must be awake before they can gather weights.
            await self.services.colocation.to_policy()
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
        """Export and load ``version`` once more. An engine that is late again is replaced.

        A transfer that a broken link interrupted may not continue, while a transfer of a new object
        does.
        """
        self.reporter.event(incidents.WeightsLost(str(version), why=brief(late)))
        self._spares = False
        try:
            await self.services.colocation.to_policy()
            await self._transport.deliver(self.services.policy, self, version)
        finally:
            self._spares = True

    @property
    def members(self) -> tuple[int, ...]:
        """Serial numbers of the engines in service."""
        return tuple(self.services.rollout.workers)

    @property
    def patience(self) -> float:
        """Seconds that the next load of a broadcast may take."""
        return self._broadcasts.seconds

    def keep(self, update: WeightUpdate[Any]) -> None:
        """New engines load this update after this call."""
        self._current = update
        self._lost.clear()
        self._available.set()

    async def load(self, update: WeightUpdate[Any]) -> None:
        """Load an update into every engine in service.

        Raises the first failure, when all loads have ended. An engine is late when it takes much
        longer than earlier loads. If it is late for the update of ``keep``, AnswerLate is raised,
        and the caller exports that version again. If it is late in a broadcast, it is replaced: the
        other engines cannot finish the broadcast without it.
        """
        await self.services.colocation.to_rollout()
        is_current = update is self._current
        patience = self._loads if is_current else self._broadcasts
        timeout = patience.seconds
        spares = is_current and self._spares and timeout < patience.longest
        now = asyncio.get_running_loop().time
        began = now()
        engines = Calls(self.services.rollout, timeout, spares=spares)
        # Before the calls: an engine then drops an older load whose source arrives late.
        self._order += 1
        await engines.everywhere(RolloutActor.load, update.manifest, update.source, self._order)
        seconds = now() - began
        # After the timeout, an engine was replaced.
        if seconds < timeout:
            patience.durations.append(seconds)

    def fell_back(self, version: Version, error: Exception) -> None:
        """Emit that the transport's fast path failed; a slower one follows."""
        self.reporter.event(incidents.BroadcastFailedEvent(str(version), why=brief(error)))

    async def admit(self, engine: Handle[RolloutActor]) -> None:
        """Load the current weights into a new engine, if there are any.

        Waits for other weights when these are lost.
        """
        timeout = self._loads.seconds
        loaded: WeightUpdate[Any] | None = None
        while self._current is not None and self._current is not loaded:
            # A newer update may have been kept during this
            # load, and an engine must not serve the older one.
            loaded = self._current
            try:
                await self._load_into(engine, loaded, timeout)
            except Exception as error:
                is_late = isinstance(error, AnswerLate) and timeout < self.config.sync_timeout
                if not (is_late or object_lost(error) or isinstance(error, PolicyLost)):
                    raise
                # A late transfer may not continue, while one of a new object does.
                # If that one is late as well, the engine is to blame.
                if is_late:
                    timeout = self.config.sync_timeout
                # Otherwise newer weights were kept during the load, and the loop loads them.
                if loaded is self._current:
                    await self._wait_for_resend(loaded, error)

    async def _load_into(
        self, engine: Handle[RolloutActor], update: WeightUpdate[Any], timeout: float
    ) -> None:
        """Load an update into a new engine."""
        if isinstance(update.source, asyncio.Task):
            # Several engines await this copy; without the
            # shield one deadline would cancel it for all.
            copy = asyncio.shield(update.source)
            update = await with_deadline(
                self._resend_timeout(), copy, "the copy of weights that are sent"
            )
        answer = submit(engine, RolloutActor.load, update.manifest, update.source, self._order)
        await with_deadline(timeout, answer, "load of a new rollout engine", engine)

    async def _wait_for_resend(self, update: WeightUpdate[Any], error: Exception) -> None:
        """Report an update that was lost, and wait until ``resend_lost`` has made another."""
        self._available.clear()
        self._lost.set()
        version = str(update.manifest.version)
        self.reporter.event(incidents.WeightsLost(version, why=brief(error)))
        await with_deadline(
            self._resend_timeout(),
            self._available.wait(),
            "weights in place of the lost ones",
        )

    def _resend_timeout(self) -> float:
        """Seconds in which the ranks can start and sync their weights."""
        return (
            max(self.config.recovery.start_timeout, MIN_LOADING_TIMEOUT_S)
            + self.config.sync_timeout
        )

    async def resend_lost(self, version: Callable[[], Version]) -> None:
        """Send weights again that were lost with their node, while the run continues.

        Raises PolicyLost when the ranks were on that node.
        """
        while True:
            await self._lost.wait()
            async with self.update_lock:
                # The update that held the lock may have replaced the lost weights already.
                if self._lost.is_set():
                    await self.send(version())

    async def verify(self, version: Version, tasks: Sequence[Task], runner: EpisodeRunner) -> None:
        """Check log-probs at step 0, then the self-test, on ``tasks``.

        Raises LogprobMismatch or WeightSyncError, or warns.
        """
        self._unusable.clear()
        try:
            await self._logprob_check(tasks, runner)
            if self.config.weight_sync.logprob_check != "stop":
                await self._self_test(version, tasks, runner)
        except (LogprobMismatch, WeightSyncError) as error:
            if self.config.weight_sync.logprob_check != "warn":
                raise
            self.reporter.event(incidents.LogprobWarning(why=str(error)))
            # A self-test that ended early left changed weights in the engines.
            await self.send(version)

    async def _logprob_check(self, tasks: Sequence[Task], runner: EpisodeRunner) -> None:
        self._probes = await self._probe(tasks, runner, LOGPROB_CHECK)
        gap = await self._compare(self._probes, swap_images=True)
        self._unchanged = gap
        self.reporter.event(events.LogprobCheck(**gap.report(), tolerance=self.config.tolerance))
        # Written as ``not a <= b``, so that NaN fails as well.
        if not gap.mean <= self.config.tolerance:
            raise LogprobMismatch(
                f"rollout and trainer disagree: mean |log-prob difference| {gap.mean:.2e} over"
                f" {gap.tokens} sampled tokens, {self.config.tolerance:.0e} is allowed. Check"
                " that engine and trainer use the same weights, dtype, attention, pixels,"
                " temperature and banned tokens"
            )

        if gap.images and not gap.swapped > gap.mean:
            raise LogprobMismatch(
                f"swapping the images of {gap.images} probes changed the trainer's log-probs by"
                f" {gap.swapped:.2e} on average: the pixels do not reach the model"
            )

    async def observe(
        self, tasks: Sequence[Task], runner: EpisodeRunner, step: int
    ) -> float | None:
        """Mean |log-prob difference| in nats between engines and trainer.

        It is measured over fresh episodes of ``PROBE_TASKS`` tasks, which differ at each step.
        None, with an event, when nothing could be compared. The ranks must hold nothing fetched.
        """
        draw = random.Random(derive(self.config.seed, "probe", "drift", step))
        sample = draw.sample(list(tasks), min(PROBE_TASKS, len(tasks)))
        sampling = self.config.rollout.sampling.sampling()
        requests = []
        for number, task in enumerate(sample):
            seed = derive(self.config.seed, "probe", "drift", step, task.id)
            requests.append(_probe_request(task, number, seed, sampling))

        results = await asyncio.gather(
            *(self._episode("drift", request, runner) for request in requests)
        )
        payloads = [result for result in results if not isinstance(result, Unscored)]
        try:
            if not payloads:
                raise WorkerLost(f"none of {len(sample)} tasks could be played")
            gap = await self._compare(payloads)
        except WorkerLost as error:
            self.reporter.event(incidents.DriftUnknown(why=str(error)))
            return None

        self.reporter.event(events.LogprobCheck(**gap.report(), tolerance=self.config.drift))
        return gap.mean

    async def _compare(self, payloads: Sequence[Any], *, swap_images: bool = False) -> LogprobGap:
        async with self.services.colocation.ranks_between():
            return await self.services.policy.compare(payloads, swap_images=swap_images)

    async def _episode(self, purpose: str, request: RolloutRequest, runner: EpisodeRunner) -> Any:
        """The payload of a fresh episode; else, with an event, the reason for its absence."""
        try:
            [result] = await runner.run_episodes([request])
        finally:
            # Probes use their negative numbers again, and failures of one would count for the next.
            runner.history.forget(request.id.group)
        if isinstance(result, Failure):
            self.reporter.event(incidents.ProbeFailed(purpose, request.task.id, why=result.why))
            return Unscored.of(result)
        _, payload = result
        return payload

    async def _self_test(
        self, version: Version, tasks: Sequence[Task], runner: EpisodeRunner
    ) -> None:
        """Sync visibly changed weights, one parameter group at a time; the engines must follow.

        Restores the weights.
        """
        groups, *_ = await self.services.policy.all(PolicyRank.parameter_groups)
        # The perturbed weights get numbers below that of the real version, so that the restored
        # weights, which are sent last, are the newest.
        for number, group in enumerate(groups, start=-len(groups)):
            if group in ("vision", "merger") and not self._unchanged.images:
                self.reporter.event(events.SelfTest(group, skipped="no probe has an image"))
                continue
            # Versions must rise, since older ones are pruned.
            test_version = Version(version.lineage, version.step + number)
            # Also when cancelled: a perturbation that began continues at the ranks.
            try:
                await self.services.policy.all(PolicyRank.perturb, group)
                await self.send(test_version)
                moved, probes = await asyncio.gather(
                    self._compare(self._probes), self._probe(tasks, runner, group)
                )
                follows = await self._compare(probes)
            finally:
                await self.services.policy.all(PolicyRank.restore_parameters)
            self.reporter.event(events.SelfTest(group, moved=moved.mean, follows=follows.mean))
            self._check_arrival(group, moved, follows)

        await self.send(version)

    def _check_arrival(self, group: str, moved: LogprobGap, follows: LogprobGap) -> None:
        """Check one part of the self-test. Raises WeightSyncError.

        ``moved``: the trainer after the change against the trainer before it; ``follows``: the
        engines against the trainer, after the change.
        """
        # ``not a > b``, so that NaN fails as well.
        if not moved.mean > VISIBLE_FACTOR * self._unchanged.mean:
            raise WeightSyncError(
                f"perturbing the {group} weights moved log-probs by only {moved.mean:.2e}, and"
                f" engine and trainer differ by {self._unchanged.mean:.2e} anyway: the self-test"
                " could not see whether they arrive. Set weight_sync.logprob_check=stop to leave"
                " the self-test out"
            )

        # In bfloat16 two implementations of a network with this
        # much noise differ by more than two of a sound network.
        share = ARRIVED_SHARE * moved.mean
        allowed = share if self.config.rounds else min(self.config.tolerance, share)
        if not follows.mean <= allowed:
            raise WeightSyncError(
                f"syncing changed {group} weights moved the trainer's log-probs by"
                f" {moved.mean:.2e}, but the engines' are {follows.mean:.2e} away from them"
                f" ({allowed:.0e} is allowed): this part did not arrive"
            )

    async def _probe(self, tasks: Sequence[Task], runner: EpisodeRunner, purpose: str) -> list[Any]:
        """Payloads of fresh episodes on the first ``PROBE_TASKS`` tasks that can be played.

        Fewer after ``MAX_FAILED_TASKS`` failures. A task that fails is not tried again, since it
        may have cost several deadlines. Raises EnvironmentFailed when no task could be played, or
        DataFailure where only the rows are to blame.
        """
        payloads: list[Any] = []
        failures: list[Unscored] = []
        sampling = self._probe_sampling(purpose)
        usable = (
            (number, task) for number, task in enumerate(tasks) if task.id not in self._unusable
        )
        while True:
            count = min(PROBE_TASKS - len(payloads), MAX_FAILED_TASKS - len(failures))
            batch = list(islice(usable, count))
            if not batch:
                break
            requests = []
            for number, task in batch:
                seed = derive(self.config.seed, "probe", purpose, task.id)
                requests.append(_probe_request(task, number, seed, sampling))
            results = await asyncio.gather(
                *(self._episode(purpose, request, runner) for request in requests)
            )
            for (_, task), result in zip(batch, results, strict=True):
                if isinstance(result, Unscored):
                    failures.append(result)
                    self._unusable.add(task.id)
                else:
                    payloads.append(result)

        if not payloads:
            last_reason = failures[-1].reason if failures else ""
            reason = (
                f"none of {len(failures)} tasks could be played for the {purpose} probe:"
                f" {last_reason}"
            )
            if all(failure.kind is UnscoredKind.BAD_DATA for failure in failures):
                raise DataFailure(self.config.data.train, reason)
            raise EnvironmentFailed(reason)
        return payloads

    def _probe_sampling(self, purpose: str) -> Sampling:
        """The run's sampling, with short answers for the self-test."""
        sampling = self.config.rollout.sampling.sampling()
        if purpose == LOGPROB_CHECK:
            return sampling
        max_tokens = min(sampling.max_tokens, SELF_TEST_TOKENS)
        min_tokens = min(sampling.min_tokens, max_tokens)
        return replace(sampling, max_tokens=max_tokens, min_tokens=min_tokens)


def _probe_request(task: Task, number: int, seed: int, sampling: Sampling) -> RolloutRequest:
    """The request of a probe. Probes have negative group numbers."""
    return RolloutRequest(task, TrajectoryId(-1 - number, 0), 0, seed, sampling)
