"""Run folders that somebody else made and that were unpacked here: nothing in them decides where
this user's files are sent.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from rayloop.cli import main
from rayloop.commands.arguments import live_place
from rayloop.core.failures import ConfigError
from rayloop.run.folder import RunFolder
from rayloop.run.lock import Holder
from rayloop.run.place import findable, namespace, own_copy, read_place

COMMANDS = (["logs"], ["stacks"], ["policy", "serve", "--run"])
"""Which join the cluster that a run's folder names; ``stop`` does it for a run of another machine.
"""


@contextmanager
def listener() -> Iterator[tuple[str, list[object]]]:
    """An address, and the connections that came to it."""
    came: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            try:
                while True:
                    came.append(server.accept())
            except OSError:
                return

        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}", came
        server.shutdown(socket.SHUT_RDWR)


def unpacked(folder: Path, address: str, token: Path, holder: Holder | None) -> RunFolder:
    """What an archive brought: a run that seems to live, whose files are ours by now."""
    folder.mkdir()
    run = RunFolder.at(folder)
    run.config.write_text("steps: 3\n", encoding="utf-8")
    place = {"address": address, "token_file": str(token), "namespace": namespace(folder)}
    run.cluster.write_text(json.dumps(place), encoding="utf-8")
    run.cluster.chmod(0o600)
    if holder is not None:
        run.lock.path.write_text(json.dumps(asdict(holder)), encoding="utf-8")
    return run


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("lives", [False, True])
def test_a_strangers_run_is_not_joined(
    command: list[str], lives: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even when its lock names a process of this machine that lives, and the token is one that
    this user's runs have.
    """
    token = tmp_path / "rayloop-abcdefgh" / "token"
    token.parent.mkdir(mode=0o700)
    token.write_text("secret", encoding="utf-8")
    token.chmod(0o600)
    with listener() as (address, came):
        run = unpacked(tmp_path / "run", address, token, Holder.this_process() if lives else None)
        assert main([*command, str(run.path)]) == 2
        assert not came
    assert "not a live run" in capsys.readouterr().err


def test_a_run_of_another_machine_is_not_stopped_through_a_strangers_cluster(
    tmp_path: Path,
) -> None:
    elsewhere = Holder(1, "another-machine", "boot", 0.0)
    with listener() as (address, came):
        run = unpacked(tmp_path / "run", address, tmp_path / "token", elsewhere)
        assert main(["stop", str(run.path), "--within", "1"]) == 2
        assert not came


def test_an_own_run_is_found_while_it_lives(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "run")
    with listener() as (address, _), run.acquired():
        with findable(run.cluster, address, namespace(run.path)):
            run.cluster.write_text(
                json.dumps(
                    {"address": "203.0.113.9:6379", "token_file": "/etc/passwd", "namespace": "x"}
                )
            )
            place = live_place(run)
            assert (place.address, place.token_file, place.namespace) == (
                address,
                "",
                namespace(run.path),
            )
            assert own_copy(run.cluster).stat().st_mode & 0o777 == 0o600
        with pytest.raises(ConfigError, match="is not a live run"):
            live_place(run)


def test_what_a_killed_run_left_is_not_followed(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "run")
    run.path.mkdir()
    with listener() as (address, came), findable(run.cluster, address, namespace(run.path)):
        with pytest.raises(ConfigError, match="has ended, or was killed"):
            live_place(run)
        assert not came


def test_a_copy_that_others_may_write_is_refused(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "run")
    run.path.mkdir()
    with findable(run.cluster, "127.0.0.1:1", "x"):
        own_copy(run.cluster).parent.chmod(0o777)
        try:
            with pytest.raises(ConfigError, match="others must not write it"):
                read_place(run.cluster)
        finally:
            own_copy(run.cluster).parent.chmod(0o700)


def test_a_home_that_cannot_be_written_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAYLOOP_RENDEZVOUS", str(tmp_path / "file"))
    with findable(tmp_path / "cluster.json", "127.0.0.1:1", "x"):
        assert (tmp_path / "cluster.json").exists()


def test_the_last_lines_of_a_large_log_are_read_from_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder(tmp_path, "run")
    run.logs.mkdir(parents=True)
    with (run.logs / "worker-1.err").open("wb") as file:
        file.truncate(1 << 40)
        file.seek(1 << 40)
        file.write(b"\nthe end\n")
    assert main(["logs", str(run.path), "--lines", "1"]) == 0
    assert capsys.readouterr().out == "=== logs/worker-1.err ===\nthe end\n\n"
