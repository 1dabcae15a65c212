"""Saving the steps of a run, one at a time (docs/algorithm.md, section 12).

With ``checkpoint.asynchronous`` a step is saved during training.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rayloop.actors.failures import object_lost
from rayloop.cluster.supervision.policy_group import PolicyGroup
from rayloop.core import events, incidents
from rayloop.core.deadlines import WAITS, bounded, with_deadline
from rayloop.core.events import Event
from rayloop.core.failures import CheckpointError, CheckpointStorageFailed, WorkerLost
from rayloop.core.files import STORAGE_RETRY_AFTER_S, Checksum
from rayloop.core.types import TrajectoryId, Version
from rayloop.rollout.plain import HeldValue, Plain, filled, held
from rayloop.run.checkpoint import FAILED_SAVES, Checkpoint, CheckpointStore, complete


@dataclass(frozen=True)
class SavedStep:
    """A step to save.

    ``state``: the driver's part; ``about``: the content of the marker; ``best``: whether it is
    kept; ``last``: whether no step follows. ``patience``: seconds of failures in a row after which
    storage that refuses is given up.
    """

    version: Version
    state: Callable[[], Awaitable[Any]]
    about: Mapping[str, Any]
    best: bool
    last: bool
    patience: float


class Saving:
    """Saves the steps of a run.

    ``saved``: the step that was saved last. ``failed``: saves in a row that could not be written,
    the last one because of ``trouble``.
    """

    def __init__(
        self,
        store: CheckpointStore,
        emit: Callable[[Event, int], None],
        *,
        beside: bool,
        timeout: float,
        beforehand: Callable[[Path], None] = lambda folder: None,
        stopping: asyncio.Event | None = None,
    ) -> None:
        """Save into ``store``.

        ``beside``: training continues during a save. ``timeout``: seconds that one save may take.
        ``beforehand`` adds its files to each checkpoint's folder, before training continues.
        ``stopping``: set when the run is asked to end.
        """
        self.saved: tuple[Version, Checkpoint] | None = None
        self.failed = 0
        self.trouble: CheckpointError | None = None
        self._failing_since = 0.0
        self._stopping = stopping or asyncio.Event()
        self._store = store
        self._emit = emit
        self._beside = beside
        self._timeout = timeout
        self._beforehand = beforehand
        self._under_way: asyncio.Task[None] | None = None

    def check_may_begin(self, since: int) -> None:
        """Check that the run may begin at step 0.

        Raises CheckpointError when this start has saved a checkpoint, which is missing. ``since``:
        lineages that had begun before this start. A driver that replaces another one reads in
        ``latest`` what that one saved.
        """
        newest = self.saved[1].folder.name if self.saved else ""
        if not newest and self._store.lineages() > since:
            newest = self.latest()
        if newest:
            raise CheckpointError(
                f"{self._store.folder}: {newest} was saved there, and no checkpoint is left."
                " No new run was begun: bring the folder back and start again, name another"
                " checkpoint with checkpoint.resume=FOLDER, or begin a new run under another"
                " name=..."
            )

    def latest(self) -> str:
        """The name of the checkpoint that was saved last, even if it is missing.

        "" when it is not known.
        """
        with suppress(OSError):
            return (self._store.folder / "latest").read_text(encoding="utf-8")
        return ""

    def on_disk(self, version: Version) -> bool:
        """Whether there is a complete checkpoint of ``version``."""
        return (
            self.saved is not None
            and self.saved[0] == version
            and complete(self.saved[1].folder) is not None
        )

    async def save(self, step: SavedStep, policy: PolicyGroup) -> None:
        """Save a step.

        Returns when the ranks may continue; for the last step, when it is on disk.

        A save that fails is recorded, and tried again at the next step. After ``FAILED_SAVES``
        failures, and for the last step, training waits here while it is tried again: storage that
        comes back is worth more than steps that would be lost. Raises its CheckpointError
        ``step.patience`` seconds after the first failure; another error now or from ``settle``.
        """
        await self.settle()
        while True:
            waits = step.last or self.failed >= FAILED_SAVES
            await self._begin(step, policy, beside=self._beside and not waits)
            if self.trouble is None or not waits:
                return
            if asyncio.get_running_loop().time() - self._failing_since >= step.patience:
                raise self.trouble
            await asyncio.sleep(STORAGE_RETRY_AFTER_S)
            # The event says what the run waits for, so this is not a stall.
            WAITS.moved = time.monotonic()
            if self._stopping.is_set() and not step.last:
                # The end of the run tries once more.
                return

    async def _begin(self, step: SavedStep, policy: PolicyGroup, *, beside: bool) -> None:
        """Begin to save.

        Returns when the ranks may continue: with ``beside`` when they have copied what they write.
        """
        copied = asyncio.Event()
        self._under_way = asyncio.create_task(self._write(step, policy, copied if beside else None))
        # Also after a failed save: otherwise training would wait for the copy forever.
        self._under_way.add_done_callback(lambda _: copied.set())
        if beside:
            await copied.wait()
        await self.settle(wait=not beside)

    async def settle(self, *, wait: bool = True) -> None:
        """Return when nothing is being written; without ``wait`` at once.

        Raises the error of the save that has ended.
        """
        if self._under_way is None or not (wait or self._under_way.done()):
            return
        timeout_error = CheckpointStorageFailed(
            f"a checkpoint was not written within {self._timeout:g} s (policy.step_timeout)"
        )
        # ``asyncio.wait`` leaves the save running at the
        # deadline; awaiting the task would cancel it.
        await bounded(self._timeout, asyncio.wait({self._under_way}), timeout_error)
        # Forgotten before its error is raised, so that a second call does not raise it again.
        save = self._under_way
        self._under_way = None
        save.result()

    async def abandon(self) -> None:
        """Stop the save that is under way."""
        if self._under_way is not None:
            self._under_way.cancel()
            # ``asyncio.wait`` does not raise the save's
            # error: the run already ends for another reason.
            await asyncio.wait({self._under_way}, timeout=self._timeout)

    async def _write(
        self, step: SavedStep, policy: PolicyGroup, copied: asyncio.Event | None
    ) -> None:
        """Write a step. ``copied`` is set when the ranks may continue; None: they wait."""
        began = time.monotonic()
        number = step.version.step
        write = policy.save if copied is None else partial(policy.save_beside, copied=copied)

        async def trainer(folder: str) -> Mapping[str, Checksum]:
            await asyncio.to_thread(self._beforehand, Path(folder).parent)
            return await write(folder)

        try:
            state = await step.state()
            checkpoint = await self._store.save(number, state, trainer, step.about, best=step.best)
        except CheckpointError as error:
            # Only these failures are tried again; ``settle``
            # raises all others, such as PolicyLost and RunTaken.
            if not self.failed:
                self._failing_since = asyncio.get_running_loop().time()
            self.failed += 1
            self.trouble = error
            # Further failures are the same every few seconds.
            if self.failed <= FAILED_SAVES + 1:
                self._emit(incidents.CheckpointFailed(self.failed, why=str(error)), number)
            return

        self.failed = 0
        self.trouble = None
        self.saved = (step.version, checkpoint)
        seconds = round(time.monotonic() - began, 3)
        self._emit(events.CheckpointEvent(checkpoint.folder.name, seconds), number)


async def capture(
    state: Callable[[], Plain], lose: Callable[[Collection[TrajectoryId]], None], timeout: float
) -> Plain:
    """A state with its payloads in it; the run continues while they are fetched.

    ``lose`` gets the trajectories whose payloads are lost, and then a later state is taken. Raises
    CheckpointError when payloads do not arrive within ``timeout`` seconds.
    """
    # Outside the loop: values that arrived are not fetched again for the later state.
    values: dict[Any, Any] = {}
    while True:
        snapshot = state()
        try:
            lost_ids = await with_deadline(
                timeout, fetch(held(snapshot), values), "payloads for the checkpoint"
            )
        except WorkerLost as error:
            raise CheckpointError(str(error)) from error
        if not lost_ids:
            return filled(snapshot, values.__getitem__)
        lose(lost_ids)


async def fetch(wanted: Iterable[HeldValue], values: dict[Any, Any]) -> set[TrajectoryId]:
    """Add the values of the references to ``values``.

    Returns the trajectories of which something is lost.
    """
    # With replay several members hold one payload, which is fetched once.
    pairs = {(value.ref, value.id) for value in wanted}
    missing = {ref for ref, _ in pairs} - values.keys()

    async def fetch_one(ref: Any) -> None:
        try:
            values[ref] = await ref
        except Exception as error:
            if not object_lost(error):
                raise

    await asyncio.gather(*map(fetch_one, missing))
    return {id for ref, id in pairs if ref not in values}
