"""Saving the steps of a run, one at a time, beside training with ``checkpoint.asynchronous``
(docs/algorithm.md, section 12).
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
from rayloop.core.files import RETRY, Checksum
from rayloop.core.types import TrajectoryId, Version
from rayloop.rollout.plain import HeldValue, Plain, filled, held
from rayloop.run.checkpoint import FAILED_SAVES, Checkpoint, CheckpointStore, complete


@dataclass(frozen=True)
class SavedStep:
    """A step to save: the driver's part, what goes into the marker, whether it is kept, and whether
    no step follows. ``patience``: seconds of failures in a row after which storage that refuses is
    given up.
    """

    version: Version
    state: Callable[[], Awaitable[Any]]
    about: Mapping[str, Any]
    best: bool
    last: bool
    patience: float


class Saving:
    """``saved``: what was saved last.

    ``failed``: saves in a row that could not be written, the last one because of ``trouble``.
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
        """``beside``: training goes on meanwhile.

        ``timeout``: seconds that one save may take. ``beforehand`` puts something of its own into
        each checkpoint's folder, before training goes on. ``stopping``: set when the run is asked
        to end.
        """
        self.saved: tuple[Version, Checkpoint] | None = None
        self.failed = 0
        self.trouble: CheckpointError | None = None
        self._failing_since = 0.0
        self._stopping = stopping or asyncio.Event()
        self._store, self._emit, self._beside, self._timeout = store, emit, beside, timeout
        self._beforehand = beforehand
        self._under_way: asyncio.Task[None] | None = None

    def anew(self, since: int) -> None:
        """Raises CheckpointError when this start has saved a checkpoint, which is gone: the run may
        not begin at step 0. ``since``: lineages that had begun before it. A driver that replaces
        another one reads in ``latest`` what that one saved.
        """
        newest = self.saved[1].folder.name if self.saved else ""
        if not newest and self._store.lineages() > since:
            newest = self.latest()
        if newest:
            raise CheckpointError(
                f"{self._store.folder}: {newest} was saved there, and no checkpoint is left."
                " Nothing was begun anew: bring the folder back and start again, name another"
                " checkpoint with checkpoint.resume=FOLDER, or begin anew under another name=..."
            )

    def latest(self) -> str:
        """The name of the checkpoint that was saved last, even if it is gone; "" when that is not
        known.
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

        Returns when the ranks may go on; for the last step, when it is on disk.

        A save that fails is recorded, and tried again at the next step. After ``FAILED_SAVES`` of
        them, and for the last step, training waits here while it is tried again: storage that comes
        back is worth more than steps that would be lost. Raises its CheckpointError
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
            await asyncio.sleep(RETRY)
            WAITS.moved = time.monotonic()  # the event says what is waited for: this is no stall
            if self._stopping.is_set() and not step.last:
                return  # the end of the run tries once more

    async def _begin(self, step: SavedStep, policy: PolicyGroup, *, beside: bool) -> None:
        """Begin to save.

        Returns when the ranks may go on: with ``beside`` when they have copied what they write.
        """
        copied = asyncio.Event()
        self._under_way = asyncio.create_task(self._write(step, policy, copied if beside else None))
        # Also after a failed save: otherwise training would wait for the copy for ever.
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
        late = CheckpointStorageFailed(
            f"a checkpoint was not written within {self._timeout:g} s (policy.step_timeout)"
        )
        # ``asyncio.wait`` leaves the save running at the
        # deadline; awaiting the task would cancel it.
        await bounded(self._timeout, asyncio.wait({self._under_way}), late)
        # Forgotten before its error is raised, so that a second call does not raise it again.
        ended, self._under_way = self._under_way, None
        ended.result()

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
        """``copied`` is set when the ranks may go on; None: they wait."""
        began, number = time.monotonic(), step.version.step
        write = policy.save if copied is None else partial(policy.save_beside, copied=copied)

        async def trainer(folder: str) -> Mapping[str, Checksum]:
            await asyncio.to_thread(self._beforehand, Path(folder).parent)
            return await write(folder)

        try:
            saved = await self._store.save(
                number, await step.state(), trainer, step.about, best=step.best
            )
        except CheckpointError as error:
            # Only these failures are tried again; ``settle``
            # raises all others, such as PolicyLost and RunTaken.
            if not self.failed:
                self._failing_since = asyncio.get_running_loop().time()
            self.failed, self.trouble = self.failed + 1, error
            if self.failed <= FAILED_SAVES + 1:  # what follows is the same every few seconds
                self._emit(incidents.CheckpointFailed(self.failed, why=str(error)), number)
            return

        self.failed, self.trouble, self.saved = 0, None, (step.version, saved)
        self._emit(
            events.CheckpointEvent(saved.folder.name, round(time.monotonic() - began, 3)), number
        )


async def capture(
    state: Callable[[], Plain], lose: Callable[[Collection[TrajectoryId]], None], timeout: float
) -> Plain:
    """A state with its payloads in it; the run goes on while they are fetched.

    ``lose`` gets the trajectories whose payloads are gone, and then a later state is taken. Raises
    CheckpointError when payloads do not come within ``timeout`` seconds.
    """
    # Outside the loop: values that arrived are not fetched again for the later state.
    values: dict[Any, Any] = {}
    while True:
        taken = state()
        try:
            lost = await with_deadline(
                timeout, fetch(held(taken), values), "payloads for the checkpoint"
            )
        except WorkerLost as error:
            raise CheckpointError(str(error)) from error
        if not lost:
            return filled(taken, values.__getitem__)
        lose(lost)


async def fetch(wanted: Iterable[HeldValue], values: dict[Any, Any]) -> set[TrajectoryId]:
    """Add the values of the references to ``values``.

    Returns the trajectories of which something is lost.
    """
    # With replay several members hold one payload, which is fetched once.
    ids = {(found.reference, found.id) for found in wanted}

    async def one(reference: Any) -> None:
        try:
            values[reference] = await reference
        except Exception as error:
            if not object_lost(error):
                raise

    await asyncio.gather(*(one(reference) for reference in {r for r, _ in ids} - values.keys()))
    return {id for reference, id in ids if reference not in values}
