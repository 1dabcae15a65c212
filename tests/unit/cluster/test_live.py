"""``status``, ``logs`` and ``stop`` of runs from their folders; tests/cluster/test_live.py has a
run that lives.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import ray

from rayloop.cli import main
from rayloop.cluster.stages import live
from rayloop.commands import arguments
from rayloop.commands import live as live_command
from rayloop.core import events, incidents
from rayloop.core.failures import START_AGAIN_EXIT_CODE
from rayloop.run.folder import RunFolder
from rayloop.run.lock import Holder
from rayloop.run.place import Place, findable


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run that was saved at step 10 and lost an engine at step 12 of 60."""
    made = RunFolder(tmp_path, "run")
    made.path.mkdir()
    made.config.write_text("steps: 60\nrecovery: {replacements: 4}\n", encoding="utf-8")
    for event, step in (
        (events.Start("c0ffee", {}), None),
        (events.Starting({"rollout": 2, "policy": 1}), 0),
        (events.Started(1.0), 0),
        (events.Begin(1, None, 0, None), 0),
        (events.CheckpointEvent("step_000010", 0.1), 10),
        (events.Trained({}), 12),
        (incidents.WorkerLostEvent("rollout", 1, why="its node\x1b[31m died"), 12),
    ):
        made.events.emit(event, step)
    return made


def test_status_tells_step_checkpoint_roles_and_incidents(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    with folder.acquired():
        assert main(["status", str(folder.path)]) == 0
    text = re.sub(r"\d+ s ago", "N s ago", capsys.readouterr().out)
    assert "runs it, last sign of life N s ago" in text
    assert "step 12 of 60, last progress N s ago" in text
    assert "checkpoint of step 10, saved N s ago" in text
    assert "N s ago: [12] worker_lost: role rollout, worker 1" in text
    assert [
        line.split() for line in text.splitlines() if line.startswith(("rollout", "policy"))
    ] == [
        ["rollout", "1", "2", "1", "7"],
        ["policy", "1", "1", "0", "2"],
    ]
    assert "its node\\x1b[31m died" in text, "what would steer the terminal is written out"


def test_status_for_programs_is_one_object(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    with folder.acquired():
        assert main(["status", str(folder.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["steps"], found["checkpoint_step"], found["end"]) == (
        12,
        60,
        10,
        None,
    )
    assert found["roles"]["rollout"] == {"in_service": 1, "wanted": 2, "lost": 1, "budget_left": 7}
    assert found["incidents"][0]["event"] == "worker_lost"


def test_status_of_a_run_that_nobody_runs_says_how_it_ended(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["status", str(folder.path)])
    assert "nobody runs it, and it recorded no end" in capsys.readouterr().out
    folder.events.emit(events.Failed("Stalled", "nothing moved", {}), 12)
    main(["status", str(folder.path)])
    text = capsys.readouterr().out
    assert "ended: failed, nothing moved" in text
    assert "in service" not in text, "nothing should be"
    assert "worker_lost: role" in text


def test_status_of_no_run_says_what_is_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_logs_of_a_run_that_ended_are_those_of_its_folder(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.logs.mkdir()
    (folder.logs / "worker-1.err").write_text(
        "".join(f"line {n}\n" for n in range(50)), encoding="utf-8"
    )
    assert main(["logs", str(folder.path), "--lines", "2"]) == 0
    assert capsys.readouterr().out == "=== logs/worker-1.err ===\nline 48\nline 49\n\n"
    assert main(["logs", str(folder.path), "--role", "rollout"]) == 2
    assert "leave out --role" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["stacks", "stop"])
def test_a_run_that_does_not_live_is_named(
    word: str, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word, str(folder.path)]) == 2
    assert str(folder.path) in capsys.readouterr().err


HOLDER = """
import signal, sys, time
from rayloop.core import events
from rayloop.run.folder import RunFolder
from rayloop.run.lock import Holder
folder = RunFolder.at(sys.argv[1])
def end(*_):
    if sys.argv[2] == "deaf":
        return
    folder.events.emit(events.PreemptedEvent({}) if sys.argv[2] == "saves" else events.Failed("NotSaved", "full disk", {}), 12)
    sys.exit(0)
with folder.acquired():
    signal.signal(signal.SIGTERM, end)
    print("ready", flush=True)
    while True:
        time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("how", "code", "says"),
    [
        ("saves", 0, "a checkpoint is there to continue from"),
        ("fails", 1, "full disk"),
        ("deaf", 1, "has not ended in time"),
    ],
)
def test_stop_asks_the_process_and_waits_for_its_end(
    how: str, code: int, says: str, folder: RunFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder.path), how], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        elsewhere = folder.path / "checkpoints"
        within = "1" if how == "deaf" else "60"
        assert (
            main(["stop", str(folder.path), str(elsewhere), "--here", "--within", within]) == code
        )
    finally:
        process.kill()
        process.wait()
    out, err = capfd.readouterr()
    assert says in out + err


def test_stop_here_leaves_folders_alone_that_are_no_runs(folder: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "huggingface").mkdir()
    assert (
        main(
            ["stop", str(folder.path), str(tmp_path / "huggingface"), str(tmp_path / "*"), "--here"]
        )
        == 0
    )


class Ended:
    """A driver that dies, or is cut off, while it is asked to stop."""

    def __init__(self, lost: Exception) -> None:
        self.lost = lost

    @property
    def stop(self) -> Ended:
        return self

    def remote(self) -> Exception:
        return self.lost


@pytest.mark.parametrize(
    ("found", "taken"),
    [
        (ValueError("Failed to look up actor with name 'driver-1'"), True),
        (Ended(ray.exceptions.ActorDiedError()), True),
        (Ended(ray.exceptions.ActorUnavailableError("the network", b"1" * 16)), False),
        (Ended(ray.exceptions.GetTimeoutError()), False),
    ],
)
def test_a_driver_that_ends_as_it_is_asked_to_is_no_error(
    found: Any, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get_actor(name: str, namespace: str) -> Any:
        if isinstance(found, Exception):
            raise found
        return found

    def get(answer: Exception, timeout: float) -> None:
        raise answer

    monkeypatch.setattr(
        live, "joined", lambda place: nullcontext([live.LiveActor("driver-1", "a", 1, "here")])
    )
    monkeypatch.setattr(ray, "get_actor", get_actor)
    monkeypatch.setattr(ray, "get", get)
    with nullcontext() if taken else pytest.raises(live.NoAnswer, match="does not answer"):
        live.stop_driver(Place("127.0.0.1:1", "", "rayloop-run"))


DEAD, SILENT = Ended(ray.exceptions.ActorDiedError()), Ended(ray.exceptions.GetTimeoutError())


@pytest.mark.parametrize(
    ("first", "second", "asked", "taken"),
    [
        ("lives", DEAD, ["first"], True),
        (DEAD, "lives", ["first", "second"], True),
        (SILENT, "lives", ["first", "second"], True),
        (DEAD, SILENT, ["first", "second"], False),
        (SILENT, DEAD, ["first", "second"], False),
    ],
)
def test_of_two_drivers_the_one_that_lives_is_stopped(
    first: Any, second: Any, asked: list[str], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray still lists the one that died, under a name that may come before or after the other's."""
    answers, calls = {"driver-1": first, "driver-2": second}, list[str]()

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        @property
        def stop(self) -> Named:
            return self

        def remote(self) -> str:
            return self.name

    def get(name: str, timeout: float) -> None:
        calls.append("first" if name == "driver-1" else "second")
        if isinstance(answers[name], Ended):
            raise answers[name].lost

    listed = [live.LiveActor(name, "a", 1, "here") for name in answers]
    monkeypatch.setattr(live, "joined", lambda place: nullcontext(listed))
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: Named(name))
    monkeypatch.setattr(ray, "get", get)
    with nullcontext() if taken else pytest.raises(live.NoAnswer, match="does not answer"):
        live.stop_driver(Place("127.0.0.1:1", "", "rayloop-run"))
    assert calls == asked


def test_status_and_stop_of_a_run_in_another_container(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, signals = list[Place](), list[int]()
    elsewhere = replace(Holder.this_process(), pids="pid:[1]")
    place = Place("127.0.0.1:1", "", "x")
    monkeypatch.setattr(live_command.os, "kill", lambda *_: signals.append(1))
    monkeypatch.setattr(live_command, "live_cluster", lambda _: nullcontext(place))
    monkeypatch.setattr(live, "stop_driver", asked.append)
    folder.lock.path.write_text(json.dumps(asdict(elsewhere)), encoding="utf-8")
    assert main(["status", str(folder.path)]) == 0
    assert (
        f"process {elsewhere.pid} on {elsewhere.host}, in another container runs it"
        in capsys.readouterr().out
    )
    monkeypatch.setattr(live_command, "_exit_code", lambda *_: 0)
    assert main(["stop", str(folder.path)]) == 0
    assert (asked, signals) == ([place], []), "the same number may be another process here"


def test_a_machine_on_which_ray_has_died_is_named_in_time(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limit, limits = "RAY_gcs_server_request_timeout_seconds", list[str | None]()

    def init(**_: Any) -> None:
        limits.append(os.environ.get(limit))
        raise ConnectionError("Failed to connect to Ray cluster at 127.0.0.1:1")

    monkeypatch.setattr(arguments, "live_place", lambda _: Place("127.0.0.1:1", "", "x"))
    monkeypatch.setattr(ray, "init", init)
    for command in ("stacks", "logs"):
        with findable(folder.cluster, "127.0.0.1:1", "x"):
            assert main([command, str(folder.path)]) == START_AGAIN_EXIT_CODE
        assert "no node of its cluster lives on this machine" in capsys.readouterr().err
    assert limits == ["15", "15"], "Ray itself would look for a minute"
