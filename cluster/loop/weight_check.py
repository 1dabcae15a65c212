"""The check that engines compute what the trainer computes, and that synced weights arrive.

docs/algorithm.md, section 11.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from rayloop.actors.policy import LogprobGap, PolicyRank
from rayloop.cluster.loop.weight_sync import WeightSync
from rayloop.cluster.supervision.attempts import EpisodeRunner
from rayloop.core import events, incidents
from rayloop.core.failures import (
    DataFailure,
    EnvironmentFailed,
    Failure,
    LogprobMismatch,
    WeightSyncError,
    WorkerLost,
)
from rayloop.core.groups import Unscored, UnscoredKind
from rayloop.core.types import RolloutRequest, Sampling, Task, TrajectoryId, Version, derive

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


class WeightCheck:
    """Plays probes on the engines, and compares their log-probs with the trainer's."""

    def __init__(self, sync: WeightSync) -> None:
        self._sync = sync
        self.config = sync.config
        self.services = sync.services
        self.reporter = sync.reporter
        self._unusable: set[str] = set()

    async def verify(self, version: Version, tasks: Sequence[Task], runner: EpisodeRunner) -> None:
        """Check log-probs at step 0, then the self-test, on ``tasks``.

        Raises LogprobMismatch or WeightSyncError, or warns.
        """
        try:
            await self._logprob_check(tasks, runner)
            if self.config.weight_sync.logprob_check != "stop":
                await self._self_test(version, tasks, runner)
        except (LogprobMismatch, WeightSyncError) as error:
            if self.config.weight_sync.logprob_check != "warn":
                raise
            self.reporter.event(incidents.LogprobWarning(why=str(error)))
            # A self-test that ended early left changed weights in the engines.
            await self._sync.send(version)

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
                await self._sync.send(test_version)
                moved, probes = await asyncio.gather(
                    self._compare(self._probes), self._probe(tasks, runner, group)
                )
                follows = await self._compare(probes)
            finally:
                await self.services.policy.all(PolicyRank.restore_parameters)
            self.reporter.event(events.SelfTest(group, moved=moved.mean, follows=follows.mean))
            self._check_arrival(group, moved, follows)

        await self._sync.send(version)

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
