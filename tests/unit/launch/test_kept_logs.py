"""Which of Ray's logs outlive their node."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rayloop.launch import ray_process
from rayloop.launch.ray_process import LOGS, keep


def write(folder: Path, name: str, content: bytes, when: int) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    os.utime(folder / name, (when, when))


def test_the_newest_bytes_are_kept(tmp_path: Path) -> None:
    logs, target = tmp_path / "logs", tmp_path / "kept"
    write(logs, "raylet.out", b"old" * 10, 1)
    write(logs, "old/worker.err", b"0123456789", 2)
    write(logs, "gcs_server.out", b"newest", 3)
    write(logs, "empty.log", b"", 4)
    assert keep(logs, target, most=10) == 2
    assert {
        str(f.relative_to(target)): f.read_bytes() for f in target.rglob("*") if f.is_file()
    } == {
        "gcs_server.out": b"newest",
        "old/worker.err": b"6789",
    }
    assert keep(logs, tmp_path / "others", but="worker*") == 2
    assert keep(logs, target) == 3
    assert (target / "raylet.out").read_bytes() == b"old" * 10


def test_a_log_that_cannot_be_copied_is_left_out_alone(tmp_path: Path) -> None:
    logs, target = tmp_path / "logs", tmp_path / "kept"
    write(logs, "raylet.out", b"old", 1)
    write(logs, "gcs_server.out", b"newest", 2)
    (target / "gcs_server.out").mkdir(parents=True)  # nothing can be written under this name
    assert keep(logs, target) == 1
    assert (target / "raylet.out").read_bytes() == b"old"


def test_a_node_that_fails_keeps_its_logs_and_a_few_of_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_process, "KEPT_LOG_FOLDERS", 2)
    for number in range(4):
        temporary = tmp_path / f"ray-{number}"
        monkeypatch.setattr(
            ray_process.time, "strftime", lambda form, number=number: f"2026-{number}"
        )
        write(temporary / LOGS, "raylet.err", b"why", number)
        with pytest.raises(RuntimeError), ray_process.kept_logs(temporary, tmp_path / "rendezvous"):
            raise RuntimeError("Ray ended")
    kept = sorted((tmp_path / "rendezvous.logs").iterdir())
    assert [folder.name.split("-2026-")[1].split("-")[0] for folder in kept] == ["2", "3"]
    assert (kept[0] / "raylet.err").read_bytes() == b"why"


def test_what_cannot_be_kept_fails_nothing(tmp_path: Path) -> None:
    assert keep(tmp_path / "nowhere", tmp_path / "kept") == 0
    write(tmp_path / "logs", "raylet.out", b"x", 1)
    (tmp_path / "kept").touch()
    assert keep(tmp_path / "logs", tmp_path / "kept") == 0
