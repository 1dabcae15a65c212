"""Saving the steps of a run: one at a time, and beside training where ``checkpoint.asynchronous`` says so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from rayloop.core import events, incidents
from rayloop.core.deadlines import bounded
from rayloop.core.events import Event
from rayloop.core.failures import CheckpointError, CheckpointStorageFailed
from rayloop.core.protocols import Checksums
from rayloop.core.types import Version
from rayloop.run.checkpoint import FAILED_SAVES, Checkpoint, CheckpointStore, complete


class Saves(Protocol):
    """The policy (``PolicyGroup``)."""

    async def save(self, folder: str) -> Checksums:
        """Write what the ranks hold."""

    async def save_beside(self, folder: str, copied: asyncio.Event) -> Checksums:
        """The same from a copy, while they go on from ``copied`` being set."""


@dataclass(frozen=True)
class SavedStep:
    """What is to be saved. ``state`` captures the driver's part, ``about`` goes into the marker, ``best`` is kept."""

    version: Version
    state: Callable[[], Awaitable[Any]]
    about: Mapping[str, Any]
    best: bool
    last: bool
    """Nothing is trained after it: it is waited for, and cannot be tried again at the next step."""


class Saving:
    """``saved``: what was saved last. ``failed``: saves in a row that could not be written."""

    def __init__(self, store: CheckpointStore, emit: Callable[[Event, int], None], *, beside: bool, timeout: float) -> None:
        """``beside``: training goes on meanwhile. ``timeout``: seconds that one save may take."""
        self.saved: tuple[Version, Checkpoint] | None = None
        self.failed = 0
        self._store, self._emit, self._beside, self._timeout = store, emit, beside, timeout
        self._under_way: asyncio.Task[None] | None = None

    def anew(self, since: int) -> None:
        """Raises CheckpointError unless a run that finds no checkpoint may begin at step 0: this start has saved none. ``since``:
        lineages that had begun before it. A driver that took another one's place reads in ``latest`` what that one saved."""
        newest = self.saved[1].folder.name if self.saved else ""
        if not newest and self._store.lineages() > since:
            newest = self.latest()
        if newest:
            raise CheckpointError(
                f"{self._store.folder}: {newest} was saved there, and no checkpoint is left. Nothing was begun anew: bring the "
                "folder back and start again, name another checkpoint with checkpoint.resume=FOLDER, or begin anew under another "
                "name=..."
            )

    def latest(self) -> str:
        """The name of the checkpoint that was saved last, be it there or not; "" when none was, or the storage does not say."""
        with suppress(OSError):
            return (self._store.folder / "latest").read_text(encoding="utf-8")
        return ""

    def on_disk(self, version: Version) -> bool:
        """Whether there is a complete checkpoint of it."""
        return self.saved is not None and self.saved[0] == version and complete(self.saved[1].folder) is not None

    async def save(self, step: SavedStep, policy: Saves) -> None:
        """Save a step, when the one before is written. Returns when the ranks may go on, of the last one when it is on disk.

        A save that fails is recorded; the caller tries again at the next step. Raises CheckpointError when it was the last or
        ``FAILED_SAVES`` failed before it; what else went wrong, such as PolicyLost, now or from ``settle``.
        """
        await self.settle()
        copied = asyncio.Event()
        self._under_way = asyncio.create_task(self._write(step, policy, copied))
        self._under_way.add_done_callback(lambda _: copied.set())
        if self._beside and not step.last:
            await copied.wait()
        await self.settle(wait=not self._beside or step.last)

    async def settle(self, *, wait: bool = True) -> None:
        """Return when nothing is being written; without ``wait`` at once. Raises what went wrong with what was."""
        if self._under_way is None or not (wait or self._under_way.done()):
            return
        late = CheckpointStorageFailed(f"a checkpoint was not written within {self._timeout:g} s (policy.step_timeout)")
        await bounded(self._timeout, asyncio.wait({self._under_way}), late)
        ended, self._under_way = self._under_way, None
        ended.result()

    async def abandon(self) -> None:
        """What is still being written will not be complete."""
        if self._under_way is not None:
            self._under_way.cancel()
            await asyncio.wait({self._under_way}, timeout=self._timeout)

    async def _write(self, step: SavedStep, policy: Saves, copied: asyncio.Event) -> None:
        began, number = time.monotonic(), step.version.step
        write = partial(policy.save_beside, copied=copied) if self._beside and not step.last else policy.save
        try:
            saved = await self._store.save(number, await step.state(), write, step.about, best=step.best)
        except CheckpointError as error:
            self.failed += 1
            self._emit(incidents.CheckpointFailed(self.failed, why=str(error)), number)
            if self.failed > FAILED_SAVES or step.last:
                raise
            return
        self.failed, self.saved = 0, (step.version, saved)
        self._emit(events.CheckpointEvent(saved.folder.name, round(time.monotonic() - began, 3)), number)
