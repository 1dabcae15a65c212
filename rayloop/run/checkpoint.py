"""Checkpoints: written aside, marked complete, renamed, and only then named ``latest``.

    checkpoints/step_000010/            one checkpoint (step_000010-1, ... when a restored run saves the step again)
        trainer/                        model, optimizer, scheduler, RNG (torch.distributed.checkpoint)
        driver.json                     everything the driver must know to continue (``Driver.state``), as plain values,
        driver.safetensors              and its arrays and bytes (rayloop/run/plain_files.py)
        COMPLETE                        JSON: step, lineage, the size of every file, and what it says of its run
                                        (rayloop/run/identity.py); written last, then the folder is renamed
    checkpoints/latest                  name of the checkpoint written last
    checkpoints/best                    link to the checkpoint of the best held-out reward (``checkpoint.keep_best``)
    checkpoints/lineage                 number of restores so far

A crash at any byte leaves the previous checkpoint loadable: what is being written or removed is called ``*.tmp`` and is
never read. A later lineage is newer whatever its steps: it began where an earlier one was given up.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rayloop.core.failures import CheckpointError, ConfigError, NotSaved, Preempted, RayloopError
from rayloop.core.files import sync, write_whole
from rayloop.run.plain_files import read, write

MARKER, TRAINER, BEST = "COMPLETE", "trainer", "best"
STRUCTURE, TENSORS = "driver.json", "driver.safetensors"
NOTHING: Mapping[str, Any] = MappingProxyType({})
FAILED_SAVES = 3
"""In a row that a run goes on without: a disk that is full for a while costs checkpoints, one that stays full everything since."""


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    step: int
    lineage: int
    about: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The marker: with what it says of its run, see rayloop/run/identity.py."""

    @property
    def trainer(self) -> str:
        return str(self.folder / TRAINER)

    def state(self) -> Any:
        """The driver's. Raises CheckpointError when it cannot be read."""
        return read(self.folder / STRUCTURE, self.folder / TENSORS)


def complete(folder: Path) -> Checkpoint | None:
    """The checkpoint in ``folder``, or None unless its marker and every file that the marker lists are there in full."""
    try:
        marker = json.loads((folder / MARKER).read_text())
        whole = all((folder / name).stat().st_size == size for name, size in marker["files"].items())
        return Checkpoint(folder, marker["step"], marker["lineage"], marker) if whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True)
class Origin:
    """What one start of a run continues from, at its beginning and whenever its policy or its driver is replaced.

    ``folder`` is that of its checkpoints, ``resume`` what its configuration names, and ``since`` how many lineages had begun
    before this start: what a later one has saved goes before what is named.
    """

    folder: Path
    resume: str
    since: int

    @classmethod
    def of(cls, folder: Path, resume: str, since: int | None = None) -> Origin:
        """Of a start that is made now, unless ``since`` says otherwise."""
        return cls(folder, resume, CheckpointStore(folder, keep=1).lineages() if since is None else since)

    def find(self) -> Checkpoint | None:
        """Raises ConfigError when a named folder holds no complete checkpoint."""
        store = CheckpointStore(self.folder, keep=1)
        newest = store.find("auto")
        return newest if newest is not None and newest.lineage > self.since else store.find(self.resume)

    def again(self) -> str:
        """How to continue, and from what, in words: the same command would begin where it did when that was named."""
        found = self.find()
        where = "the beginning: there is no checkpoint" if found is None else f"step {found.step} ({found.folder.name})"
        return f"{self._run(found)} to continue from {where}"

    def _run(self, found: Checkpoint | None) -> str:
        ours = found is not None and found.lineage > self.since
        same = self.resume == "auto" or (self.resume != "never" and not ours)
        return "run again" if same else "run again with checkpoint.resume=auto"

    def stopped(self, last_step: int) -> RayloopError:
        """How a run ends that is asked to stop while nothing can be saved: no driver runs, or it has not begun.

        ``last_step`` is the last one on record. Preempted only when a checkpoint is there, from which the next start continues.
        """
        found = self.find()
        began = CheckpointStore(self.folder, keep=1).lineages() > self.since
        if began and last_step > (found.step if found else 0):
            return NotSaved(f"stopped after step {last_step}, not saved: the driver was gone; {self.again()}")
        if found is None:
            return NotSaved(
                f"stopped before anything was trained: there is nothing to save; {self._run(found)} to begin anew"
            )
        return Preempted(f"stopped while nothing was being trained: there was nothing to save; {self.again()}")


class CheckpointStore:
    """``warn`` is told what failed when a checkpoint was already complete; the next save tries again."""

    def __init__(self, folder: Path, keep: int, warn: Callable[[str], None] = lambda why: None) -> None:
        self.folder, self.keep, self._warn = folder, keep, warn
        self.lineage = 0
        folder.mkdir(parents=True, exist_ok=True)

    def lineages(self) -> int:
        """How many have begun so far."""
        path = self.folder / "lineage"
        return int(path.read_text()) if path.exists() else 0

    def next_lineage(self) -> int:
        """A number that no earlier start of this run has had; the checkpoints that follow belong to it."""
        self.lineage = self.lineages() + 1
        write_whole(self.folder / "lineage", str(self.lineage).encode())
        return self.lineage

    def find(self, resume: str) -> Checkpoint | None:
        """What to continue from: ``auto`` = the newest complete checkpoint or None, ``never`` = None, or a folder.

        Raises ConfigError when a named folder holds no complete checkpoint.
        """
        if resume == "never":
            return None
        if resume != "auto":
            found = complete(Path(resume))
            if found is None:
                raise ConfigError(
                    f"checkpoint.resume: {resume} holds no complete checkpoint (no valid {MARKER} marker)"
                )
            return found
        return next(iter(self.newest_first()), None)

    def newest_first(self) -> list[Checkpoint]:
        """The complete checkpoints: by lineage, then step, then time."""
        found = [complete(path) for path in self.folder.glob("step_*") if path.suffix != ".tmp"]
        return sorted(
            (c for c in found if c is not None),
            key=lambda c: (c.lineage, c.step, (c.folder / MARKER).stat().st_mtime_ns),
            reverse=True,
        )

    async def save(
        self, step: int, state: Any, save_trainer: Callable[[str], Awaitable[None]],
        about: Mapping[str, Any] = NOTHING, *, best: bool = False,
    ) -> Checkpoint:  # fmt: skip
        """Write a checkpoint and prune old ones. ``about`` goes into the marker. The ``best`` is kept until a better one is saved.

        Raises CheckpointError, with the bytes at stake, unless it is complete; nothing half-done stays.
        """
        name = f"step_{step:06d}"
        final = next(
            path for path in (self.folder / f"{name}{'-' * (n > 0)}{n or ''}" for n in count()) if not path.exists()
        )
        aside = self.folder / f"{name}.tmp"
        try:
            await asyncio.to_thread(self._clear_aside)
            (aside / TRAINER).mkdir(parents=True)
            await save_trainer(str(aside / TRAINER))
            await asyncio.to_thread(self._commit, aside, final, step, state, about)
        except (OSError, CheckpointError) as error:
            written = sum(f.stat().st_size for f in aside.rglob("*") if f.is_file()) if aside.exists() else 0
            raise CheckpointError(self._explain(step, error, written)) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)  # nothing is there after a save
        for why in await asyncio.to_thread(self._tidy, final, best):
            self._warn(f"{final.name} is complete, but {why}")
        return Checkpoint(final, step, self.lineage, about)

    def _explain(self, step: int, error: Exception, written: int) -> str:
        free = shutil.disk_usage(self.folder).free
        need = max((_size(c.folder) for c in self.newest_first()), default=written)
        return (
            f"the checkpoint of step {step} could not be written below {self.folder}: {error}. It needs about {need:,} bytes "
            f"({written:,} were written), {free:,} are free; the previous checkpoint is intact"
        )

    def _clear_aside(self) -> None:
        for path in self.folder.glob("*.tmp"):
            shutil.rmtree(path, ignore_errors=True)

    def _commit(self, aside: Path, final: Path, step: int, state: Any, about: Mapping[str, Any]) -> None:
        write(aside / STRUCTURE, aside / TENSORS, state)
        files = [f for f in sorted(aside.rglob("*")) if f.is_file()]
        for file in files:
            sync(file)
        marker = {
            **about,
            "step": step,
            "lineage": self.lineage,
            "files": {str(f.relative_to(aside)): f.stat().st_size for f in files},
        }
        write_whole(aside / MARKER, json.dumps(marker, indent=1).encode())
        os.replace(aside, final)

    def _tidy(self, final: Path, best: bool) -> list[str]:
        """What follows a complete checkpoint. Returns what failed: that costs no step, and the rest is done."""

        def name() -> None:
            sync(self.folder)
            write_whole(self.folder / "latest", final.name.encode())

        def link() -> None:
            aside = self.folder / f"{BEST}.new"
            aside.unlink(missing_ok=True)
            aside.symlink_to(final.name)
            os.replace(aside, self.folder / BEST)

        failed = []
        acts = [("not named as the best", link)] * best
        for what, act in (*acts, ("not named as the latest", name), ("an older one could not be removed", self._prune)):
            try:
                act()
            except OSError as error:
                failed.append(f"{what}: {error}")
        return failed

    def _prune(self) -> None:
        best = (self.folder / BEST).resolve()
        for old in self.newest_first()[self.keep :]:
            if old.folder.resolve() == best:
                continue
            condemned = old.folder.with_name(old.folder.name + ".tmp")
            os.replace(old.folder, condemned)
            shutil.rmtree(condemned)


def _size(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
