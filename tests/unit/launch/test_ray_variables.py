"""The folder of a private cluster."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from rayloop.core.failures import ConfigError
from rayloop.launch import ray_variables
from rayloop.launch.ray_variables import private_cluster, sweep, temporary_folder


def test_a_folder_that_is_too_long_for_sockets_is_refused_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("long" * 12)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with (
        pytest.raises(
            ConfigError, match=r"too long paths\. Set TMPDIR to a folder of at most \d+ characters"
        ),
        private_cluster(),
    ):
        pass
    assert not any(deep.iterdir())


def test_a_sweep_leaves_a_folder_alone_that_is_being_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process starts a cluster when the lock's file is there, and not locked yet."""
    lock_file = ray_variables.lock_file

    def swept_before(file: Any, **options: Any) -> None:
        monkeypatch.setattr(ray_variables, "lock_file", lock_file)
        sweep()
        lock_file(file, **options)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ray_variables, "lock_file", swept_before)
    with temporary_folder() as folder:
        assert folder.is_dir()
        sweep()
        assert folder.is_dir(), "its process lives"
    assert not folder.exists()


KILLED = """
import os
from rayloop.launch.ray_variables import temporary_folder
with temporary_folder():
    os._exit(0)
"""


def test_a_sweep_removes_the_folder_of_a_process_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    subprocess.run(
        [sys.executable, "-c", KILLED], env={**os.environ, "TMPDIR": str(tmp_path)}, check=True
    )
    assert len(list(tmp_path.iterdir())) == 1
    sweep()
    assert not any(tmp_path.iterdir())


def test_a_folder_is_removed_although_a_process_still_writes_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's daemons end a moment after the cluster: here one writes while its folder is removed."""
    rmtree = shutil.rmtree

    def rmtree_and_write(path: Path, **options: Any) -> None:
        rmtree(path, **options)
        monkeypatch.setattr(shutil, "rmtree", rmtree)
        path.mkdir()
        (path / "late.log").touch()

    with temporary_folder(tmp_path) as folder:
        monkeypatch.setattr(shutil, "rmtree", rmtree_and_write)
    assert not folder.exists()
