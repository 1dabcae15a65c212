"""A run that is stopped at an awkward moment, and one in which an actor hangs."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest

from tests.support.marks import Marks, kill, marked, next_mark
from tests.support.runs import Run, finished, pause, resume, run, settings

pytestmark = pytest.mark.timeout(400)


@pytest.mark.slow_faults
def test_a_stop_during_the_last_evaluation_is_made_up_for(
    tmp_path: Path, digits_model: Path
) -> None:
    marks = Marks(tmp_path / "marks")
    config = marked(
        settings(tmp_path, digits_model, steps=2, reward__source__with={"seconds": 4.0}), marks
    )
    (tmp_path / "eval.jsonl").write_text(
        "".join(json.dumps({"id": f"e{i}", "digits": [i, 1]}) + "\n" for i in range(4)),
        encoding="utf-8",
    )
    config["data"]["eval"] = str(tmp_path / "eval.jsonl")
    config["evaluation"] = {"every": 2}
    with run(config) as made:
        # The evaluation may have begun before this process reads of the step's end.
        trained = made.until_event("trained", step=2)
        next_mark(made, marks, "score", 1, since=trained["time"])
        made.process.send_signal(signal.SIGTERM)
        made.ends(75, deadline=30)
    assert [e["step"] for e in made.named("evaluation_stopped")] == [1], (
        "during step 2, whose number is not yet reported"
    )
    assert [e["step"] for e in made.named("evaluated")] == [0]
    assert [record["step"] for record in made.metrics] == [1, 2]
    assert [e["step"] for e in made.named("checkpoint")] == [1, 2]

    again = finished(config)
    assert [e["step"] for e in again.named("evaluated")] == [0, 2]
    assert [record["step"] for record in again.metrics] == [1, 2]


@pytest.mark.slow_faults
def test_two_runs_on_one_machine_do_not_touch_each_other(
    tmp_path: Path, digits_model: Path
) -> None:
    """Each has its own cluster, ports, token and folder: one is killed at once, the other one goes
    on to its end.
    """
    folders = tmp_path / "first", tmp_path / "second"
    for folder in folders:
        folder.mkdir()
    first, second = (
        settings(folder, digits_model, steps=12, reward__source__with={"seconds": 0.3})
        for folder in folders
    )
    with run(first) as killed, run(second) as other:
        killed.until_event("trained", step=2)
        other.until_event("trained", step=2)
        killed.killed()
        other.ends(0)
        assert [record["step"] for record in other.metrics] == list(range(1, 13))
    assert not other.named("worker_lost")
    first["steps"] = 4
    assert finished(first).named("begin")[-1]["restored"] is not None


def while_saving(made: Run) -> None:
    """Stop the policy in the middle of a checkpoint, and leave it stopped."""
    rank = made.actor("PolicyRank")
    checkpoints = made.folder / "checkpoints"
    for _ in range(20):
        made.until(lambda: list(checkpoints.glob("step_*.tmp")), "a checkpoint under way")
        pause(rank)
        time.sleep(0.5)
        if list(checkpoints.glob("step_*.tmp/trainer")):
            return
        resume(rank)
    raise AssertionError("no checkpoint was caught")


@pytest.mark.slow_faults
def test_a_stop_during_a_checkpoint_keeps_it(tmp_path: Path, digits_model: Path) -> None:
    config = settings(tmp_path, digits_model, steps=40)
    with run(config) as made:
        while_saving(made)
        made.process.send_signal(signal.SIGTERM)
        time.sleep(1.0)
        resume(made.actor("PolicyRank"))
        made.ends(75, deadline=30)
    done = made.metrics[-1]["step"]
    assert [e["step"] for e in made.named("checkpoint")] == list(range(1, done + 1))
    config["steps"] = done + 1
    again = finished(config)
    assert again.named("begin")[1]["restored"] == f"step_{done:06d}"


@pytest.mark.slow_faults
def test_a_run_that_cannot_be_saved_in_time_says_so(tmp_path: Path, digits_model: Path) -> None:
    with run(settings(tmp_path, digits_model, steps=40, preemption={"grace": 3.0})) as made:
        while_saving(made)
        made.process.send_signal(signal.SIGTERM)
        made.ends(1, deadline=30)
    assert "NotSaved: the run was not saved within preemption.grace" in made.text
    assert re.search(
        r"run again to continue from (step \d+ \(step_\d+\)|the beginning)", made.text
    ), made.text


@pytest.mark.slow_faults
def test_a_stop_while_the_policy_is_replaced_names_the_step_that_is_left(
    tmp_path: Path, digits_model: Path
) -> None:
    config = settings(tmp_path, digits_model, steps=400, checkpoint__every=4)
    with run(config) as made:
        made.until_event("trained", step=6)
        pause(made.actor("PolicyRank"))
        kill(made.actor("PolicyRank"))
        made.until_event("policy_lost")
        made.process.send_signal(signal.SIGTERM)
        made.ends(1, deadline=30)
    step = made.named("checkpoint")[-1]["step"]
    said = re.search(
        r"NotSaved: stopped at step (\d+) of 400, not saved: the policy was lost", made.text
    )
    assert said is not None, made.text
    recorded = made.metrics[-1]["step"]
    assert int(said[1]) in (
        recorded,
        recorded + 1,
    ), "it may have been lost behind an update, before its record"
    assert int(said[1]) > step, "a step was lost"
    assert f"run again to continue from step {step} (step_{step:06d})" in made.text
    config["steps"] = step + 1
    assert finished(config).named("begin")[-1]["restored"] == f"step_{step:06d}"


@pytest.mark.slow_faults
def test_a_hung_actor_is_reported_with_its_stack_and_ends_the_run(
    tmp_path: Path, digits_model: Path
) -> None:
    """By a watchdog that comes before the grader's own deadline, which the order of durations would
    refuse.
    """
    marks = Marks(tmp_path / "marks")
    config = settings(
        tmp_path,
        digits_model,
        reward__timeout=3000.0,
        reward__source__with={"seconds": 1000.0},
        recovery={"health_timeout": 3600.0, "stall_timeout": 45.0},
    )
    with run(marked(config, marks), module="tests.support.unordered") as made:
        next_mark(made, marks, "score", 8)
        began = time.time()
        event = made.until_event("stalled", phase="gen")
        assert event["time"] - began < 60, "within a minute"
        made.ends(69, deadline=120)
    assert event["awaited"].startswith("score of reward 0 for ")
    stacks = (made.folder / event["stacks"]).read_text(encoding="utf-8")
    assert "in score\n    time.sleep(self._settings.seconds)" in stacks
    assert "Stalled: nothing moved for 4" in made.text
    assert "s in phase gen, awaited: score of reward 0" in made.text.splitlines()[-1]
