"""The driver: GRPO with partial dynamic filtering over actors.

It moves references and decisions, never tensors. ``Driver.run`` and ``Driver.finish`` are the
algorithm; the methods that they call follow in the order of the calls.
"""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import ray

from rayloop.actors.handles import Handle
from rayloop.actors.lease import LeasesEngines
from rayloop.actors.policy import PolicyRank
from rayloop.actors.profiling import Profiles
from rayloop.actors.reference import ReferenceActor
from rayloop.cluster.loop.ending import ended
from rayloop.cluster.loop.refreshing import RefreshedReference
from rayloop.cluster.loop.saving import SavedStep, Saving, capture
from rayloop.cluster.loop.weight_sync import WeightSync
from rayloop.cluster.services import TrainingServices
from rayloop.cluster.supervision.attempts import EpisodeRunner, play
from rayloop.cluster.supervision.history import FailureHistory
from rayloop.cluster.supervision.pool import ATTEMPTS
from rayloop.cluster.supervision.watchdog import watch, watch_liveness
from rayloop.core import incidents
from rayloop.core.deadlines import Timings, background, decisive, timed, until_stopped
from rayloop.core.failures import (
    Diverged,
    GenerationBudgetSpent,
    GraderBroken,
    PolicyLost,
    Preempted,
    RayloopError,
)
from rayloop.core.groups import Group
from rayloop.core.ledger import Ledger
from rayloop.core.types import TrajectoryId, Version
from rayloop.grpo.advantage import build_advantage, over_step, with_advantages
from rayloop.grpo.filters import build_filters
from rayloop.grpo.selection import apply_filters
from rayloop.rollout.finished import without
from rayloop.rollout.manager import RolloutManager
from rayloop.run.checkpoint import NOTHING, Checkpoint, Origin
from rayloop.run.config import RunConfig
from rayloop.run.folder import RolloutRecord
from rayloop.run.held_out import blind, never_evaluated, on_training_rows, plays
from rayloop.run.identity import about, changes
from rayloop.run.order import held_out_rows, training_rows
from rayloop.run.preflight import beyond_positions, idle_settings
from rayloop.run.records.step_metrics import Collected
from rayloop.run.reporter import Reporter
from rayloop.view.completions import completions
from rayloop.view.words import EXAMPLE, quoted

REFERENCE_SHARE = 1 / 6
"""Of ``policy.step_timeout``: the reference computes the log-probs of one group, a small part of a
step.
"""


class Driver:
    """One per run; it lives in an actor (cluster/driver_actor.py), ``handle``, and owns all others.

    ``origin`` is the checkpoint to continue from; ``hashes`` are those of rayloop/run/identity.py,
    for the checkpoints.
    """

    def __init__(
        self,
        config: RunConfig,
        services: TrainingServices,
        reporter: Reporter,
        origin: Origin,
        handle: Handle[LeasesEngines],
        hashes: Mapping[str, str] = NOTHING,
    ) -> None:
        """Reads the data. Raises ConfigError."""
        self.config, self.services, self.reporter = config, services, reporter
        self.origin, self.hashes = origin, hashes

        self.step, self.version = 0, Version(0, 0)
        self.inherited: dict[int, int] = {}
        self.owes_evaluation = False
        self.stopping = asyncio.Event()
        self.lost = self.updating = False
        self.begun = 0

        self.timings = Timings()
        self.ledger = Ledger()
        self.weight_sync = WeightSync(config, services, reporter)

        self.profiles = Profiles(
            config,
            reporter.folder.path,
            services,
            lambda why: reporter.event(incidents.WarningEvent(why)),
        )
        self.checkpoints = origin.store(
            config.checkpoint.keep, lambda why: reporter.event(incidents.WarningEvent(why))
        )
        self.reference = RefreshedReference(config.reference.refresh_every, reporter.folder.path)
        self.saving = Saving(
            self.checkpoints,
            reporter.event,
            beside=config.checkpoint.asynchronous,
            timeout=config.policy.step_timeout,
            beforehand=self.reference.keep,
            stopping=self.stopping,
        )
        # One history for both: the player counts failures
        # in it, and the manager asks it when a group ends.
        self.history = FailureHistory(config.environment)

        self.rollouts = RolloutManager(
            config, self.ledger, training_rows(config, reporter), reporter, self.history
        )
        self.filters = build_filters(config.algorithm.filtering.filters)
        self.advantage = build_advantage(config.algorithm.advantage)

        known = (
            on_training_rows(config),
            never_evaluated(config),
            beyond_positions(config),
            *idle_settings(config),
        )
        for why in filter(None, known):
            reporter.event(incidents.WarningEvent(why))

        self.held_out = held_out_rows(config, reporter)
        self.player = EpisodeRunner(
            config, services, handle, reporter.event, self.rollouts.quarantine, self.history
        )
        # Taken before anything runs: a rebuilt policy that
        # has no checkpoint starts from this state again.
        self.initial = self.state()

    async def run(self) -> None:
        """Train from the newest checkpoint to the last step. Raises PolicyLost when a rank died."""
        # A restore waits for storage up to ``recovery.start_timeout``;
        # a stop must be able to end that wait.
        await until_stopped(self.stopping, self.restore())
        # The check below compares engines and trainer, so
        # the engines need the restored weights first.
        await self.sync_weights()
        await self.verify()
        async with background(
            self.produce(), self.supervise(), self.weight_sync.remake(lambda: self.version)
        ):  # a dead producer cancels collect(): no silent hang
            await self.evaluate()
            while not self.done:
                async with self.profiles.step(self.step + 1):
                    collected = await self.collect()
                    # ``remake`` sends under the current version; during
                    # an update it would send new weights as old ones.
                    async with self.weight_sync.making:
                        report = await self.train(collected.groups)
                        self.step += 1
                        await self.sync_weights()

                # Before the record: the metrics of this step include those of its evaluation.
                await self.evaluate()
                await self.record(report, collected)
                # Before the save: a step that diverged must not
                # become the checkpoint that a resume starts from.
                self.notice_skipped(report)
                await self.checkpoint()
                # what it refers to is let go before the next groups fill the object store
                del collected

    async def finish(self, group: Group) -> Group:
        """Called as soon as a group's last trajectory is scored; what it returns competes for the
        next step.
        """
        group = self.rollouts.finished.replay(
            group, self.step
        )  # ARPO, before the statistics; off by default
        group = with_advantages(group, self.advantage)  # over the scored members
        group = apply_filters(group, self.filters)  # may leave it partial, or empty
        return await self.annotate(group)  # skipped without a KL term; off the training path

    async def main(self) -> dict[str, Any]:
        """Start, run, and rebuild a lost policy.

        Returns the last step's summary; raises a RayloopError, Preempted after a stop.
        """
        try:
            logs = self.reporter.folder.path / "logs"
            emit, phase, recovery = (
                self.reporter.event,
                lambda: self.timings.phase,
                self.config.recovery,
            )
            async with background(
                watch(recovery, phase, emit, logs), watch_liveness(emit, recovery.health_timeout)
            ):
                await until_stopped(self.stopping, self.services.start(self.weight_sync.admit))
                await self.run_and_rebuild()
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
            if (end := await ended(self, error)) is not error:
                raise end from error
            raise
        finally:
            # First: a save under way still calls the ranks.
            await self.saving.abandon()
            self.services.stop()
            await self.reporter.loggers.close()

    @property
    def done(self) -> bool:
        """Whether all steps are trained, or held-out rewards stopped improving
        (``evaluation.patience``).
        """
        return self.step >= self.config.steps or self.reporter.given_up

    async def run_and_rebuild(self) -> None:
        """Run; when a rank of the policy is lost, replace all of them and run on from the newest
        checkpoint.
        """
        while True:
            try:
                if self.lost:
                    began = time.monotonic()
                    await until_stopped(
                        self.stopping,
                        self.services.sharing.start_ranks(self.services.policy.rebuild()),
                    )
                    seconds = round(time.monotonic() - began, 3)
                    self.reporter.event(
                        incidents.PolicyRebuilt(seconds, self.services.policy.places)
                    )
                return await self.services.policy.while_there(self.run())
            except PolicyLost as error:
                self.reporter.event(
                    incidents.PolicyLostEvent(str(error), self.services.policy.blamed)
                )
                self.lost = True
                # The wait for the budget may last as long as
                # ``recovery.start_timeout``; a stop ends it.
                await until_stopped(self.stopping, self.services.policy.afford(error))

    async def restore(self) -> None:
        """Begin a new lineage from a checkpoint (``Origin``), or from the start model."""
        with suppress(PolicyLost):  # whose ranks wrote it
            await self.saving.settle()
        checkpoint = await self.origin.restore(
            self.take, self.reporter.event, self.config.recovery.start_timeout
        )
        if checkpoint is None:
            self.saving.anew(self.origin.since)
            if gone := self.saving.latest():
                why = (
                    f"{gone} was saved below {self.checkpoints.folder}, and no checkpoint is left"
                    " there: the run begins at step 0"
                )
                self.reporter.event(incidents.WarningEvent(why))
            self.reinstate(self.initial)
            self.reference.restore(None)
        await self.rollouts.ready.complete(self.annotate)

        # After the restore: ``Origin.stopped`` takes a new
        # lineage for the sign that this start has trained.
        lineage = self.checkpoints.next_lineage()
        # The restored step decides which records belong to later steps and are moved away.
        self.reporter.begin(self.step, lineage, checkpoint)
        if checkpoint is not None and (changed := changes(checkpoint, self.config, self.hashes)):
            self.reporter.event(incidents.Changed(changed))
        if self.done:
            self.reporter.already_done(self.step)

        self.version, self.begun = Version(lineage, self.step), self.step
        self.lost = self.updating = False

        # A named older checkpoint does not count as saved:
        # with ``auto`` a resume would start elsewhere.
        if checkpoint is not None and checkpoint == self.checkpoints.find("auto"):
            self.saving.saved = self.version, checkpoint

    async def take(self, checkpoint: Checkpoint) -> None:
        """Restore the policy, a refreshed reference and the driver."""
        # The ranks first: they verify their files, and
        # the driver keeps its state when one is damaged.
        await self.services.policy.load(checkpoint.trainer, checkpoint.sums)
        await asyncio.to_thread(self.reference.restore, checkpoint)
        self.reinstate(checkpoint.state())

        # A checkpoint that this start saved may hold tasks that
        # failed after the repair: only the named one is cleared.
        earlier = checkpoint.lineage <= self.origin.since
        if self.config.checkpoint.named and earlier and (tasks := self.rollouts.clear_quarantine()):
            self.reporter.event(incidents.QuarantineCleared(tasks))

    @timed("update_weights")
    async def sync_weights(self) -> None:
        """Bring the weights of this step to the engines, and to the reference when due; a stop ends
        it early.
        """
        # From here the step can be saved, even when its weights do not reach the engines.
        self.version, self.updating = Version(self.version.lineage, self.step), False
        # A checkpoint contains the reference of its step,
        # so a restored step is not refreshed twice.
        if self.step > self.begun:
            await self.reference.refresh(self.services.policy, self.version)
        with suppress(Preempted):  # collect() raises it again; the step is still recorded and saved
            await until_stopped(self.stopping, self.weight_sync.send(self.version))
        self.rollouts.synced(self.version)

    async def verify(self) -> None:
        """The log-prob check, and the self-test of the weight sync, before the first step."""
        self.timings.phase = "verify"
        probes = self.rollouts.scheduler.probe_tasks()
        await until_stopped(
            self.stopping, self.weight_sync.verify(self.version, probes, self.player)
        )

    async def produce(self) -> None:
        """Start groups as the staleness bound admits them."""
        try:
            await self.rollouts.run(self.player, self.finish)
        except BaseExceptionGroup as errors:
            if isinstance(error := decisive(errors), GraderBroken):
                raise await self.unusable(error) from None
            raise

    async def supervise(self) -> None:
        """Replace actors that died between calls, and limit the episodes when engines have too much
        to do.
        """
        while True:
            await asyncio.sleep(self.config.recovery.health_every)
            for pool in self.services.pools:
                health = await pool.check()
                if pool is self.services.rollout:
                    self.player.admission.observe(health)

    @timed("gen")
    async def collect(self) -> Collected:
        """The groups of this step, ranked, cut to the target and fetched by the ranks, with the
        advantages that these have got, and the counts since the step before.
        """
        try:
            collected = await self.rollouts.collect(self.version, self.inherited, self.hold)
            # The ranks got these advantages in ``hold``;
            # records and metrics must show the same numbers.
            return replace(collected, groups=over_step(collected.groups, self.advantage))
        except GenerationBudgetSpent as error:
            end = await self.unusable(error)
            with suppress(RayloopError):  # the run ends with ``end``
                await self.evaluate(ending=True)
            raise end from None

    async def unusable(self, error: RayloopError) -> RayloopError:
        """The error with an answer quoted; some rollouts of this step are kept."""
        records = await self.dump(
            self.rollouts.finished.groups[: self.config.keep_rollouts or 1], self.step + 1
        )
        cause = self.rollouts.alarms.collapsed(self.config.policy.optimizer.lr)
        examples = [*quoted(records[:1], self.step + 1, self.config.keep_rollouts)] or [
            self.reporter.quoted_before(EXAMPLE)
        ]
        return type(error)(" ".join([str(error), *filter(None, [cause, *examples])]))

    async def hold(self, groups: tuple[Group, ...]) -> set[TrajectoryId]:
        """Each rank fetches its share, before any of them waits for another.

        Returns the lost trajectories.
        """
        c = self.config.algorithm
        fetched = self.services.policy.fetch(
            over_step(groups, self.advantage),
            seed=self.config.seed,
            version=self.version,
            nominal=c.target,
            treat_as_on_policy=c.replay.kind == "on_policy",
        )
        return await until_stopped(self.stopping, fetched)

    async def annotate(self, group: Group) -> Group:
        """Attach the reference's log-probs (as references) to the kept members; those whose
        payloads are lost are excluded.
        """
        kept = [(i, m) for i, m in enumerate(group.members) if m.kept]
        if self.services.reference is None or not kept:
            return group

        payloads = [member.payload for _, member in kept if member.payload is not None]
        reference = self.services.reference.within(
            self.config.policy.step_timeout * REFERENCE_SHARE, ATTEMPTS
        )
        # Absolute, since an actor's working directory may be another one.
        folder = None if self.reference.folder is None else str(self.reference.folder.resolve())
        lost, arrays = await reference.split(
            1 + len(kept), ReferenceActor.annotate, payloads, folder
        )
        group = group.map(
            {
                i: replace(group.members[i], reference=array)
                for (i, _), array in zip(kept, arrays, strict=True)
            }
        )

        if lost:
            ids = {kept[i][1].summary.id for i in lost}
            self.rollouts.lose(ids)
            group = without(group, ids)
        return group

    @timed("update_actor")
    async def train(self, groups: tuple[Group, ...]) -> Mapping[str, float]:
        """One step of the trainer, on the shares that the ranks have fetched."""
        # Until the sync the weights belong to no complete step, and ``ended`` does not save them.
        self.updating = True
        await self.services.sharing.to_policy()
        found = await self.services.policy.all(PolicyRank.train)
        self.rollouts.ready.settle_trained(groups)
        self.origin.check()  # before the weights of this step are synced or recorded
        self.reporter.trained(self.step + 1, groups)
        self.reporter.gaps = {
            trajectory: gaps for _, of_rank in found for trajectory, gaps in of_rank.items()
        }
        # The metrics are reduced over all ranks, so those of the first rank stand for every rank.
        return found[0][0]

    @timed("testing")
    async def evaluate(self, ending: bool = False) -> None:
        """Play the held-out tasks when due, before the first and after the last step, and when the
        run is ``ending`` early.
        """
        if not self.held_out:
            return
        setting, last = self.config.evaluation, self.done or ending
        due = self.step % setting.every == 0 and (setting.first or self.step > 0)
        if not (last or due) or (ending and due):
            return

        controls = setting.controls and (last or self.step == 0)
        images: dict[str, bytes] = {}
        asked = plays(self.config, self.held_out, controls=controls, samples=setting.samples)
        report = self.rollouts.alarms.held_out
        playing = play(
            asked,
            self.config,
            self.player,
            self.step,
            lambda item, found: images.update(found),
            report,
        )

        self.owes_evaluation = True
        try:
            items = await until_stopped(self.stopping, playing)
        except Preempted:
            return self.reporter.event(
                incidents.EvaluationStopped()
            )  # the run that continues begins with it

        self.owes_evaluation = False
        if controls:
            items += blind(self.config, self.rollouts.dataset, self.held_out)
        self.reporter.evaluated(self.step, items, images)
        self.rollouts.alarms.evaluated(
            first=self.step <= (0 if self.config.evaluation.first else self.config.evaluation.every)
        )

    async def record(self, report: Mapping[str, float], collected: Collected) -> None:
        """Metrics of the step, and a sample of its groups with texts and images, trained and
        dropped ones in turn.
        """
        self.ledger.check()
        self.rollouts.alarms.step(report)
        if self.rollouts.alarms.unseen:
            await self.observe()

        trained = {
            group.number: group for group in sorted(collected.groups, key=lambda g: g.number)
        }
        dropped = [
            g for g in sorted(collected.finished, key=lambda g: g.number) if g.number not in trained
        ]
        sample = [g for two in zip_longest(trained.values(), dropped) for g in two if g]
        records = await self.dump(sample[: self.config.keep_rollouts], self.step)

        ledger, seconds = self.ledger.counts(), self.timings.take()
        self.rollouts.alarms.recorded(
            self.reporter.step(self.step, report, collected, ledger, seconds, self.player.metrics())
        )
        if records:
            self.reporter.updates.append(("samples", completions(records)))

    def notice_skipped(self, report: Mapping[str, float]) -> None:
        """Say which updates of the step were skipped.

        Raises Diverged when the run would end with a step that changed nothing.
        """
        skipped, applied = (
            int(report.get(f"actor/{name}", 0)) for name in ("skipped_updates", "updates")
        )
        if skipped:
            self.reporter.event(incidents.UpdatesSkipped(skipped, skipped + applied))
        if skipped and not applied and self.done:
            why = "each update of the last step was skipped, since its gradient was not finite"
            raise Diverged(f"{why}. Lower policy.optimizer.lr, or inspect the last batch")

    @timed("logprob_check")
    async def observe(self) -> None:
        """Steps that train on nothing fresh cannot see drift: compare fresh episodes, while the
        ranks hold no groups.
        """
        looked = self.weight_sync.observe(
            self.rollouts.scheduler.probe_tasks(), self.player, self.step
        )
        with suppress(Preempted):  # the step is still recorded and saved
            self.rollouts.alarms.compared(await until_stopped(self.stopping, looked))

    async def dump(self, groups: list[Group], step: int) -> list[RolloutRecord]:
        """A reward actor, which has the tokenizer, opens the payloads; the driver only writes the
        records (``keep_rollouts``).
        """
        described = await asyncio.gather(*(self.player.rewards.describe(group) for group in groups))
        records = [record for rows, _ in described for record in rows]
        images = {sha: data for _, found in described for sha, data in found.items()}
        if records and self.config.keep_rollouts:
            self.reporter.rollouts(step, records, images)
        return records

    @timed("save_checkpoint")
    async def checkpoint(self, last: bool = False) -> None:
        """When due, or when this was the ``last`` step.

        A failed save is reported and tried again (``Saving.save``).
        """
        c, ends = self.config.checkpoint, last or self.stopping.is_set()
        last = ends or self.done
        # A run that is to end has half of its grace for storage that refuses, and the other half
        # for a save.
        patience = self.config.preemption.grace / 2 if ends else self.config.recovery.start_timeout

        # What a save beside training raised must end the run here, and not at its last step.
        await self.saving.settle(wait=last)
        best = self.config.evaluation.patience is not None and self.reporter.is_best(self.step)
        due = last or best or self.saving.failed or self.step % c.every == 0
        if not due or self.saving.on_disk(self.version):
            return
        ours = about(self.config, self.hashes, len(self.rollouts.dataset))
        # Each try of a save captures again: payloads may be lost while the storage refuses.
        state = partial(capture, self.state, self.rollouts.lose, self.config.policy.step_timeout)
        await self.saving.save(
            SavedStep(self.version, state, ours, best, last, patience), self.services.policy
        )

    # The driver's part of a checkpoint (docs/algorithm.md, section 12) ----------------------------

    def state(self) -> dict[str, Any]:
        """The present state as plain values, with ``HeldValue`` for payloads, so that rollouts go
        on while these are fetched.
        """
        return {
            "step": self.step,
            "version": astuple(self.version),
            "inherited": list(self.inherited.items()),
            "ledger": self.ledger.state(),
            "production": self.rollouts.state(),
            "reporter": self.reporter.state(),
        }

    def reinstate(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned. Groups that were in flight will be issued again."""
        version = Version(*state["version"])
        self.step = state["step"]
        # Trajectories of weights up to this checkpoint stay
        # valid in the new lineage; later ones are stale.
        self.inherited = {**dict(state["inherited"]), version.lineage: version.step}
        self.ledger.restore(state["ledger"])
        self.ledger.reissue_live()
        self.rollouts.restore(state["production"], ray.put)
        self.reporter.restore(state["reporter"])

    def stop(self) -> None:
        """End as preempted: finish an update or checkpoint under way, abandon everything else, and
        save.
        """
        self.stopping.set()
        self.rollouts.stop()
