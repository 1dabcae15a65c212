"""The checkpoint store: what counts as complete, what is newest, and what a crash or a full disk
leaves behind.
"""

from __future__ import annotations

import asyncio
import errno
import io
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayloop.core.failures import (
    START_AGAIN_EXIT_CODE,
    CheckpointError,
    CheckpointStorageFailed,
    ConfigError,
    NotSaved,
)
from rayloop.run import checkpoint
from rayloop.run.checkpoint import MARKER, Checkpoint, CheckpointStore, complete
from rayloop.run.origin import Origin
from tests.support.runs import ROOT

KILLS = 50


async def write_weights(folder: str, step: int, size: int = 1000) -> None:
    (Path(folder) / "weights.bin").write_bytes(step.to_bytes(4, "little") * size)


def save(store: CheckpointStore, step: int, size: int = 1000) -> None:
    asyncio.run(store.save(step, {"step": step}, lambda folder: write_weights(folder, step, size)))


def steps(store: CheckpointStore) -> list[int]:
    return [checkpoint.step for checkpoint in store.newest_first()]


def test_the_newest_complete_checkpoint_is_found_and_older_ones_go(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    assert store.find("auto") is None
    for step in (2, 10, 9999999):
        save(store, step)
    assert steps(store) == [9999999, 10]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_000010", "step_9999999"]
    assert (tmp_path / "latest").read_text(encoding="utf-8") == "step_9999999"
    found = store.find("auto")
    assert found is not None
    assert found.state() == {"step": 9999999}
    assert (Path(found.trainer) / "weights.bin").read_bytes() == (9999999).to_bytes(
        4, "little"
    ) * 1000


@pytest.mark.parametrize(
    "damage", ["marker", "torn marker", "missing", "truncated", "longer", "state"]
)
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, damage: str) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    save(store, 1)
    save(store, 2)
    folder = tmp_path / "step_000002"
    weights = folder / "trainer" / "weights.bin"
    match damage:
        case "marker":
            (folder / MARKER).unlink()
        case "torn marker":
            (folder / MARKER).write_text(
                (folder / MARKER).read_text(encoding="utf-8")[:-5], encoding="utf-8"
            )
        case "missing":
            weights.unlink()
        case "truncated":
            os.truncate(weights, 3999)
        case "longer":
            os.truncate(weights, 4001)
        case "state":
            (folder / "driver.json").unlink()
    assert complete(folder) is None
    assert steps(store) == [1]
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        store.find(str(folder))


def test_never_and_a_named_folder(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    save(store, 1)
    save(store, 2)
    assert store.find("never") is None
    named = store.find(str(tmp_path / "step_000001"))
    assert named is not None
    assert named.step == 1


def test_a_later_lineage_is_newer_whatever_its_steps(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    assert store.next_lineage() == 1
    for step in (5, 10):
        save(store, step)
    rolled_back = CheckpointStore(tmp_path, keep=2)
    assert rolled_back.next_lineage() == 2
    save(rolled_back, 6)
    assert [(c.lineage, c.step) for c in rolled_back.newest_first()] == [(2, 6), (1, 10)]
    save(rolled_back, 10)
    assert [c.folder.name for c in rolled_back.newest_first()] == ["step_000010-1", "step_000006"]


def test_the_best_stays_until_a_better_one_is_saved(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    for step in (1, 2, 3, 4, 5):
        asyncio.run(
            store.save(step, {}, lambda folder: write_weights(folder, 0), best=step in (2, 4))
        )
        if step == 3:
            assert steps(store) == [3, 2]
    assert steps(store) == [5, 4]
    named = store.find(str(tmp_path / "best"))
    assert named is not None
    assert named.step == 4


def test_what_a_crash_left_aside_is_cleared_by_the_next_save(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    (tmp_path / "step_000003.tmp" / "trainer").mkdir(parents=True)
    (tmp_path / "step_000001.tmp").mkdir()
    assert store.find("auto") is None
    save(store, 4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_000004"]


SAVING = """
import asyncio, os, sys, time
from pathlib import Path
from rayloop.run.checkpoint import CheckpointStore

def go_on_saving(folder):
    store = CheckpointStore(Path(folder), keep=2)
    newest = store.find("auto")
    step = newest.step if newest else 0
    store.next_lineage()
    began = time.monotonic()
    while True:
        step += 1
        async def write(trainer):
            for part in range(4):
                (Path(trainer) / f"part-{part}").write_bytes(step.to_bytes(4, "little") * 20000)
        asyncio.run(store.save(step, {"step": step}, write))
        if began:
            print(os.getpid(), time.monotonic() - began, flush=True)
            began = 0.0

for _ in sys.stdin:
    child = os.fork()
    if not child:
        go_on_saving(sys.argv[1])
    os.waitpid(child, 0)
    print("dead", flush=True)
"""
"""For each line of its input a process that saves until it is killed; it prints its id and the
seconds of its first save.
"""


def test_killed_at_any_moment_the_newest_checkpoint_loads(tmp_path: Path) -> None:
    """SIGKILL at 50 random moments of saving and pruning: what is found is whole, consistent and
    never older than before.

    The moments lie within two saves, whatever a save takes on this machine.
    """
    generator = random.Random(0)
    store = CheckpointStore(tmp_path, keep=2)
    before, torn = 0, 0
    starter = subprocess.Popen(
        [sys.executable, "-c", SAVING, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert starter.stdin is not None
    assert starter.stdout is not None
    for _ in range(KILLS):
        print(file=starter.stdin, flush=True)
        saving, of_a_save = starter.stdout.readline().split()
        time.sleep(generator.uniform(0.0, 2 * float(of_a_save)))
        os.kill(int(saving), signal.SIGKILL)
        assert starter.stdout.readline() == "dead\n"
        torn += any(tmp_path.glob("*.tmp"))
        found = store.find("auto")
        assert found is not None
        assert found.step > before, "each process has saved once"
        assert found.state() == {"step": found.step}
        for part in range(4):
            assert (Path(found.trainer) / f"part-{part}").read_bytes() == found.step.to_bytes(
                4, "little"
            ) * 20000
        before = found.step
    starter.stdin.close()
    assert starter.wait(30) == 0
    starter.stdout.close()
    assert torn > KILLS / 5, "the kills must have hit saves under way"


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """Files of this process cannot grow beyond ``limit`` bytes (Python ignores SIGXFSZ: a write
    raises OSError).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_names_the_bytes_and_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 1)
    size = sum(f.stat().st_size for f in (tmp_path / "step_000001").rglob("*") if f.is_file())
    with (
        full_disk(2000),
        pytest.raises(CheckpointStorageFailed, match=rf"step 2 .* about {size:,} bytes.* are free"),
    ):
        save(store, 2)
    with full_disk(2000), pytest.raises(CheckpointStorageFailed, match="arrays of the state"):
        asyncio.run(
            store.save(2, {"held": np.zeros(1000)}, lambda folder: write_weights(folder, 2, 1))
        )
    assert steps(store) == [1]
    assert not list(tmp_path.glob("*.tmp"))
    save(store, 2)
    assert steps(store) == [2, 1]


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (CheckpointError("rank 1 could not write"), r"rank 1 could not write.*4,000 were written"),
        (AttributeError("no engine yet"), "no engine yet"),
    ],
)
def test_a_failing_trainer_leaves_nothing_half_done(
    tmp_path: Path, error: Exception, reported: str
) -> None:
    store = CheckpointStore(tmp_path, keep=2)

    async def fail(folder: str) -> None:
        await write_weights(folder, 1)
        raise error

    with pytest.raises(type(error), match=reported):
        asyncio.run(store.save(1, {}, fail))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nothing below ``tmp_path`` can be used, as on a file server that is away; ``undo`` brings it
    back.
    """

    def refuses(call: Callable[..., Any]) -> Callable[..., Any]:
        def refusing(path: Any, *args: Any, **kwargs: Any) -> Any:
            if str(path).startswith(str(tmp_path)):
                raise OSError(errno.ESTALE, "Stale file handle")
            return call(path, *args, **kwargs)

        return refusing

    for name in ("stat", "lstat", "scandir", "mkdir", "statvfs", "open", "replace"):
        monkeypatch.setattr(os, name, refuses(getattr(os, name)))
    monkeypatch.setattr(io, "open", refuses(io.open))
    return monkeypatch


def test_storage_that_is_away_fails_a_save_by_name_and_the_next_one_works(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 1)
    gone = request.getfixturevalue("away")
    with pytest.raises(
        CheckpointStorageFailed,
        match=r"step 2 could .* Stale file handle.* an unknown number of bytes are free",
    ) as why:
        save(store, 2)
    assert why.value.exit_code == START_AGAIN_EXIT_CODE
    gone.undo()
    save(store, 2)
    assert steps(store) == [2, 1]


@pytest.mark.parametrize("resume", ["auto", "named"])
def test_an_end_is_reported_where_nothing_can_be_looked_up(
    tmp_path: Path, request: pytest.FixtureRequest, resume: str
) -> None:
    save(CheckpointStore(tmp_path, keep=2), 1)
    origin = Origin.of(tmp_path, str(tmp_path / "step_000001") if resume == "named" else resume)
    request.getfixturevalue("away")
    assert (
        "continue from the newest checkpoint; which one that is cannot be seen now"
        in origin.again()
    )
    end = origin.stopped(lambda: 9)
    assert type(end) is NotSaved


def test_a_restore_that_the_storage_refuses_is_tried_again_and_one_of_damage_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(CheckpointStore(tmp_path, keep=2), 1)
    origin = Origin.of(tmp_path, "auto")

    async def refused(_: Checkpoint) -> None:
        raise CheckpointStorageFailed("rank 0: Input/output error")

    with pytest.raises(CheckpointStorageFailed, match="cannot be restored"):
        asyncio.run(origin.restore(refused, lambda event: None))

    def read_text(*_: Any, **__: Any) -> str:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "read_text", read_text)
    with pytest.raises(CheckpointStorageFailed, match="cannot be restored"):
        asyncio.run(origin.restore(refused, lambda event: None))
    monkeypatch.undo()
    (tmp_path / "step_000001" / MARKER).unlink()
    with pytest.raises(CheckpointError) as why:
        asyncio.run(origin.restore(refused, lambda event: None))
    assert type(why.value) is CheckpointError


@pytest.mark.parametrize("broken", ["removing an old one", "naming the latest"])
def test_what_fails_after_a_checkpoint_is_complete_is_reported_and_costs_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """As on NFS, where a folder cannot be removed while a file of it is open elsewhere.

    The other of the two is done.
    """
    reported: list[str] = []
    store = CheckpointStore(tmp_path, keep=1, warn=reported.append)
    save(store, 1)
    remove, write = shutil.rmtree, checkpoint.write_whole

    def rmtree(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(39, "Directory not empty")
        remove(path, ignore_errors=True)

    def write_but_latest(path: Path, data: bytes) -> None:
        if path.name == "latest":
            raise OSError(28, "No space left on device")
        write(path, data)

    if broken == "removing an old one":
        monkeypatch.setattr(checkpoint.shutil, "rmtree", rmtree)
    else:
        monkeypatch.setattr(checkpoint, "write_whole", write_but_latest)
    save(store, 2)
    assert steps(store) == [2]
    [why] = reported
    assert "step_000002 is complete, but " in why
    assert ("Directory not empty" in why) == (broken == "removing an old one")
    assert (tmp_path / "latest").read_text(encoding="utf-8") == (
        "step_000002" if broken == "removing an old one" else "step_000001"
    )
    monkeypatch.undo()
    save(store, 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_000003"]
    assert len(reported) == 1


def test_what_a_checkpoint_needs_is_known_from_an_earlier_one_only(tmp_path: Path) -> None:
    """What was written before the disk was full says nothing about its size."""

    async def writes_a_part(folder: str) -> None:
        Path(folder, "weights").write_bytes(b"0123456789")
        raise OSError(28, "No space left on device")

    store = CheckpointStore(tmp_path, keep=2)
    store.next_lineage()
    with pytest.raises(
        CheckpointStorageFailed,
        match=r"`python -m rayloop doctor CONFIG` says what it needs, 10 were written",
    ):
        asyncio.run(store.save(1, {}, writes_a_part))
    save(store, 1)
    with pytest.raises(
        CheckpointStorageFailed, match=r"It needs about [\d,]+ bytes, 10 were written"
    ):
        asyncio.run(store.save(2, {}, writes_a_part))


@pytest.mark.parametrize("resume", ["auto", "never", "named"])
def test_a_start_continues_from_what_it_was_given_until_it_has_saved_itself(
    tmp_path: Path, resume: str
) -> None:
    store = CheckpointStore(tmp_path, keep=4)
    store.next_lineage()
    save(store, 1)
    save(store, 2)
    origin = Origin.of(tmp_path, str(tmp_path / "step_000001") if resume == "named" else resume)
    first = {"auto": "step_000002", "never": None, "named": "step_000001"}[resume]

    def found() -> str | None:
        there = origin.find()
        return there and there.folder.name

    assert found() == first
    store.next_lineage()
    assert found() == first, "its own first lineage has saved nothing yet"
    save(store, 1)
    assert found() == "step_000001-1"
    how = "run again" if resume == "auto" else "run again with checkpoint.resume=auto"
    assert origin.again() == f"{how} to continue from step 1 (step_000001-1)"


@pytest.mark.parametrize(
    ("saved", "reached", "code", "says"),
    [
        (
            (),
            None,
            1,
            (
                "stopped before anything was trained: there is nothing to save; run again to start"
                " over"
            ),
        ),
        (
            (4,),
            None,
            75,
            (
                r"stopped while nothing .* nothing to save; run again to continue from step 4"
                r" \(step_000004\)"
            ),
        ),
        (
            (),
            3,
            1,
            (
                "stopped after step 3, not saved: the driver had died; run again to continue from"
                " the beginning"
            ),
        ),
        ((4,), 5, 1, "stopped after step 5, not saved: .* continue from step 4 "),
        ((4,), 4, 75, "continue from step 4 "),
    ],
)
def test_a_stop_without_a_driver_is_75_only_with_what_was_reached(
    tmp_path: Path, saved: tuple[int, ...], reached: int | None, code: int, says: str
) -> None:
    """``reached`` is the last recorded step of a driver that has died; None: there was none, what
    is recorded is older.
    """
    store = CheckpointStore(tmp_path, keep=2)
    origin = Origin.of(tmp_path, "auto")
    if reached is not None:
        store.next_lineage()
    for step in saved:
        save(store, step)
    end = origin.stopped(lambda: 9 if reached is None else reached)
    assert re.search(says, str(end)), end
    assert end.exit_code == code
