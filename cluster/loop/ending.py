"""How a run ends before its last step.

It is saved if possible, and its end is recorded with the step that a resume starts from.
"""

import asyncio
import logging
import traceback
from contextlib import suppress
from typing import Protocol

from rayloop.actors.failures import brief, typed
from rayloop.cluster.loop.saving import Saving
from rayloop.core import events
from rayloop.core.failures import (
    START_AGAIN_EXIT_CODE,
    AlarmStopped,
    CheckpointError,
    Diverged,
    LedgerError,
    LogprobMismatch,
    MachineFailed,
    NotSaved,
    Preempted,
    RayloopError,
    RunTaken,
    Unforeseen,
    WeightSyncError,
)
from rayloop.core.ledger import Ledger
from rayloop.core.types import Version
from rayloop.run.config import RunConfig
from rayloop.run.origin import Origin
from rayloop.run.reporter import Reporter

logger = logging.getLogger(__name__)

SUSPECT = (Diverged, LedgerError, LogprobMismatch, WeightSyncError, AlarmStopped, RunTaken)
"""Errors after which a resume starts from an earlier step.

Weights or counts cannot be trusted, or another process has the run.
"""


class EndingRun(Protocol):
    """The driver at its end.

    ``restored_step``: the step of the last restore. ``policy_lost``: a rank died, and no step was
    restored since.
    """

    config: RunConfig
    reporter: Reporter
    origin: Origin
    ledger: Ledger
    saving: Saving
    stopping: asyncio.Event
    step: int
    version: Version
    restored_step: int
    policy_lost: bool
    updating: bool

    async def checkpoint(self, last: bool = False) -> None:
        """Save this step when it is due, and in any case when it is the ``last``."""


async def ended(run: EndingRun, error: Exception) -> RayloopError:
    """Record the end of a run by ``error``, and save what can be saved.

    Returns the typed error, with a note about the checkpoint; after a stop Preempted when this step
    is saved, else NotSaved, or one of ``SUSPECT``.
    """
    end = typed(error)
    # A stop cancels calls on its way, and their errors
    # belong to it, unless they make the step untrustworthy.
    stopped = isinstance(end, Preempted) or (run.stopping.is_set() and not isinstance(end, SUSPECT))
    if stopped and not isinstance(end, Preempted):
        logger.warning("while the run stopped", exc_info=error)

    restored = run.version.lineage > 0
    if stopped and not restored:
        return _recorded(run, run.origin.stopped(run.reporter.folder.last_step), error)
    # Before the version is that of the restored step, a checkpoint would have the version 0.0 and
    # replace the one it came from.
    saves = restored and (stopped or run.step > run.restored_step)
    reason = await _save(run, end) if saves else ""

    # The disk decides: an asynchronous save may have written this step before the end began.
    on_disk = run.saving.on_disk(run.version)
    if saves and not on_disk and not reason:
        reason = f"its checkpoint was written, but {run.origin.folder} does not have it in full now"
    if stopped:
        where = f"stopped at step {run.step} of {run.config.steps}"
        resume = run.origin.again()
        if on_disk:
            end = Preempted(f"{where}, saved; {resume}")
        else:
            end = NotSaved(f"{where}, not saved: {reason}; {resume}")
    elif run.step or end.exit_code == START_AGAIN_EXIT_CODE:
        if isinstance(end, Unforeseen):
            end.add_note("its traceback is in events.jsonl")
        outcome = ""
        if on_disk:
            outcome = f"step {run.step} is saved; "
        elif reason:
            outcome = f"step {run.step} is not saved: {reason}; "
        end.add_note(outcome + run.origin.again())

    return _recorded(run, end, error)


async def _save(run: EndingRun, end: RayloopError) -> str:
    """Save the step, unless it is being written or on disk.

    Returns why it could not be saved, or "".
    """
    try:
        # One save at a time: the one under way counts against the same grace.
        async with asyncio.timeout(run.config.preemption.grace):
            await run.saving.settle()
            reason = _unfit(run, end)
            if reason:
                return reason
            await run.checkpoint(last=True)
    except TimeoutError:
        grace = run.config.preemption.grace
        return f"the checkpoint was not written within preemption.grace ({grace:g} s)"
    except Exception as error:
        # The run ends because of ``end``; that it could not be saved is only a part of the message.
        return brief(error)
    return ""


def _unfit(run: EndingRun, end: RayloopError) -> str:
    """Why the step cannot be saved, or ""."""
    if run.policy_lost:
        return "the policy was lost, and its replacement had not been restored"
    if run.updating:
        return "its update had begun and did not end"
    # The save has been tried often enough.
    if isinstance(end, CheckpointError):
        return "its checkpoint could not be written"
    if isinstance(end, SUSPECT):
        return f"it is not to be trusted after {type(end).__name__}"
    return ""


def _recorded(run: EndingRun, end: RayloopError, error: Exception) -> RayloopError:
    """Write the end to the run folder. A full disk does not hide why the run ends."""
    with suppress(OSError):
        if isinstance(end, Preempted):
            run.reporter.event(events.PreemptedEvent(run.ledger.counts()))
        else:
            trace = ""
            if isinstance(end, Unforeseen | MachineFailed):
                trace = "".join(traceback.format_exception(error))
            run.reporter.failed(end, run.ledger.counts(), trace)
    return end
