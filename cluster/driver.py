"""The driver: GRPO with partial dynamic filtering over actors.

It moves references and decisions, never tensors. ``Driver.run`` and ``Driver.finish``, which
``produce`` has called for each group, are the algorithm; the methods that they call follow in the
order of the calls.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from functools import partial
from typing import Any

import ray

from rayloop.actors.handles import Handle
from rayloop.actors.lease import LeasesEngines
from rayloop.actors.policy import PolicyRank
from rayloop.actors.profiling import Profiles
from rayloop.cluster.loop.annotating import annotated
from rayloop.cluster.loop.ending import ended
from rayloop.cluster.loop.evaluating import evaluate_held_out
from rayloop.cluster.loop.rebuilding import run_and_rebuild
from rayloop.cluster.loop.recording import described, keep_step, report_skipped, sampled_groups
from rayloop.cluster.loop.refreshing import RefreshedReference
from rayloop.cluster.loop.restoring import restore
from rayloop.cluster.loop.saving import SavedStep, Saving, capture
from rayloop.cluster.loop.weight_check import WeightCheck
from rayloop.cluster.loop.weight_sync import WeightSync
from rayloop.cluster.services import TrainingServices
from rayloop.cluster.supervision.attempts import EpisodeRunner
from rayloop.cluster.supervision.watchdog import watch, watch_liveness
from rayloop.core import incidents
from rayloop.core.deadlines import Timings, background, decisive, timed, until_stopped
from rayloop.core.failures import GenerationBudgetSpent, GraderBroken, Preempted, RayloopError
from rayloop.core.groups import Group
from rayloop.core.ledger import Ledger
from rayloop.core.types import TrajectoryId, Version
from rayloop.grpo.advantage import build_advantage, over_step, with_advantages
from rayloop.grpo.filters import build_filters
from rayloop.grpo.selection import apply_filters
from rayloop.grpo.sight import of_screens, sight_metrics
from rayloop.rollout.failed_episodes import FailureHistory
from rayloop.rollout.finished import without
from rayloop.rollout.manager import RolloutManager
from rayloop.rollout.plain import with_present_keys
from rayloop.run.checkpoint import NOTHING
from rayloop.run.config import RunConfig
from rayloop.run.identity import about
from rayloop.run.order import held_out_rows, training_rows
from rayloop.run.origin import Origin
from rayloop.run.records.rollouts import RolloutRecord
from rayloop.run.records.step_metrics import Collected
from rayloop.run.reporter import Reporter
from rayloop.view.completions import completions
from rayloop.view.formatting import EXAMPLE, quoted


class Driver:
    """The driver of a run, which owns all other actors.

    It lives in the actor ``handle`` (cluster/driver_actor.py). ``origin`` is the checkpoint to
    continue from; ``hashes`` are ``Prepared.identity``, for the checkpoints; ``warnings``
    are about its settings.
    """

    def __init__(
        self,
        config: RunConfig,
        services: TrainingServices,
        reporter: Reporter,
        origin: Origin,
        handle: Handle[LeasesEngines],
        hashes: Mapping[str, str] = NOTHING,
        warnings: Sequence[str] = (),
    ) -> None:
        """Read the data. Raises ConfigError."""
        self.config = config
        self.services = services
        self.reporter = reporter
        self.origin = origin
        self.hashes = hashes

        self.step = 0
        self.version = Version(0, 0)
        # Earlier lineage -> the step of the checkpoint at which the run left it (``is_stale``).
        self.inherited: dict[int, int] = {}
        # The next three are explained where cluster/loop uses them (``EndingRun`` and others).
        self.owes_evaluation = False
        self.policy_lost = False
        self.restored_step = 0
        self.stopping = asyncio.Event()
        self.updating = False

        run_folder = reporter.folder.path
        self.timings = Timings()
        self.ledger = Ledger()
        self.weight_sync = WeightSync(config, services, reporter)
        self.profiles = Profiles(config.profile.steps, run_folder, services, self.warn)
        self.checkpoints = origin.store(config.checkpoint.keep, self.warn)
        self.reference = RefreshedReference(config.reference.refresh_every, run_folder)
        self.saving = Saving(
            self.checkpoints,
            reporter.event,
            beside=config.checkpoint.asynchronous,
            timeout=config.policy.step_timeout,
            beforehand=self.reference.keep,
            stopping=self.stopping,
        )

        # The runner counts failures in the history, and the manager reads it when a group ends.
        self.history = FailureHistory(config.environment)
        tasks = training_rows(config, reporter)
        self.rollouts = RolloutManager(config, self.ledger, tasks, reporter, self.history)
        self.filters = build_filters(config.algorithm.filtering.filters)
        self.advantage = build_advantage(config.algorithm.advantage)
        for reason in warnings:
            self.warn(reason)

        self.held_out = held_out_rows(config, reporter)
        self.runner = EpisodeRunner(
            config, services, handle, reporter.event, self.rollouts.quarantine, self.history
        )
        # A rebuilt policy that has no checkpoint starts from this state again.
        self.initial = self.state()

    def warn(self, reason: str) -> None:
        """Emit a warning."""
        self.reporter.event(incidents.WarningEvent(reason))

    async def run(self) -> None:
        """Train from the newest checkpoint to the last step. Raises PolicyLost when a rank died."""
        # A restore waits for storage up to ``recovery.start_timeout``;
        # a stop must be able to end that wait.
        await until_stopped(self.stopping, self.restore())
        # The check below compares engines and trainer, so
        # the engines need the restored weights first.
        await self.sync_weights()
        await self.verify()
        resend = self.weight_sync.resend_lost(lambda: self.version)
        # Episodes are played and scored in ``produce``, and each group gets its advantages and
        # filters in ``finish``. A producer that dies cancels ``collect``, which would otherwise
        # wait forever.
        async with background(self.produce(), self.supervise(), resend):
            await self.evaluate()
            while not self.done:
                async with self.profiles.step(self.step + 1):
                    # The ranks fetch their shares of the batch in ``collect`` (``fetch_batch``).
                    collected = await self.collect()
                    # ``resend_lost`` sends under the current version;
                    # during an update it would send new weights as old ones.
                    async with self.weight_sync.update_lock:
                        report = await self.train(collected.groups)
                        self.step += 1
                        await self.sync_weights()

                # Before the record: the metrics of this step include the metrics of its evaluation.
                await self.evaluate()
                await self.record(report, collected)
                # Before the save: a step that diverged must not
                # become the checkpoint that a resume starts from.
                self.notice_skipped(report)
                await self.checkpoint()
                # Its payloads must be freed before the next groups fill the object store.
                del collected

    async def finish(self, group: Group) -> Group:
        """Complete a group whose last trajectory has been scored or has failed.

        A step may take the group afterwards, unless the filters leave nothing of it.
        """
        # ARPO replay, before the statistics; off by default.
        group = self.rollouts.finished.replay(group)
        # The advantages are computed over the scored members.
        group = with_advantages(group, self.advantage)
        # The filters may leave the group partial, or empty.
        group = apply_filters(group, self.filters)
        # Without a KL term this does nothing. Until it returns, the group counts as in flight.
        return await self.annotate(group)

    async def main(self) -> dict[str, Any]:
        """Start, run, and rebuild a lost policy.

        Returns the last step's summary; raises a RayloopError, Preempted after a stop.
        """
        try:
            logs = self.reporter.folder.path / "logs"
            emit = self.reporter.event
            recovery = self.config.recovery
            stalls = watch(recovery, lambda: self.timings.phase, emit, logs)
            liveness = watch_liveness(emit, recovery.health_timeout)
            async with background(stalls, liveness):
                await until_stopped(self.stopping, self.services.start(self.weight_sync.admit))
                await run_and_rebuild(self)
            # A stop interrupted the last evaluation, so the
            # run is not finished: the next start repeats it.
            if self.owes_evaluation:
                raise Preempted("asked to stop")
            self.rollouts.close()
            self.ledger.check()
            return self.reporter.close(self.step, self.ledger.counts())
        except Exception as error:
            # ``ended`` may save the step, so it runs before
            # ``services.stop`` below kills the ranks.
            end = await ended(self, error)
            if end is not error:
                raise end from error
            raise
        finally:
            # First, since a save under way still calls the ranks.
            await self.saving.abandon()
            self.services.stop()
            await self.reporter.loggers.close()

    @property
    def done(self) -> bool:
        """Whether no further step is trained.

        All steps are trained, or held-out rewards stopped improving (``evaluation.patience``).
        """
        return self.step >= self.config.steps or self.reporter.given_up

    async def restore(self) -> None:
        """Begin a new lineage from a checkpoint (``Origin``), or from the start model."""
        await restore(self)

    @timed("update_weights")
    async def sync_weights(self) -> None:
        """Bring the weights of this step to the engines, and to the reference when due.

        A stop ends it early.
        """
        # From here the step can be saved, even when its weights do not reach the engines.
        self.version = Version(self.version.lineage, self.step)
        self.updating = False
        # A checkpoint contains the reference of its step,
        # so a restored step is not refreshed twice.
        if self.step > self.restored_step:
            await self.reference.refresh(self.services.policy, self.version)
        # ``collect`` raises it again; the step is still recorded and saved.
        with suppress(Preempted):
            await until_stopped(self.stopping, self.weight_sync.send(self.version))
        self.rollouts.synced(self.version)

    async def verify(self) -> None:
        """Run the log-prob check and the weight sync's self-test, before the first step."""
        self.timings.phase = "verify"
        probes = self.rollouts.scheduler.probe_tasks()
        verifying = WeightCheck(self.weight_sync).verify(self.version, probes, self.runner)
        await until_stopped(self.stopping, verifying)

    async def produce(self) -> None:
        """Start groups as the staleness bound admits them."""
        try:
            await self.rollouts.run(self.runner, self.finish)
        except BaseExceptionGroup as errors:
            error = decisive(errors)
            if isinstance(error, GraderBroken):
                raise await self.unusable(error) from None
            raise

    async def supervise(self) -> None:
        """Replace actors that died between calls, and limit the episodes of overloaded engines."""
        while True:
            await asyncio.sleep(self.config.recovery.health_every)
            for pool in self.services.pools:
                health = await pool.check()
                if pool is self.services.rollout:
                    self.runner.admission.observe(health)

    @timed("gen")
    async def collect(self) -> Collected:
        """Return the groups of this step, and the counts since the step before.

        The groups are ranked, cut to the target and fetched by the ranks, and have the advantages
        that the ranks got.
        """
        try:
            collected = await self.rollouts.collect(self.version, self.inherited, self.fetch_batch)
            # ``fetch_batch`` computed the same advantages for the ranks, but returned only what
            # was lost. They are computed again for the records and metrics.
            return replace(collected, groups=over_step(collected.groups, self.advantage))
        except GenerationBudgetSpent as error:
            end = await self.unusable(error)
            # The run ends with ``end``, whatever the evaluation raises.
            with suppress(RayloopError):
                await self.evaluate(ending=True)
            raise end from None

    async def unusable(self, error: RayloopError) -> RayloopError:
        """Return the error with an answer quoted, and write some rollouts of this step."""
        step = self.step + 1
        kept_rollouts = self.config.keep_rollouts
        count = None if kept_rollouts == "all" else kept_rollouts or 1
        groups = self.rollouts.finished.groups[:count]
        records = await self.dump(groups, step)
        collapse = self.rollouts.alarms.collapsed(self.config.policy.optimizer.lr)
        examples = list(quoted(records[:1], step, kept=kept_rollouts != 0))
        examples = examples or [self.reporter.quoted_before(EXAMPLE)]
        sentences = filter(None, [collapse, *examples])
        return type(error)(" ".join([str(error), *sentences]))

    async def fetch_batch(self, groups: tuple[Group, ...]) -> set[TrajectoryId]:
        """Let each rank fetch its share, before any rank waits for another.

        Returns the lost trajectories.
        """
        algorithm = self.config.algorithm
        fetching = self.services.policy.fetch(
            over_step(groups, self.advantage),
            seed=self.config.seed,
            version=self.version,
            nominal=algorithm.target,
            treat_as_on_policy=algorithm.replay.kind == "on_policy",
        )
        return await until_stopped(self.stopping, fetching)

    async def annotate(self, group: Group) -> Group:
        """Attach the reference's log-probs (as references) to the kept members.

        Members whose payloads are lost are excluded.
        """
        indices = [index for index, member in enumerate(group.members) if member.kept]
        if self.services.reference is None or not indices:
            return group

        step_timeout = self.config.policy.step_timeout
        group, lost_ids = await annotated(
            group, indices, self.services.reference, self.reference.folder, step_timeout
        )
        if lost_ids:
            self.rollouts.lose(lost_ids)
            group = without(group, lost_ids)
        return group

    @timed("update_actor")
    async def train(self, fetched_groups: tuple[Group, ...]) -> Mapping[str, float]:
        """Train one step on the shares that the ranks have fetched.

        The ranks get nothing here: ``fetched_groups`` are for the ledger and the reporter.
        """
        # Until the sync the weights belong to no complete step, and ``ended`` does not save them.
        self.updating = True
        await self.services.colocation.to_policy()
        results = await self.services.policy.all(PolicyRank.train)
        self.rollouts.ready.settle_trained(fetched_groups)
        # Before the weights of this step are synced or recorded.
        self.origin.check()
        self.reporter.trained(self.step + 1, fetched_groups)
        gaps: dict[TrajectoryId, Any] = {}
        sight: dict[TrajectoryId, Any] = {}
        for _, gaps_of_rank, sight_of_rank in results:
            gaps |= gaps_of_rank
            sight |= sight_of_rank
        self.reporter.gaps = gaps
        self.reporter.sight = sight
        if self.config.keep_rollouts == "all":
            self.reporter.tokens = await self.services.policy.all(PolicyRank.recorded)
        # The metrics are reduced over all ranks, so every rank returns the same.
        return results[0][0] | sight_metrics(sight)

    @timed("testing")
    async def evaluate(self, ending: bool = False) -> None:
        """Play the held-out tasks when they are due.

        They are due every ``evaluation.every`` steps, before the first and after the last step,
        and when the run is ``ending`` early.
        """
        await evaluate_held_out(self, ending=ending)

    async def record(self, report: Mapping[str, float], collected: Collected) -> None:
        """Record the metrics of the step, and a sample of its groups with texts and images."""
        self.ledger.check()
        self.rollouts.alarms.step(report)
        self.rollouts.alarms.looked(of_screens(self.reporter.sight))
        if self.rollouts.alarms.unseen:
            await self.observe()

        sample = sampled_groups(collected, self.config.keep_rollouts)
        records = await self.dump(sample, self.step)
        if self.config.keep_rollouts == "all":
            await keep_step(self.reporter, self.version, collected, records, self.warn)

        counts = self.ledger.counts()
        seconds = self.timings.take()
        runner_metrics = {**self.runner.metrics(), **self.history.lost_episodes.take()}
        metrics = self.reporter.step(self.step, report, collected, counts, seconds, runner_metrics)
        self.rollouts.alarms.recorded(metrics)
        if records:
            self.reporter.updates.append(("samples", completions(records)))

    def notice_skipped(self, report: Mapping[str, float]) -> None:
        """Emit the skipped updates. Raises Diverged when the last step changed nothing."""
        report_skipped(self.reporter, report, last=self.done)

    @timed("logprob_check")
    async def observe(self) -> None:
        """Compare the log-probs of fresh episodes, while the ranks hold no groups.

        Steps that train on nothing fresh cannot see drift.
        """
        tasks = self.rollouts.scheduler.probe_tasks()
        observing = WeightCheck(self.weight_sync).observe(tasks, self.runner, self.step)
        # The step is still recorded and saved after a stop.
        with suppress(Preempted):
            self.rollouts.alarms.compared(await until_stopped(self.stopping, observing))

    async def dump(self, groups: list[Group], step: int) -> list[RolloutRecord]:
        """Write the records of the groups' rollouts (``keep_rollouts``), and return them.

        A reward actor, which has the tokenizer, opens the payloads.
        """
        records, images = await described(self.runner, groups)
        if records and self.config.keep_rollouts:
            self.reporter.rollouts(step, records, images)
        return records

    @timed("save_checkpoint")
    async def checkpoint(self, last: bool = False) -> None:
        """Save a checkpoint when it is due, or when this was the ``last`` step.

        A save that fails is reported and tried again (``Saving.save``).
        """
        config = self.config
        ends = last or self.stopping.is_set()
        last = ends or self.done
        # A run that is about to end has half of its grace for storage
        # that refuses, and the other half for a save.
        patience = config.preemption.grace / 2 if ends else config.recovery.start_timeout

        # An error of an asynchronous save must end the run here, and not at its last step.
        await self.saving.settle(wait=last)
        stops_early = config.evaluation.patience is not None
        best = stops_early and self.reporter.is_best(self.step)
        is_periodic = self.step % config.checkpoint.every == 0
        is_due = last or best or self.saving.failed or is_periodic
        if not is_due or self.saving.on_disk(self.version):
            return

        marker = about(config, self.hashes, len(self.rollouts.dataset))
        # Each try of a save captures again: payloads may be lost while the storage refuses.
        state = partial(capture, self.state, self.rollouts.lose, config.policy.step_timeout)
        step = SavedStep(self.version, state, marker, best, last, patience)
        await self.saving.save(step, self.services.policy)

    # The driver's part of a checkpoint (docs/algorithm.md, section 12) ----------------------------

    def state(self) -> dict[str, Any]:
        """Return the present state as plain values.

        Payloads are ``HeldValue``, so that rollouts continue while they are fetched.
        """
        return {
            "step": self.step,
            "version": astuple(self.version),
            "inherited": list(self.inherited.items()),
            "ledger": self.ledger.state(),
            "rollouts": self.rollouts.state(),
            "reporter": self.reporter.state(),
        }

    def reinstate(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned. Groups that were in flight are issued again."""
        state = with_present_keys(state)
        version = Version(*state["version"])
        self.step = state["step"]
        # Trajectories of weights up to this checkpoint stay
        # valid in the new lineage; later ones are stale.
        self.inherited = {**dict(state["inherited"]), version.lineage: version.step}
        self.ledger.restore(state["ledger"])
        self.ledger.reissue_live()
        self.rollouts.restore(state["rollouts"], ray.put)
        self.reporter.restore(state["reporter"])

    def stop(self) -> None:
        """End as preempted.

        Finishes an update or checkpoint under way, abandons everything else, and saves.
        """
        self.stopping.set()
        self.rollouts.stop()
