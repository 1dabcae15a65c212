"""The run folder: who may use it, what is written, and what a resumed run does to later records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from rayloop.core.failures import ConfigError, RunNameInUse, StorageFailed
from rayloop.core.groups import (
    Credit,
    Group,
    Member,
    Scored,
    Status,
    TrajectoryState,
    Unscored,
    UnscoredKind,
)
from rayloop.core.types import (
    EndReason,
    ImageRef,
    Sampling,
    Summary,
    Task,
    Trajectory,
    TrajectoryId,
    Turn,
    Version,
)
from rayloop.rewards.saved import trajectory_of
from rayloop.run import lock
from rayloop.run.folder import RunFolder
from rayloop.run.lock import Holder, RunLock
from rayloop.run.records.jsonl import JsonLines
from rayloop.run.records.rollouts import NEW_CONTEXT, _ends, rollout_record
from tests.support.storage import full

HOLD = """
import sys
from rayloop.run.folder import RunFolder
with RunFolder(sys.argv[1], "run").acquired():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("output", ["/proc/runs", "a file", "a file/below"])
def test_a_folder_that_cannot_be_made_is_a_mistake_of_the_configuration(
    tmp_path: Path, output: str
) -> None:
    (tmp_path / "a file").touch()
    root = tmp_path / output
    message = f"{root}/run cannot be made or written to: .*output=FOLDER"
    with pytest.raises(ConfigError, match=message), RunFolder(root, "run").acquired():
        pass


@pytest.fixture
def other_process(tmp_path: Path):
    """A second process that holds the run folder until its stdin is closed."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_live_process_keeps_its_run_name(tmp_path: Path, other_process: subprocess.Popen) -> None:
    with (
        pytest.raises(RunNameInUse, match=f"process {other_process.pid} on"),
        RunFolder(tmp_path, "run").acquired(),
    ):
        pass


def test_the_lock_of_a_killed_process_is_recovered(
    tmp_path: Path, other_process: subprocess.Popen
) -> None:
    other_process.kill()
    other_process.wait()
    assert (
        json.loads((tmp_path / "run" / "run.lock").read_text(encoding="utf-8"))["pid"]
        == other_process.pid
    )
    with RunFolder(tmp_path, "run").acquired() as folder:
        assert (
            json.loads(folder.lock.path.read_text(encoding="utf-8"))["pid"]
            == Holder.this_process().pid
        )


def test_a_stop_while_the_lock_is_taken_leaves_it_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise SystemExit(15)

    folder = RunFolder(tmp_path, "run")
    monkeypatch.setattr(lock.threading, "Thread", stopped)
    with pytest.raises(SystemExit), folder.acquired():
        pass
    assert folder.lock.path.read_text(encoding="utf-8") == ""


def test_a_released_lock_is_free(tmp_path: Path, other_process: subprocess.Popen) -> None:
    other_process.communicate()
    assert (tmp_path / "run" / "run.lock").read_text(encoding="utf-8") == ""
    with RunFolder(tmp_path, "run").acquired() as folder:
        assert folder.path.is_dir()


def test_a_holder_is_gone_when_its_pid_was_reused() -> None:
    me = Holder.this_process()
    assert not me.is_dead(silence=1e9)
    assert replace(me, started=me.started - 60).is_dead(silence=0)


@pytest.mark.parametrize(
    "other",
    [{"host": "another-host"}, {"boot_id": "another boot"}, {"pids": "pid:[1]"}, {"pids": ""}],
)
def test_a_holder_that_cannot_be_seen_from_here_is_gone_after_silence(
    other: dict[str, str],
) -> None:
    elsewhere = replace(Holder.this_process(), **other)
    assert elsewhere.lives() is None
    assert elsewhere.is_dead(silence=lock.HOLDER_LOST_AFTER_S + 1)
    assert not elsewhere.is_dead(silence=lock.HOLDER_LOST_AFTER_S - 1)


def test_a_process_that_proc_hides_cannot_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    def no_process(pid: int) -> None:
        raise psutil.NoSuchProcess(pid)

    me = Holder.this_process()
    monkeypatch.setattr(lock.psutil, "Process", no_process)
    monkeypatch.setattr(lock.os, "kill", refused)
    assert me.lives() is None
    assert not me.is_dead(silence=0)


def test_a_lock_with_a_field_of_a_later_version_names_its_holder(tmp_path: Path) -> None:
    held = RunLock(tmp_path / "run.lock")
    me = Holder.this_process()
    held.path.write_text(json.dumps({**asdict(me), "later": 1}), encoding="utf-8")
    assert held.holder() == me


def test_the_heart_beats_on_after_a_moment_without_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats, again, touch = [], threading.Event(), os.utime

    def utime(path: Path, *times: None) -> None:
        if path.name != "run.lock":
            return touch(path, *times)
        beats.append(path)
        if len(beats) == 1:
            raise OSError(116, "Stale file handle", str(path))
        again.set()

    monkeypatch.setattr(lock, "HEARTBEAT_INTERVAL_S", 0.001)
    monkeypatch.setattr(lock.os, "utime", utime)
    with RunFolder(tmp_path, "run").acquired():
        assert again.wait(10), (
            "otherwise another host would take the run for dead after HOLDER_LOST_AFTER_S"
        )


def test_a_former_run_is_continued_or_refused(tmp_path: Path) -> None:
    with RunFolder(tmp_path, "run").acquired("never") as folder:
        folder.write_config("steps: 3\n")
        folder.metrics.append({"step": 2})
    with pytest.raises(RunNameInUse, match=r"last step: 2.*checkpoint.resume=auto"):
        RunFolder(tmp_path, "run").acquired("never").__enter__()
    with RunFolder(tmp_path, "run").acquired("auto") as folder:
        folder.write_config("steps: 4\n")
    assert folder.config.read_text(encoding="utf-8") == "steps: 4\n"
    assert (folder.path / "config.yaml.attempt-1").read_text(encoding="utf-8") == "steps: 3\n"


def test_a_failure_inside_releases_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), RunFolder(tmp_path, "run").acquired():
        raise ZeroDivisionError
    assert (tmp_path / "run" / "run.lock").read_text(encoding="utf-8") == ""


def test_records_carry_the_schema_and_survive_a_torn_line(tmp_path: Path) -> None:
    records = JsonLines(tmp_path / "metrics.jsonl")
    records.append({"step": 1, "reward/mean": np.float32(0.5), "actor/grad_norm": float("nan")})
    records.close()
    with records.path.open("a", encoding="utf-8") as file:
        file.write('{"step": 2, "rew')
    assert [record["step"] for record in records] == [1]
    records.append({"step": 3})
    first, second = records
    assert (first["schema_version"], first["reward/mean"], first["actor/grad_norm"]) == (
        1,
        0.5,
        None,
    )
    assert second["step"] == 3
    with pytest.raises(TypeError, match="cannot be written as JSON"):
        records.append({"step": object()})


def test_a_line_from_beside_spoils_none_of_the_process_that_writes_the_file(tmp_path: Path) -> None:
    lines, other = JsonLines(tmp_path / "a.jsonl"), JsonLines(tmp_path / "a.jsonl")
    other.beside({"n": 0})
    lines.append({"n": 1})
    other.beside({"n": 2})
    lines.append({"n": 3})
    assert [record["n"] for record in lines] == [0, 1, 2, 3]
    with lines.path.open("a", encoding="utf-8") as file:
        file.write('{"n": 4')
    other.beside({"n": 5})
    assert lines.path.read_text(encoding="utf-8").endswith('{"n": 4'), (
        "it stands still within a line"
    )


def test_truncation_leaves_each_step_once_and_loses_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "run")
    with folder.acquired():
        for attempt, last in ((1, 5), (2, 4), (3, 4)):
            folder.truncate_after(2 if attempt > 1 else 0)
            for step in range(3 if attempt > 1 else 1, last + 1):
                folder.metrics.append({"step": step, "attempt": attempt})
                folder.rollouts.write(step, [], {})
    assert [(record["step"], record["attempt"]) for record in folder.metrics] == [
        (1, 1),
        (2, 1),
        (3, 3),
        (4, 3),
    ]
    for attempt, steps in ((1, [3, 4, 5]), (2, [3, 4])):
        aside = JsonLines(folder.path / f"metrics.jsonl.attempt-{attempt}")
        assert [(record["step"], record["attempt"]) for record in aside] == [
            (step, attempt) for step in steps
        ]
    assert sorted(path.name for path in folder.rollouts.path.glob("step_000005*")) == [
        "step_000005.jsonl.attempt-1"
    ]
    assert folder.rollouts.file(4).exists()


def _member(sample: int, outcome: Scored | Unscored, status: Status | None = None) -> Member:
    version = Version(1, 4)
    summary = Summary(
        TrajectoryId(7, sample),
        0,
        "task-a",
        "digits",
        EndReason.DONE,
        6,
        2,
        1,
        1,
        0,
        True,
        version,
        version,
        states=("5tate",),
    )
    return Member(
        summary, outcome, credit=Credit(0.5) if isinstance(outcome, Scored) else None, status=status
    )


def test_rollouts_store_texts_and_each_image_once(tmp_path: Path) -> None:
    png = b"\x89PNG..."
    image = ImageRef("ab" * 32, 8, 9, (1, 2, 2), 1)
    prompt = Turn("user", (1, 2), (image,))
    answer = Turn("assistant", (3, 4), logprobs=(-0.1, -0.2), version=Version(1, 4), reward=0.25)
    anew = Turn("context", (1, 2, 3, 4), (image,), restart=True)
    trajectory = Trajectory(
        TrajectoryId(7, 0),
        0,
        "task-a",
        11,
        (prompt, answer, anew, answer),
        Sampling(),
        EndReason.DONE,
        None,
        {image.sha256: png},
    )
    members = (
        _member(
            0,
            Scored(1.0, {"exact": 1.0}, ("late",), reason="as a judge said"),
            Status(TrajectoryState.FILTERED, "too_long"),
        ),
        _member(1, Unscored(UnscoredKind.TIMEOUT, "judge")),
    )
    group = Group(7, Task("task-a", ()), members)
    texts = (lambda ids: " ".join(map(str, ids)), lambda ids: "/".join(map(str, ids)))
    records = [rollout_record(group, member, trajectory, *texts) for member in members]
    folder = RunFolder(tmp_path, "run")
    folder.rollouts.path.mkdir(parents=True)
    folder.rollouts.write(12, records, trajectory.image_bytes)

    scored, unscored = (
        json.loads(line)
        for line in folder.rollouts.file(12).read_text(encoding="utf-8").splitlines()
    )
    assert (folder.rollouts.path / scored["images"][0]["file"]).read_bytes() == png
    assert (scored["prompt"], [turn["text"] for turn in scored["turns"]]) == (
        "1/2",
        ["3 4", NEW_CONTEXT, "3 4"],
    )
    assert scored["turns"][1]["images"] == []
    assert [turn["logprobs"] for turn in scored["turns"]] == [
        [],
        [],
        [],
    ], "these texts of tokens do not add up"
    assert (scored["reason"], scored["states"], unscored["reason"]) == (
        "as a judge said",
        ["5tate"],
        "",
    )
    assert (
        [turn["reward"] for turn in scored["turns"]]
        == [turn.reward for turn in trajectory_of(scored).turns[1:]]
        == [0.25, 0.0, 0.25]
    )
    assert (scored["group"], scored["sample"], scored["step"], scored["versions"]) == (
        7,
        0,
        12,
        ["1.4", "1.4"],
    )
    assert (scored["reward"], scored["components"], scored["flags"]) == (
        1.0,
        {"exact": 1.0},
        ["late"],
    )
    assert (scored["status"], scored["unscored"]) == ("filtered: too_long", None)
    assert (unscored["reward"], unscored["unscored"], unscored["status"]) == (
        None,
        "timeout: judge",
        "kept",
    )


def test_a_record_has_the_advantage_of_each_turn_where_turns_have_one() -> None:
    answer = Turn("assistant", (3, 4), logprobs=(-0.1, -0.2), version=Version(1, 4))
    trajectory = Trajectory(
        TrajectoryId(7, 0),
        0,
        "task-a",
        11,
        (Turn("user", (1,)), answer, answer),
        Sampling(),
        EndReason.DONE,
    )
    by_turn = replace(_member(0, Scored(1.0)), credit=Credit.of_turns([0.5, -1.0]))
    texts = (str, str)
    found = [
        rollout_record(Group(7, Task("t", ()), ()), one, trajectory, *texts)
        for one in (by_turn, _member(1, Scored(1.0)))
    ]
    assert [(record.advantage, record.advantages) for record in found] == [
        (-0.25, (0.5, -1.0)),
        (0.5, ()),
    ]


@pytest.mark.parametrize(
    ("pieces", "ends"),
    [
        ({1: b"a", 2: b"bc"}, [(1, -1.0), (3, -2.0)]),
        ({1: "\u20ac".encode()[:1], 2: "\u20ac".encode()[1:] + b"x"}, [(0, -1.0), (2, -2.0)]),
        ({1: b"\xff", 2: b"a"}, [(0, -1.0), (2, -2.0)]),
        ({1: b"a", 2: b""}, [(1, -1.0), (1, -2.0)]),
    ],
    ids=["plain", "within a character", "no character", "an end token"],
)
def test_a_token_ends_where_its_last_character_does(
    pieces: dict[int, bytes], ends: list[tuple[int, float]]
) -> None:
    def text(ids: tuple[int, ...]) -> str:
        return b"".join(pieces[token] for token in ids).decode(errors="replace")

    turn = Turn("assistant", (1, 2), logprobs=(-1.0, -2.0))
    assert _ends(turn, text(turn.token_ids), text) == ends


def test_what_the_replay_buffer_holds_is_that_of_the_last_step(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "run")
    folder.path.mkdir()
    for step in (1, 2):
        folder.write_replay(step, {"stored": step, "tasks": 1, "per_task": {"a": {"stored": step}}})
    found = json.loads((folder.path / "replay_buffer_stats.json").read_text(encoding="utf-8"))
    assert (found["step"], found["stored"], found["per_task"]) == (2, 2, {"a": {"stored": 2}})


def test_records_that_a_full_disk_refuses_are_written_when_there_is_room(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "events.jsonl")
    lines.append({"n": 0})
    with full(lines.path.stat().st_size + 20):
        for n in (1, 2):
            lines.append({"n": n})
            assert isinstance(lines.trouble, OSError)
        lines.close()
        assert [record["n"] for record in lines] == [0]
    lines.append({"n": 3})
    assert lines.trouble is None
    lines.append({"n": 4})
    lines.close()
    assert [record["n"] for record in lines] == [0, 1, 2, 3, 4]
    assert lines.path.read_bytes().count(b"\n") == 5


def test_what_is_held_at_the_end_is_tried_once_more(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "gone" / "events.jsonl")
    lines.append({"n": 1})
    (tmp_path / "gone").mkdir()
    lines.close()
    assert [record["n"] for record in lines] == [1]


def test_a_full_disk_at_the_start_is_a_typed_error(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "run")
    with (
        full(0),
        pytest.raises(StorageFailed, match=r"File too large, with [\d,]+ bytes free\. Make room"),
        folder.acquired(),
    ):
        pass
    with (
        folder.acquired(),
        full(3),
        pytest.raises(StorageFailed, match=r"config\.yaml cannot be used: File too large"),
    ):
        folder.write_config("steps: 3\n")


def test_a_configuration_that_is_replaced_is_there_at_every_moment(tmp_path: Path) -> None:
    folder, longer = RunFolder(tmp_path, "run"), "steps: 30000\n"
    with folder.acquired():
        folder.write_config("steps: 3\n")
        with full(len(longer) - 1), pytest.raises(StorageFailed, match="File too large"):
            folder.write_config(longer)
        assert folder.config.read_text(encoding="utf-8") == "steps: 3\n"
        folder.write_config(longer)
        assert folder.config.read_text(encoding="utf-8") == longer
        assert {
            file.read_text(encoding="utf-8") for file in folder.path.glob("config.yaml.attempt-*")
        } == {"steps: 3\n"}
