"""Files that are replaced whole, and signals that are noted: what a reader sees, and what is left when something fails."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rayloop.core.failures import CheckpointError, CheckpointStorageFailed
from rayloop.core.files import kind_of, write_whole
from rayloop.core.signals import STOP, StopSignals, handling


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "head.json"
    for text in (b"first", b"second"):
        write_whole(path, text, mode=0o640, durable=durable)
        assert path.read_bytes() == text
        assert path.stat().st_mode & 0o777 == 0o640
    assert [file.name for file in tmp_path.iterdir()] == ["head.json"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
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


@pytest.mark.parametrize(("below", "kind"), [(OSError(28, "no space"), CheckpointStorageFailed), (ValueError(), CheckpointError)])
def test_a_full_disk_is_seen_below_the_error_that_hides_it(below: Exception, kind: type[CheckpointError]) -> None:
    """torch raises a RuntimeError of its own while it handles the system's."""
    error = RuntimeError("unexpected pos 704 vs 598")
    error.__context__ = below
    assert kind_of(error) is kind


def test_signals_are_noted_within_the_block_only() -> None:
    before = [signal.getsignal(number) for number in STOP]
    reported = StopSignals()
    with handling(reported, *STOP):
        assert (reported.first, reported.again) == (None, False)
        os.kill(os.getpid(), signal.SIGINT)
        assert (reported.first, reported.again) == (signal.SIGINT, False)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (reported.first, reported.again, reported.near_limit()) == (signal.SIGINT, True, False)
    assert [signal.getsignal(number) for number in STOP] == before
