"""A private cluster whose daemons are slow to start is started again, and what was left of the
first attempt is ended. What the storage refuses when it ends is not why the run did.
"""

from __future__ import annotations

import errno
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rayloop.cluster import session
from rayloop.core.failures import ConfigError, MachineFailed, Preempted, StorageFailed
from rayloop.launch import ray_process
from rayloop.launch.ray_process import LOGS
from rayloop.launch.ray_variables import MAX_FOLDER_CHARACTERS
from rayloop.run import place
from rayloop.run.place import findable
from tests.support.runs import eventually

SLOW = (
    "The current node timed out during startup. This could happen because some of the raylet failed"
    " to startup."
)


@pytest.fixture
def daemons() -> Iterator[list[subprocess.Popen[bytes]]]:
    begun: list[subprocess.Popen[bytes]] = []
    yield begun
    for daemon in begun:
        daemon.kill()
        daemon.wait()


def starting(
    monkeypatch: pytest.MonkeyPatch, begun: list[subprocess.Popen[bytes]], *said: str
) -> None:
    """Let Ray's attempts to start leave a daemon behind, and then say this, one after the other."""
    answers = iter(said)

    def init(**options: Any) -> None:
        begun.append(subprocess.Popen(["sleep", "60"]))
        if why := next(answers):
            raise Exception(why)

    monkeypatch.setattr(session.ray, "init", init)
    monkeypatch.setattr(session.ray, "shutdown", lambda: None)


def alive(begun: list[subprocess.Popen[bytes]]) -> list[bool]:
    return [daemon.poll() is None for daemon in begun]


def test_a_slow_start_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, daemons: list[subprocess.Popen[bytes]]
) -> None:
    mine = subprocess.Popen(["sleep", "60"])
    starting(monkeypatch, daemons, SLOW, SLOW, "")
    session.start("folder")
    assert alive(daemons) == [False, False, True]
    assert alive([mine]) == [True], "not everything below this process is Ray's"
    daemons.append(mine)


def test_the_longest_folder_has_room_for_the_paths_of_rays_sockets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = list[str]()
    monkeypatch.setattr(session, "start", lambda folder, **_: given.append(folder))
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        longest = Path(short) / ("x" * (MAX_FOLDER_CHARACTERS - len(short) - 1))
        longest.mkdir()
        with session.session({}, None, str(longest), tmp_path):
            pass
    [folder] = given
    socket_path = f"{folder}/session_2026-12-01_04-05-06_000000_4194304/sockets/plasma_store"
    assert len(socket_path) == 107


def test_it_is_given_up_at_last(
    monkeypatch: pytest.MonkeyPatch, daemons: list[subprocess.Popen[bytes]]
) -> None:
    starting(monkeypatch, daemons, *[SLOW] * session.START_ATTEMPTS)
    with pytest.raises(
        MachineFailed,
        match=(
            r"Ray did not start here, 3 attempts in \d+ s: .*timed out.*`uptime`.*`df -h /dev/shm`"
        ),
    ) as given_up:
        session.start("folder")
    assert given_up.value.exit_code == 69
    assert alive(daemons) == [False] * session.START_ATTEMPTS


def test_the_logs_of_a_failed_start_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, daemons: list[subprocess.Popen[bytes]]
) -> None:
    def init(**options: Any) -> None:
        folder = Path(options["_temp_dir"]) / LOGS
        folder.mkdir(parents=True)
        (folder / "gcs_server.out").write_text("no room", encoding="utf-8")
        raise Exception("no space left on device")

    monkeypatch.setattr(session.ray, "init", init)
    (tmp_path / "logs").mkdir()
    with pytest.raises(MachineFailed), session.session({}, None, str(tmp_path), tmp_path / "logs"):
        pass
    assert (tmp_path / "logs/ray/gcs_server.out").read_text(encoding="utf-8") == "no room"


@pytest.mark.parametrize("ends", [True, False], ids=["a moment later", "never"])
def test_an_agent_that_outlives_its_daemon_leaves_no_folder(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    daemons: list[subprocess.Popen[bytes]],
    ends: bool,
) -> None:
    """The agent makes its folder again after Ray's shutdown, and then ends or does not."""
    monkeypatch.setattr(ray_process, "OWN_END_TIMEOUT_S", 3.0)
    folders: list[Path] = []

    def init(**options: Any) -> None:
        folders.append(Path(options["_temp_dir"]) / "session")
        lasts = "" if ends else "; sleep 60"
        agent = f"(sleep 1; mkdir -p {folders[0]}{lasts}) & wait"
        daemons.append(subprocess.Popen(["bash", "-c", agent]))

    def shutdown() -> None:
        daemons[0].kill()
        daemons[0].wait()

    monkeypatch.setattr(session.ray, "init", init)
    monkeypatch.setattr(session.ray, "shutdown", shutdown)
    with session.session({}, None, str(tmp_path), tmp_path / "logs"):
        # The daemon has started its agent.
        eventually(lambda: bool(psutil.Process(daemons[0].pid).children()), "an agent", 10)
    time.sleep(1.5)
    assert not list(tmp_path.iterdir())


def test_another_failure_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, daemons: list[subprocess.Popen[bytes]]
) -> None:
    starting(monkeypatch, daemons, "no space left on device")
    with pytest.raises(MachineFailed, match=r"1 attempt in .*no space left"):
        session.start("folder")
    assert len(daemons) == 1


def test_too_few_open_files_are_refused_before_ray_starts(
    monkeypatch: pytest.MonkeyPatch, daemons: list[subprocess.Popen[bytes]]
) -> None:
    monkeypatch.setattr(session, "open_files", lambda: (64, 64))
    with pytest.raises(ConfigError, match=r"64 files may be open at once here .* `ulimit -n 8192`"):
        session.start("folder")
    assert not daemons


def test_a_disk_that_takes_no_logs_does_not_replace_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``logs`` is a file: whatever is written below it fails, as on a disk that the checkpoint has
    just filled.
    """
    (tmp_path / "logs").touch()

    def start(folder: str, **_: Any) -> None:
        logs = Path(folder) / LOGS
        logs.mkdir(parents=True)
        (logs / "worker-1.out").write_text("said", encoding="utf-8")

    monkeypatch.setattr(session, "start", start)
    monkeypatch.setattr(session.ray, "shutdown", lambda: None)
    with pytest.raises(Preempted), session.session({}, None, str(tmp_path), tmp_path / "logs"):
        raise Preempted("saved")


def test_a_full_disk_names_the_file_that_the_start_could_not_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(place, "write_whole", full)
    with (
        pytest.raises(
            StorageFailed, match=r"cluster\.json cannot be used: No space left on device"
        ),
        findable(tmp_path / "cluster.json", "1.2.3.4:5", "run"),
    ):
        pass


def test_a_place_that_cannot_be_removed_does_not_replace_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unlink(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(Preempted), findable(tmp_path / "cluster.json", "1.2.3.4:5", "run"):
        raise Preempted("saved")
