"""Checkpoints (docs/run_folder.md has their layout).

A checkpoint is written under another name, marked complete, renamed, and only then named
``latest``. A crash leaves the previous one loadable: ``*.tmp`` is never read. A later lineage is
newer whatever its steps.
"""

import asyncio
import json
import os
import shutil
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rayloop.core.failures import CheckpointError, ConfigError, Damaged
from rayloop.core.files import (
    Checksum,
    check_sum,
    kind_of,
    needed,
    size_below,
    size_of,
    summed,
    sync,
    unused,
    write_whole,
)
from rayloop.run.lock import OPEN, Fence
from rayloop.run.records.plain_files import read, write

MARKER = "COMPLETE"
TRAINER = "trainer"
BEST = "best"
STRUCTURE = "driver.json"
TENSORS = "driver.safetensors"
# Folders whose names end with these are never read.
ASIDE = ".tmp"
DAMAGED = ".damaged"
NOTHING: Mapping[str, Any] = MappingProxyType({})
FAILED_SAVES = 3
"""Failed saves in a row during which training continues; then it waits for the storage.

A wait may cost everything since the last checkpoint.
"""
VISIBLE_WITHIN_S = 60.0
"""Seconds after which the files that a rank wrote must be seen here.

A network file system may have cached the folder's contents.
"""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    folder: Path
    step: int
    lineage: int
    about: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The marker: with what it says of its run, see rayloop/run/identity.py."""

    @property
    def trainer(self) -> str:
        """The folder of the trainer's files."""
        return str(self.folder / TRAINER)

    @property
    def sums(self) -> dict[str, Checksum]:
        """Checksums of the trainer's files, by name; empty for a checkpoint that has none."""
        return {name.removeprefix(f"{TRAINER}/"): sum for name, sum in _sums(self.about).items()}

    def state(self) -> Any:
        """The driver's state. Raises Damaged, and CheckpointError when it cannot be read."""
        self.verify({STRUCTURE, TENSORS}.__contains__)
        return read(self.folder / STRUCTURE, self.folder / TENSORS)

    def verify(self, chosen: Callable[[str], bool]) -> None:
        """Compare the checksums of the files whose names are ``chosen``. Raises Damaged."""
        sums = _sums(self.about)
        for name in filter(chosen, sums):
            try:
                with (self.folder / name).open("rb") as file:
                    check_sum(name, file, sums[name])
            except OSError as error:
                raise Damaged(name, f"it cannot be read: {error}") from error


def _sums(marker: Mapping[str, Any]) -> dict[str, Checksum]:
    """The checksums of the files that the marker lists, by path."""
    return {
        name: Checksum(marker["files"][name], int(crc, 16))
        for name, crc in marker.get("crc32", {}).items()
    }


def complete(folder: Path) -> Checkpoint | None:
    """The checkpoint in ``folder``; None if its marker or a file that it lists is incomplete."""
    with suppress(Damaged):
        return opened(folder)
    return None


def opened(folder: Path) -> Checkpoint:
    """The checkpoint in ``folder``.

    Raises Damaged, with the file, unless its marker is whole and all others have their sizes.
    """
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        # A marker of an older version has no checksum, and counts as whole.
        if marker.pop("own_crc32", None) not in (None, _own(marker)):
            raise Damaged(MARKER, "its text is not the one that was written")
        checkpoint = Checkpoint(folder, marker["step"], marker["lineage"], marker)
        # Sizes alone, which cost a stat each: the checksums are compared when a file is read.
        for name, size in marker["files"].items():
            present = size_of(folder / name)
            if present != size:
                state = "it is not there" if present is None else f"{present:,} bytes are there"
                raise Damaged(name, f"{state}, {size:,} were written")
        return checkpoint
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(MARKER, f"it cannot be read: {error!r}") from error


def _own(marker: Mapping[str, Any]) -> str:
    """The CRC-32 of what a marker says."""
    return f"{Checksum().then(json.dumps(marker, sort_keys=True).encode()).crc32:08x}"


class CheckpointStore:
    """The folder of a run's checkpoints.

    ``warn`` receives the failures after a checkpoint was complete; ``fence`` is checked before
    every write.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        warn: Callable[[str], None] = lambda why: None,
        fence: Fence = OPEN,
    ) -> None:
        self.folder = folder
        self.keep = keep
        self._warn = warn
        self._fence = fence
        self.lineage = 0

    def lineages(self) -> int:
        """How many have begun so far."""
        path = self.folder / "lineage"
        try:
            return int(path.read_text(encoding="utf-8")) if path.exists() else 0
        except ValueError:  # a power loss took its content: the saved ones are known
            return max((found.lineage for found in self.newest_first()), default=0)

    def next_lineage(self) -> int:
        """A number that no earlier start of this run has had.

        The checkpoints that follow belong to it.
        """
        self.lineage = self.lineages() + 1
        with needed(self.folder / "lineage"):
            self._fence.check()
            self.folder.mkdir(exist_ok=True)
            write_whole(self.folder / "lineage", str(self.lineage).encode())
        return self.lineage

    def find(self, resume: str) -> Checkpoint | None:
        """The newest complete checkpoint (``auto``) or None, None (``never``), or that of a folder.

        Raises ConfigError.
        """
        if resume == "never":
            return None
        if resume != "auto":
            checkpoint = complete(Path(resume))
            if checkpoint is None:
                raise ConfigError(
                    f"checkpoint.resume: {resume} holds no complete checkpoint (no valid {MARKER}"
                    " marker)"
                )
            return checkpoint
        return next(iter(self.newest_first()), None)

    def _folders(self) -> list[Path]:
        return [
            path
            for path in sorted(self.folder.glob("step_*"))
            if path.suffix not in (ASIDE, DAMAGED)
        ]

    def damaged(self) -> list[tuple[Path, CheckpointError]]:
        """The folders that were complete once and no longer are, with the reason of each.

        Only a complete folder has the name of a checkpoint.
        """
        failures: list[tuple[Path, CheckpointError]] = []
        for folder in self._folders():
            try:
                opened(folder)
            except Damaged as why:
                failures.append((folder, why))
        return failures

    def newest_first(self) -> list[Checkpoint]:
        """The complete checkpoints: by lineage, then step, then time."""
        checkpoints = filter(None, map(complete, self._folders()))
        return sorted(
            checkpoints,
            key=lambda c: (c.lineage, c.step, (c.folder / MARKER).stat().st_mtime_ns),
            reverse=True,
        )

    async def save(
        self,
        step: int,
        state: Any,
        save_trainer: Callable[[str], Awaitable[Mapping[str, Checksum] | None]],
        about: Mapping[str, Any] = NOTHING,
        *,
        best: bool = False,
    ) -> Checkpoint:
        """Write a checkpoint and prune old ones except the ``best``.

        ``save_trainer`` writes into its folder and returns checksums (None: computed here). Raises
        CheckpointError, with nothing half-done left, and RunTaken.
        """
        aside = self.folder / f"step_{step:06d}.{self.lineage}{ASIDE}"
        try:
            # Another lineage may have saved this step already.
            final = unused(self.folder / f"step_{step:06d}")
            await asyncio.to_thread(self._begin)
            # not its parents: where the storage is not mounted, they would be below its mount point
            aside.mkdir()
            (aside / TRAINER).mkdir()
            checksums = await save_trainer(str(aside / TRAINER)) or {}
            await asyncio.to_thread(self._commit, aside, final, step, state, about, checksums)
        except (OSError, CheckpointError) as error:
            raise kind_of(error, saving=True)(
                self._explain(step, error, size_below(aside))
            ) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)  # a save renames it
        # The checkpoint is complete here: what fails below costs a warning, and not the step.
        for why in await asyncio.to_thread(self._tidy, final, best):
            self._warn(f"{final.name} is complete, but {why}")
        return Checkpoint(final, step, self.lineage, about)

    def _explain(self, step: int, error: Exception, written: int) -> str:
        free = "an unknown number of"
        sizes: list[int] = []
        with suppress(OSError):
            free = f"{shutil.disk_usage(self.folder).free:,}"
            sizes = [size_below(checkpoint.folder) for checkpoint in self.newest_first()]
        needs = "`python -m rayloop doctor CONFIG` says what it needs"
        previous = ""
        if sizes:
            needs = f"It needs about {max(sizes):,} bytes"
            previous = "; the previous checkpoint is intact"
        return (
            f"the checkpoint of step {step} could not be written below {self.folder}: {error}."
            f" {needs}, {written:,} were written, and {free} bytes are free{previous}"
        )

    def _begin(self) -> None:
        self._fence.check()
        self.folder.mkdir(exist_ok=True)
        # Left over by a crash: the fence makes sure that nobody else writes one.
        for path in self.folder.glob(f"*{ASIDE}"):
            shutil.rmtree(path, ignore_errors=True)

    def _commit(
        self,
        aside: Path,
        final: Path,
        step: int,
        state: Any,
        about: Mapping[str, Any],
        written: Mapping[str, Checksum],
    ) -> None:
        # The ranks' files first: each file that exists by then gets a size and a checksum.
        _until_seen(aside / TRAINER, written)
        write(aside / STRUCTURE, aside / TENSORS, state)

        sums = {f"{TRAINER}/{name}": sum for name, sum in written.items()}
        for path in sorted(path for path in aside.rglob("*") if path.is_file()):
            # On the disk before the rename: a power loss
            # must not leave a valid name with empty files.
            sync(path)
            name = str(path.relative_to(aside))
            if name not in sums:
                with path.open("rb") as file:
                    sums[name] = summed(file)

        marker = {
            **about,
            "step": step,
            "lineage": self.lineage,
            "files": {name: sum.size for name, sum in sums.items()},
            "crc32": {name: f"{sum.crc32:08x}" for name, sum in sums.items()},
        }

        write_whole(
            aside / MARKER, json.dumps({**marker, "own_crc32": _own(marker)}, indent=1).encode()
        )
        # Once more, since writing took a while in which another process may have taken the run.
        self._fence.check()
        os.replace(aside, final)

    def _tidy(self, final: Path, best: bool) -> list[str]:
        """What follows a complete checkpoint.

        Returns what failed: that costs no step, and the rest is done.
        """

        def name() -> None:
            # The checkpoint's own name first: ``latest`` must
            # not survive a power loss without its folder.
            sync(self.folder)
            write_whole(self.folder / "latest", final.name.encode())

        def link() -> None:
            aside = self.folder / f"{BEST}.new"
            # A link cannot be replaced in place: the new one
            # is renamed over it, so ``best`` always exists.
            aside.unlink(missing_ok=True)
            aside.symlink_to(final.name)
            os.replace(aside, self.folder / BEST)

        failed = []
        acts = [("not named as the best", link)] * best
        # ``best`` is linked before the pruning, which spares what it points to.
        for what, act in (
            *acts,
            ("not named as the latest", name),
            ("an older one could not be removed", self._prune),
        ):
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
            # Renamed first: a crash while it is deleted must
            # not leave what looks like a damaged checkpoint.
            condemned = old.folder.with_name(old.folder.name + ASIDE)
            os.replace(old.folder, condemned)
            shutil.rmtree(condemned)


def _until_seen(trainer: Path, written: Mapping[str, Checksum]) -> None:
    """Return when all that the ranks have ``written`` is seen here.

    Raises CheckpointError after ``VISIBLE_WITHIN_S``.
    """
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    while True:
        missing = [name for name, sum in written.items() if size_of(trainer / name) != sum.size]
        if not missing:
            return
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{', '.join(missing)}: written by ranks of the policy, and not to be seen on"
                f" {socket.gethostname()} after {VISIBLE_WITHIN_S:g} s. output must be a folder"
                " that all nodes share"
            )
        time.sleep(0.1)
