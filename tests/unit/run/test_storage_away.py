"""The storage of a run goes away and leaves an empty mount point: the run names it, and makes
nothing there.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rayloop.cluster.session import _keep_logs
from rayloop.core.failures import (
    START_AGAIN_EXIT_CODE,
    CheckpointStorageFailed,
    NotSaved,
    RunTaken,
    StorageFailed,
)
from rayloop.core.files import mount_of
from rayloop.launch import restarts
from rayloop.launch.ray_process import LOGS
from rayloop.run.checkpoint import CheckpointStore
from rayloop.run.folder import RunFolder
from rayloop.run.lock import Fence
from rayloop.run.origin import Origin
from rayloop.run.records.rollouts import RolloutRecord


async def trainer(folder: str) -> None:
    Path(folder, "weights").write_bytes(b"1234")


def away(run: RunFolder) -> None:
    """Its parent was the mount point: the folder of the run is not there."""
    run.path.rename(run.path.parent.with_name("away"))


def emptied(run: RunFolder) -> None:
    """The folder of the run was the mount point: it is there, and empty."""
    away(run)
    run.path.mkdir()


def another(run: RunFolder) -> None:
    """What is mounted there now holds an older copy of the run."""
    shutil.copytree(run.path, run.path.parent.with_name("copy"))
    away(run)
    run.path.parent.with_name("copy").rename(run.path)
    (run.path / "run.fence").write_text("1", encoding="utf-8")


def back(run: RunFolder) -> None:
    shutil.rmtree(run.path, ignore_errors=True)
    run.path.parent.with_name("away").rename(run.path)


GONE = [away, emptied, another]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    (tmp_path / "output").mkdir()
    return RunFolder(tmp_path / "output", "run")


@pytest.mark.parametrize("goes", GONE, ids=lambda goes: goes.__name__)
def test_a_save_names_the_mount_and_the_next_one_works_when_it_is_back(
    run: RunFolder, goes: Callable[[RunFolder], None]
) -> None:
    with run.acquired():
        pass
    with run.acquired():  # the second start: the number of an older copy is another one
        store = CheckpointStore(run.checkpoints, keep=2, fence=run.lock.fence)
        store.next_lineage()
        asyncio.run(store.save(1, {}, trainer))
        goes(run)
        with pytest.raises(
            CheckpointStorageFailed, match=f"is its storage mounted at {mount_of(run.path)}"
        ) as why:
            asyncio.run(store.save(2, {}, trainer))
        assert why.value.exit_code == START_AGAIN_EXIT_CODE
        with pytest.raises(StorageFailed):
            store.next_lineage()
        back(run)
        asyncio.run(store.save(2, {}, trainer))
        assert [found.step for found in store.newest_first()] == [2, 1]


@pytest.mark.parametrize("goes", [away, emptied], ids=lambda goes: goes.__name__)
def test_nothing_is_made_below_an_empty_mount_point(
    run: RunFolder, tmp_path: Path, goes: Callable[[RunFolder], None]
) -> None:
    (tmp_path / "ray" / LOGS).mkdir(parents=True)
    (tmp_path / "ray" / LOGS / "raylet.out").write_text("said", encoding="utf-8")
    record = RolloutRecord(1, 0, 0, "task", "", "", (), (), "done", 1.0)
    with run.acquired():
        store = CheckpointStore(run.checkpoints, keep=2, fence=run.lock.fence)
        store.next_lineage()
        origin = Origin(run.checkpoints, "auto", 0, run.lock.fence)
        run.metrics.append({"step": 1})
        run.close()
        goes(run)
        run.metrics.append({"step": 2})
        assert isinstance(run.metrics.trouble, FileNotFoundError)
        with pytest.raises(FileNotFoundError):
            run.rollouts.write(2, [record], {"a" * 64: b"no image"})
        with pytest.raises(CheckpointStorageFailed):
            asyncio.run(store.save(2, {}, trainer))
        assert "which one that is cannot be seen now" in origin.again()
        assert "the beginning" not in origin.again()
        assert type(origin.stopped(run.last_step)) is NotSaved
        _keep_logs(tmp_path / "ray", run.logs)
        run.lock.renew()
    assert not run.path.exists() or list(run.path.iterdir()) == []
    back(run)
    assert [record["step"] for record in run.metrics] == [1]
    run.metrics.append({"step": 3})
    assert [record["step"] for record in run.metrics] == [
        1,
        2,
        3,
    ], "what was held is written when it is back"


def test_a_mount_that_came_back_with_another_device_is_the_same(run: RunFolder) -> None:
    with run.acquired():
        fence = run.lock.fence
        device, inode = fence.home
        Fence(fence.path, fence.number, (device + 1, inode), fence.mount).check()
        Fence(fence.path, fence.number, (device, inode + 1), fence.mount).check()
        with pytest.raises(FileNotFoundError, match="not the one that it was at the start"):
            Fence(fence.path, fence.number, (device + 1, inode + 1), fence.mount).check()
        fence.path.write_text(str(fence.number + 1), encoding="utf-8")
        with pytest.raises(RunTaken):
            fence.check()


@pytest.mark.parametrize("content", [b"", b"\x00\xffgarbage", bytes(8)])
def test_a_start_after_a_power_loss_takes_the_lock(run: RunFolder, content: bytes) -> None:
    with run.acquired():
        former = run.lock.fence
        CheckpointStore(run.checkpoints, keep=1, fence=run.lock.fence).next_lineage()
    for file in (run.lock.path, former.path, run.checkpoints / "lineage"):
        file.write_bytes(content)
    with run.acquired():
        run.lock.fence.check()
        if content:
            assert run.lock.fence.number > former.number
        assert CheckpointStore(run.checkpoints, keep=1, fence=run.lock.fence).next_lineage() == 1


@pytest.mark.parametrize("why", ["nothing", "again", "slurm"])
def test_a_restart_that_finds_no_run_refuses(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    monkeypatch.delenv(restarts.RESTARTED, raising=False)
    if why == "again":
        monkeypatch.setenv(restarts.RESTARTED, "1")
    elif why == "slurm":
        monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert restarts.is_restart() == (why != "nothing")
    for made in (False, True):
        if made:
            run.path.mkdir()
        with pytest.raises(StorageFailed, match="is its storage mounted") as end:
            run.begun_before()
        assert end.value.exit_code == START_AGAIN_EXIT_CODE
    with run.acquired():
        run.begun_before()


def test_a_program_that_is_started_again_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 0.0)
    file = tmp_path / "starts"
    script = f'echo "${restarts.RESTARTED}" >> {file}; exit {START_AGAIN_EXIT_CODE}'
    assert restarts.supervised(["sh", "-c", script], 2) == START_AGAIN_EXIT_CODE
    assert file.read_text(encoding="utf-8").splitlines() == ["", "1", "1"]
    assert restarts.RESTARTED not in os.environ
