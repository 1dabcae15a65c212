"""The checkpoint that a run continues from."""

import asyncio
import errno
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rayloop.core import incidents
from rayloop.core.events import Emit
from rayloop.core.failures import (
    CheckpointError,
    ConfigError,
    Damaged,
    NotSaved,
    Preempted,
    RayloopError,
)
from rayloop.core.files import STORAGE_RETRY_AFTER_S, kind_of, mount_of, refused, unused
from rayloop.run.checkpoint import DAMAGED, Checkpoint, CheckpointStore
from rayloop.run.lock import OPEN, Fence

Take = Callable[[Checkpoint], Awaitable[None]]
"""Continues a run from a checkpoint."""


@dataclass(frozen=True)
class Origin:
    """What one start of a run continues from.

    ``since``: how many lineages had begun before it. A checkpoint that this start has saved itself
    is preferred to ``resume``. ``fence`` shows whether the run still is this start's.
    """

    folder: Path
    resume: str
    since: int
    fence: Fence = OPEN

    @classmethod
    def of(cls, folder: Path, resume: str, since: int | None = None, fence: Fence = OPEN) -> Self:
        """The origin of a start that is made now, for which ``folder`` is made.

        ``since``: the origin of an earlier start.
        """
        if since is None:
            folder.mkdir(parents=True, exist_ok=True)
            since = CheckpointStore(folder, keep=1).lineages()
        return cls(folder, resume, since, fence)

    def store(self, keep: int, warn: Callable[[str], None]) -> "CheckpointStore":
        """Where this start saves."""
        return CheckpointStore(self.folder, keep, warn, self.fence)

    def check(self) -> None:
        """Raises RunTaken when another process has taken the run.

        Raises nothing when the storage does not answer.
        """
        with suppress(OSError):
            self.fence.check()

    def find(self) -> Checkpoint | None:
        """Raises ConfigError when a named folder holds no complete checkpoint."""
        return next(iter(self.candidates()), None)

    def _found(self) -> Checkpoint | None:
        """As ``find``. Raises OSError when the folder, which this start has made, is missing."""
        if not self.folder.is_dir():
            message = (
                "it is not there; is its storage mounted at"
                f" {self.fence.mount or mount_of(self.folder)}?"
            )
            raise FileNotFoundError(errno.ENOENT, message, str(self.folder))
        return self.find()

    def candidates(self) -> list[Checkpoint]:
        """What to continue from, and what when that is damaged, one after the other.

        Raises ConfigError as ``find``.
        """
        store = CheckpointStore(self.folder, keep=1)
        checkpoints = store.newest_first()
        if self.resume == "auto":
            return checkpoints
        own_checkpoints = [
            checkpoint for checkpoint in checkpoints if checkpoint.lineage > self.since
        ]
        # The named folder may be removed once this start has saved its own checkpoint.
        with suppress(*([ConfigError] if own_checkpoints else [])):
            own_checkpoints += filter(None, [store.find(self.resume)])
        return own_checkpoints

    async def restore(self, take: Take, emit: Emit, patience: float = 0.0) -> Checkpoint | None:
        """Let ``take`` continue from the newest intact candidate; None without any.

        Damaged ones are reported and renamed. What the storage refuses is asked for again for
        ``patience`` seconds; then it is reported, and keeps its name.
        """
        until = time.monotonic() + patience
        while True:
            waits = time.monotonic() < until
            failed = CheckpointStore(self.folder, keep=1).damaged()
            checkpoint = await self._first(take, failed, waits)
            if not waits or not any(refused(why) for _, why in failed):
                break
            await asyncio.sleep(STORAGE_RETRY_AFTER_S)

        if checkpoint is None and failed:
            raise kind_of(*(why for _, why in failed))(_none_left(failed)) from failed[0][1]
        for bad, why in failed:
            emit(
                incidents.CheckpointDamaged(
                    bad.name, why.path if isinstance(why, Damaged) else "", why=str(why)
                )
            )
            if not refused(why):
                # The new name only spares the next start a look at the same damage.
                with suppress(OSError):
                    os.replace(bad, unused(bad.with_name(bad.name + DAMAGED)))
        return checkpoint

    async def _first(
        self, take: Take, failed: list[tuple[Path, CheckpointError]], waits: bool
    ) -> Checkpoint | None:
        """The first that ``take`` took; ``failed`` gets the ones before.

        ``waits``: no other is tried once the storage has refused one.
        """
        for checkpoint in self.candidates():
            if waits and any(refused(why) for _, why in failed):
                return None
            try:
                await take(checkpoint)
                return checkpoint
            except CheckpointError as error:
                failed.append(
                    (checkpoint.folder, getattr(error, "cause", error))
                )  # without Ray's wrapping
            except (KeyError, TypeError, ValueError) as error:
                failed.append(
                    (
                        checkpoint.folder,
                        CheckpointError(f"this is not a state of a driver: {error!r}"),
                    )
                )
        return None

    def again(self) -> str:
        """How to continue, and from which checkpoint, in words.

        The same command would begin at a named checkpoint again.
        """
        try:
            checkpoint = self._found()
        except (OSError, ConfigError) as error:
            return (
                "run again to continue from the newest checkpoint; which one that is cannot be"
                f" seen now: {error}"
            )
        start = "the beginning: there is no checkpoint"
        if checkpoint is not None:
            start = f"step {checkpoint.step} ({checkpoint.folder.name})"
        return f"{self._run(checkpoint)} to continue from {start}"

    def _run(self, found: Checkpoint | None) -> str:
        is_own = found is not None and found.lineage > self.since
        is_automatic = self.resume == "auto" or (self.resume != "never" and not is_own)
        return "run again" if is_automatic else "run again with checkpoint.resume=auto"

    def stopped(self, last_step: Callable[[], int]) -> RayloopError:
        """The error of a run that stops while nothing can be saved.

        Preempted when there is a checkpoint, else NotSaved.
        """
        try:
            return self._stopped(last_step())
        except (OSError, ConfigError) as error:
            return NotSaved(
                f"stopped while nothing could be saved, or looked up: {error}; run again to"
                " continue"
            )

    def _stopped(self, last_step: int) -> RayloopError:
        checkpoint = self._found()
        began = CheckpointStore(self.folder, keep=1).lineages() > self.since
        if began and last_step > (checkpoint.step if checkpoint else 0):
            return NotSaved(
                f"stopped after step {last_step}, not saved: the driver had died; {self.again()}"
            )
        if checkpoint is None:
            return NotSaved(
                "stopped before anything was trained: there is nothing to save;"
                f" {self._run(checkpoint)} to start over"
            )
        return Preempted(
            f"stopped while nothing was being trained: there was nothing to save; {self.again()}"
        )


def _none_left(failed: list[tuple[Path, CheckpointError]]) -> str:
    """What a start says when none of the checkpoints can be restored."""
    (newest, reason), *others = failed
    rest = "; there is no other one to take its place"
    if others:
        rest = f", nor can {len(others)} more"
    return (
        f"{newest} cannot be restored: {reason}{rest}. Nothing was changed: repair the storage and"
        " start again, name another checkpoint with checkpoint.resume=FOLDER, or start over under"
        " another name=..."
    )
