"""Files that are replaced whole, and signals that are noted: what a reader sees, and what is left
when something fails.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest

from rayloop.core.failures import CheckpointError, CheckpointStorageFailed
from rayloop.core.files import kind_of, sync, write_whole
from rayloop.launch.signals import STOP, StopSignals, handling


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "head.json"
    for text in (b"first", b"second"):
        write_whole(path, text, mode=0o640, durable=durable)
        assert path.read_bytes() == text
        assert path.stat().st_mode & 0o777 == 0o640
    assert [file.name for file in tmp_path.iterdir()] == ["head.json"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "head.json"
    path.write_bytes(b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, failing, full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["head.json"]


def test_two_threads_may_write_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second thread writes while the first one is about to rename."""
    path, replace = tmp_path / "head.json", os.replace

    def second(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(write_whole, path, b"second").result()
        assert path.read_bytes() == b"second"
        replace(source, target)

    monkeypatch.setattr(os, "replace", second)
    write_whole(path, b"first")
    assert path.read_bytes() == b"first"
    assert [file.name for file in tmp_path.iterdir()] == ["head.json"]


@pytest.mark.parametrize("durable", [True, False])
def test_a_durable_file_has_its_name_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    """The folder is synced after the rename: the sync of the file alone leaves the old content
    under the name.
    """
    path, synced = tmp_path / "head.json", list[tuple[str, bool]]()

    def record(handle: int) -> None:
        synced.append(
            ("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file", path.exists())
        )

    monkeypatch.setattr(os, "fsync", record)
    write_whole(path, b"new", durable=durable)
    assert synced == ([("file", False), ("folder", True)] if durable else [])


@pytest.mark.parametrize(("number", "raises"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_only_a_folder_that_cannot_be_synced_is_left_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, raises: bool
) -> None:
    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=os.strerror(number)):
        sync(tmp_path / "file")
    with pytest.raises(OSError, match=os.strerror(number)) if raises else nullcontext():
        sync(tmp_path)


@pytest.mark.parametrize(
    ("below", "kind"),
    [(OSError(28, "no space"), CheckpointStorageFailed), (ValueError(), CheckpointError)],
)
def test_a_full_disk_is_seen_below_the_error_that_hides_it(
    below: Exception, kind: type[CheckpointError]
) -> None:
    """torch raises a RuntimeError of its own while it handles the system's."""
    error = RuntimeError("unexpected pos 704 vs 598")
    error.__context__ = below
    assert kind_of(error) is kind


def test_a_closed_terminal_counts_once_and_what_nohup_ignores_stays_ignored() -> None:
    """The kernel and the shell each send a SIGHUP: the second one is not the second wish to end."""
    reported = StopSignals()
    before = signal.signal(
        signal.SIGHUP, signal.SIG_DFL
    )  # the tests may have been started by nohup
    try:
        with handling(reported, *STOP):
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGHUP)
        assert (reported.first, reported.again) == (signal.SIGHUP, False)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        reported = StopSignals()
        with handling(reported, *STOP):
            os.kill(os.getpid(), signal.SIGHUP)
            assert reported.first is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


CLOSED = """
import os, signal, sys, time
from rayloop.launch.signals import STOP, StopSignals, handling
from rayloop.view.progress import Progress
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.setsid()
import fcntl, termios
fcntl.ioctl(1, termios.TIOCSCTTY, 0)
signals = StopSignals()
with handling(signals, *STOP), Progress(3) as progress:
    progress.note("up")
    while signals.first is None:
        progress.doing("a step")
        time.sleep(0.01)
    progress.note("saving")
    print("saved", flush=True)
    print("why", file=sys.stderr)
sys.exit(75 if signals.first == signal.SIGHUP else 1)
"""


def test_a_process_whose_terminal_is_closed_prints_on_and_ends_as_asked() -> None:
    """It is told by a SIGHUP, and everything that it prints from then on would raise."""
    ours, its = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", CLOSED], stdin=its, stdout=its, stderr=its, start_new_session=False
    ) as process:
        os.close(its)
        assert os.read(ours, 2)
        os.close(ours)
        assert process.wait(60) == 75


def test_signals_are_noted_within_the_block_only() -> None:
    before = [signal.getsignal(number) for number in STOP]
    reported = StopSignals()
    with handling(reported, *STOP):
        assert (reported.first, reported.again) == (None, False)
        os.kill(os.getpid(), signal.SIGINT)
        assert (reported.first, reported.again) == (signal.SIGINT, False)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (reported.first, reported.again, reported.near_limit()) == (
            signal.SIGINT,
            True,
            False,
        )
    assert [signal.getsignal(number) for number in STOP] == before
