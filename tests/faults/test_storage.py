"""What a power loss, a file server and a closed terminal do to a real run."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayloop.run.checkpoint import Checkpoint, CheckpointStore
from rayloop.run.folder import RunFolder
from tests.support.runs import finished, run, settings

pytestmark = [pytest.mark.slow_faults, pytest.mark.timeout(600)]


def saved(folder: Path) -> list[Checkpoint]:
    return CheckpointStore(folder / "checkpoints", keep=9).newest_first()


def test_damaged_records_neither_stop_a_run_nor_replace_its_checkpoints(
    tmp_path: Path, digits_model: Path
) -> None:
    config = settings(tmp_path, digits_model, steps=4, checkpoint__every=2)
    folder = finished(config).folder
    metrics = folder / "metrics.jsonl"
    content = metrics.read_bytes()
    middle = len(content) // 2
    metrics.write_bytes(content[:middle] + bytes(512) + content[middle + 512 :])
    before = len(list(RunFolder.at(folder).metrics))
    config["steps"] = 6
    again = finished(config)
    assert [(event["step"], event["restored"]) for event in read(folder, "begin")] == [
        (0, None),
        (4, "step_000004"),
    ]
    assert [event["lines"] for event in read(folder, "records_damaged")] == [4 - before]
    assert [record["step"] for record in again.metrics][-2:] == [5, 6]
    assert {checkpoint.step for checkpoint in saved(folder)} == {4, 6}
    assert all(checkpoint.state()["step"] == checkpoint.step for checkpoint in saved(folder))


def read(folder: Path, event: str) -> list[dict[str, object]]:
    return [record for record in RunFolder.at(folder).events if record["event"] == event]


@pytest.mark.parametrize("away", [True, False])
def test_storage_that_comes_back_costs_no_step(
    tmp_path: Path, digits_model: Path, away: bool
) -> None:
    """The run's folder is away, as by an automounter, or its checkpoints cannot be written, for
    longer than four steps take.
    """
    config = settings(tmp_path, digits_model, steps=400, checkpoint__every=2)
    with run(config) as made:
        made.until_event("checkpoint", step=2)
        place = made.folder if away else made.folder / "checkpoints"
        aside = tmp_path / "aside"
        place.rename(aside)
        if not away:
            place.write_bytes(b"no folder")
        made.until(lambda: "checkpoint_failed: failures 4" in made.text, "training waits")
        time.sleep(3.0)
        assert not made.folder.exists() or not away, "nothing is made in its place"
        if not away:
            place.unlink()
        aside.rename(place)
        back = time.time()
        made.until(lambda: [e for e in made.named("checkpoint") if e["time"] > back], "it is saved")
        made.process.terminate()
        made.ends(75)
    assert len(made.named("begin")) == 1
    steps = [record["step"] for record in made.metrics]
    assert steps == list(range(1, len(steps) + 1)), "records were held while the folder was away"


def test_storage_that_stays_away_ends_the_run_to_be_started_again(
    tmp_path: Path, digits_model: Path
) -> None:
    config = settings(
        tmp_path, digits_model, steps=400, checkpoint__every=2, recovery={"start_timeout": 120.0}
    )
    with run(config) as made:
        made.until_event("checkpoint", step=2)
        made.folder.rename(tmp_path / "aside")
        assert made.wait() == 69, made.text
    last = made.text.splitlines()[-1]
    assert last.startswith("rayloop: CheckpointStorageFailed: ")
    assert "is its storage mounted at " in last
    assert "which one that is cannot be seen now" in last
    assert not made.folder.exists()


@pytest.fixture
def _of_a_terminal() -> Iterator[None]:
    """A program that was started by nohup ignores SIGHUP, and so does all that it starts."""
    former = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, former)


@pytest.mark.usefixtures("_of_a_terminal")
def test_a_closed_terminal_saves(tmp_path: Path, digits_model: Path) -> None:
    """The kernel and a shell each send a SIGHUP to it."""
    config = settings(tmp_path, digits_model, steps=400, checkpoint__every=100)
    with run(config) as made:
        made.until_event("trained", step=2)
        for _ in range(2):
            os.kill(made.process.pid, signal.SIGHUP)
            time.sleep(0.2)
        made.ends(75)
    assert [
        json.loads(line)["event"] for line in (made.folder / "events.jsonl").open(encoding="utf-8")
    ][-1] == "preempted"
    assert saved(made.folder)[0].step == made.metrics[-1]["step"]
