"""The restore of a run, from a checkpoint or from the start model."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from rayloop.cluster.loop.refreshing import RefreshedReference
from rayloop.cluster.loop.saving import Saving
from rayloop.cluster.services import TrainingServices
from rayloop.core import incidents
from rayloop.core.failures import PolicyLost
from rayloop.core.groups import Group
from rayloop.core.types import Version
from rayloop.rollout.manager import RolloutManager
from rayloop.run.checkpoint import Checkpoint, CheckpointStore
from rayloop.run.config import RunConfig
from rayloop.run.identity import changes
from rayloop.run.origin import Origin
from rayloop.run.reporter import Reporter


class RestoringRun(Protocol):
    """The parts of the driver that a restore uses.

    ``initial``: the state before the first step. ``restored_step``: the step of the last restore.
    ``policy_lost``: a rank died, and no step was restored since.
    """

    config: RunConfig
    services: TrainingServices
    reporter: Reporter
    origin: Origin
    hashes: Mapping[str, str]
    rollouts: RolloutManager
    reference: RefreshedReference
    checkpoints: CheckpointStore
    saving: Saving
    initial: dict[str, Any]
    step: int
    version: Version
    restored_step: int
    policy_lost: bool
    updating: bool

    @property
    def done(self) -> bool:
        """Whether no further step is trained."""

    def warn(self, reason: str) -> None:
        """Emit a warning."""

    def reinstate(self, state: Mapping[str, Any]) -> None:
        """Restore the driver's part of a checkpoint."""

    async def annotate(self, group: Group) -> Group:
        """Attach the reference's log-probs to the kept members."""


async def restore(run: RestoringRun) -> None:
    """Begin a new lineage from a checkpoint (``Origin``), or from the start model."""
    # A save under way was written by ranks that may be lost.
    with suppress(PolicyLost):
        await run.saving.settle()
    checkpoint = await run.origin.restore(
        partial(_take, run), run.reporter.event, run.config.recovery.start_timeout
    )
    if checkpoint is None:
        _begin_without_checkpoint(run)
    await run.rollouts.ready.complete(run.annotate)

    # After the restore: ``Origin.stopped`` takes a new
    # lineage for the sign that this start has trained.
    lineage = run.checkpoints.next_lineage()
    # The restored step decides which records belong to later steps and are moved away.
    run.reporter.begin(run.step, lineage, checkpoint)
    if checkpoint is not None:
        differences = changes(checkpoint, run.config, run.hashes)
        if differences:
            run.reporter.event(incidents.Changed(differences))
    if run.done:
        run.reporter.already_done(run.step)

    run.version = Version(lineage, run.step)
    run.restored_step = run.step
    run.policy_lost = False
    run.updating = False

    # A named older checkpoint does not count as saved:
    # with ``auto`` a resume would start elsewhere.
    if checkpoint is not None and checkpoint == run.checkpoints.find("auto"):
        run.saving.saved = run.version, checkpoint


async def _take(run: RestoringRun, checkpoint: Checkpoint) -> None:
    """Restore the policy, a refreshed reference and the driver."""
    # The ranks first: they verify their files, and
    # the driver keeps its state when one is damaged.
    await run.services.policy.load(checkpoint.trainer, checkpoint.sums)
    await asyncio.to_thread(run.reference.restore, checkpoint)
    run.reinstate(checkpoint.state())

    # A checkpoint that this start saved may hold tasks that
    # failed after the repair: only the named one is cleared.
    is_earlier = checkpoint.lineage <= run.origin.since
    if run.config.checkpoint.named and is_earlier:
        tasks = run.rollouts.clear_quarantine()
        if tasks:
            run.reporter.event(incidents.QuarantineCleared(tasks))


def _begin_without_checkpoint(run: RestoringRun) -> None:
    """Return to the state before the first step.

    Raises CheckpointError (``Saving.check_may_begin``).
    """
    run.saving.check_may_begin(run.origin.since)
    latest = run.saving.latest()
    if latest:
        run.warn(
            f"{latest} was saved below {run.checkpoints.folder}, and no checkpoint is left"
            " there: the run begins at step 0"
        )
    run.reinstate(run.initial)
    run.reference.restore(None)
