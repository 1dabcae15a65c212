"""The lock of a run folder between hosts: suspended holders, dead ones, file systems that fail or
know no flock.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayloop.core import files
from rayloop.core.failures import ConfigError, RunNameInUse, RunTaken
from rayloop.run import lock
from rayloop.run.checkpoint import CheckpointStore
from rayloop.run.lock import Fence, RunLock
from rayloop.run.origin import Origin


class Hosts:
    """Locks of one file, each taken as another host; ``suspend`` stops a heart as SIGSTOP does."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch) -> None:
        self.path, self._patch = path, patch
        self.held: list[RunLock] = []

    def take(self, host: str, pids: str = "pid:[1]") -> RunLock:
        self._patch.setattr(lock.socket, "gethostname", lambda: host)
        self._patch.setattr(lock, "_pid_namespace", lambda: pids)
        taken = RunLock(self.path)
        taken.acquire()
        self.held.append(taken)
        return taken

    @staticmethod
    def suspend(holder: RunLock) -> None:
        holder._stopped.set()
        assert holder._heart is not None
        holder._heart.join()

    @staticmethod
    def wake(holder: RunLock) -> None:
        holder._stopped.clear()
        threading.Thread(target=holder._beat, daemon=True).start()


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    for name, seconds in (
        ("HEARTBEAT_INTERVAL_S", 0.05),
        ("HOLDER_LOST_AFTER_S", 1.0),
        ("LOOK_INTERVAL_S", 0.02),
        ("JUDGE_POLL_INTERVAL_S", 0.01),
        ("JUDGE_TIMEOUT_S", 0.3),
    ):
        monkeypatch.setattr(lock, name, seconds)
    made = Hosts(tmp_path / "run.lock", monkeypatch)
    yield made
    for one in made.held:
        one.release()


def test_a_holder_that_was_suspended_notices_that_it_was_replaced(hosts: Hosts) -> None:
    first = hosts.take("a")
    first.fence.check()
    hosts.suspend(first)
    second = hosts.take("b")
    with pytest.raises(RunTaken, match=r"taken over by another process \(start 2, this one is 1\)"):
        first.fence.check()
    first.check()  # its heart stands still: it cannot know yet
    before = os.stat(first.path).st_mtime_ns
    hosts.suspend(second)
    before = os.stat(first.path).st_mtime_ns
    hosts.wake(first)
    assert first.taken.wait(10)
    with pytest.raises(RunTaken):
        first.check()
    assert os.stat(first.path).st_mtime_ns == before, "it must not beat for the other one"
    second.fence.check()


def test_a_driver_that_was_suspended_is_refused_when_another_one_writes_for_the_same_holder(
    hosts: Hosts,
) -> None:
    held = hosts.take("a")
    former = held.fence
    held.renew()
    with pytest.raises(RunTaken, match=r"start 2, this one is 1"):
        former.check()
    held.fence.check()
    time.sleep(0.3)
    assert not held.taken.is_set(), "its heart goes on"
    held.check()


def test_a_replaced_holder_saves_nothing(hosts: Hosts, tmp_path: Path) -> None:
    first = hosts.take("a")
    store = CheckpointStore(tmp_path / "checkpoints", keep=1, fence=first.fence)

    async def write(folder: str) -> None:
        (Path(folder) / "weights").write_bytes(b"1")

    asyncio.run(store.save(1, {}, write))
    hosts.suspend(first)
    theirs = tmp_path / "checkpoints" / "step_000002.7.tmp"

    async def while_replaced(folder: str) -> None:
        await write(folder)
        hosts.take("b")
        theirs.mkdir()

    with pytest.raises(RunTaken):
        asyncio.run(store.save(2, {}, while_replaced))
    with pytest.raises(RunTaken):
        asyncio.run(store.save(2, {}, write))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "latest",
        "step_000001",
        theirs.name,
    ]
    with pytest.raises(RunTaken):
        Origin(tmp_path / "checkpoints", "auto", 0, first.fence).check()
    Origin(tmp_path / "checkpoints", "auto", 0).check()


def test_a_dead_holder_of_another_host_is_waited_out_and_a_live_one_refused(hosts: Hosts) -> None:
    dead = hosts.take("a")
    hosts.suspend(dead)
    began = time.monotonic()
    live = hosts.take("b")
    assert time.monotonic() - began > 0.5, "it could have been alive"
    with pytest.raises(RunNameInUse, match="belongs to a live run"):
        hosts.take("c")
    live.fence.check()


def test_a_live_holder_in_another_container_of_the_host_is_refused_and_a_dead_one_waited_out(
    hosts: Hosts,
) -> None:
    first = hosts.take("a", "pid:[1]")
    with pytest.raises(
        RunNameInUse,
        match=rf"belongs to a live run \(process {os.getpid()} on a, in another container\)",
    ):
        hosts.take("a", "pid:[2]")
    first.fence.check()
    hosts.suspend(first)
    began = time.monotonic()
    hosts.take("a", "pid:[2]")
    assert time.monotonic() - began > 0.5, "it could have been alive"


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_flock_only_one_wins(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def flock(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files.fcntl, "flock", flock)
    left_over = hosts.path.with_suffix(".judging")
    left_over.touch()
    began = time.monotonic()
    first = hosts.take("a")
    assert time.monotonic() - began > 0.2, "somebody could have been judging"
    assert not left_over.exists()
    with pytest.raises(RunNameInUse):
        hosts.take("b")
    monkeypatch.setattr(lock.socket, "gethostname", lambda: "a")
    first.release()
    assert hosts.path.read_text(encoding="utf-8") == ""
    assert hosts.take("b").fence.number == 2


def test_a_lock_that_somebody_judges_for_ever_is_a_typed_error(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(files.fcntl, "flock", flock)
    with pytest.raises(
        ConfigError, match=r"run\.lock is held by a process that judges it, for more than 0\.6 s"
    ):
        hosts.take("a")
    monkeypatch.undo()


def test_a_fence_holds_wherever_it_is_looked_at_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``output`` is relative by default, and the driver has another working directory."""
    monkeypatch.chdir(tmp_path)
    held = RunLock(Path("run.lock"))
    held.acquire()
    (tmp_path / "elsewhere").mkdir()
    os.chdir(tmp_path / "elsewhere")
    held.fence.check()
    os.chdir(tmp_path)
    held.release()


def test_a_number_that_is_not_there_for_a_while_is_no_loss(hosts: Hosts) -> None:
    """An output that was unmounted: nobody has taken the run, and its heart goes on when it is
    back.
    """
    held = hosts.take("a")
    away = held.fence.path.with_suffix(".away")
    held.fence.path.rename(away)
    with pytest.raises(OSError, match="not there"):
        held.fence.check()
    time.sleep(0.3)
    assert not held.taken.is_set()
    away.rename(held.fence.path)
    before = os.stat(held.path).st_mtime_ns
    deadline = time.monotonic() + 10
    while os.stat(held.path).st_mtime_ns == before:
        assert time.monotonic() < deadline, "its heart stands still"
        time.sleep(0.02)
    held.fence.check()


def test_what_is_unknown_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file server that does not answer: the next look may."""

    def read_text(*_: object, **__: object) -> str:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "read_text", read_text)
    fence = Fence(tmp_path / "run.fence", 1)
    with pytest.raises(OSError, match="Stale"):
        fence.check()
    Origin(tmp_path, "auto", 0, fence).check()
