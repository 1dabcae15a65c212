"""The policy or the driver of a real run dies: the last checkpoint is restored under a new lineage,
and the run ends as asked.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import fault_table
from tests.support.marks import Marks, kill, marked, next_mark
from tests.support.runs import Run, ledger_closes, pause, resume, run, settings

pytestmark = pytest.mark.timeout(400)


def kill_while_training(made: Run, rank: int) -> float:
    """SIGKILL a rank that was stopped in the middle of a step: its peers wait for it in a
    collective.
    """
    victim = made.actors("PolicyRank")[rank]

    def trains() -> bool:
        return "".join(victim.cmdline()).startswith(
            "ray::PolicyRank.train"
        )  # Ray names a process by what it runs

    for _ in range(20):
        made.until(trains, "a step of the trainer")
        pause(victim)
        if trains():
            time.sleep(0.5)
            return kill(victim)
        resume(victim)
    raise AssertionError("no step was caught")


def restored(
    made: Run, fault: str, cause: str, killed: float
) -> tuple[dict[str, Any], fault_table.Times]:
    """The event of the new lineage (with the cause as ``why``), and when the fault happened, was
    noticed and mended.
    """
    lost = made.until(
        lambda: [e for e in made.named(cause) if e["time"] >= killed - 0.005], f"event {cause}"
    )[0]
    begin = made.until(
        lambda: [e for e in made.named("begin") if e["time"] >= lost["time"]], "a new lineage"
    )[0]
    assert begin["restored"] == f"step_{begin['step']:06d}", begin
    return {**begin, "why": lost["why"]}, fault_table.Times(
        fault, killed, lost["time"], begin["time"]
    )


@pytest.mark.slow_faults
def test_a_rank_and_then_the_driver_die(tmp_path: Path, digits_model: Path) -> None:
    marks = Marks(tmp_path / "marks")
    config = settings(
        tmp_path,
        digits_model,
        steps=6,
        policy__ranks=2,
        rollout__sampling={"max_tokens": 200, "min_tokens": 200},
        reward__source__with={"seconds": 0.3},
    )
    with run(marked(config, marks)) as made:
        made.until_event("checkpoint", step=2)
        begin, rank = restored(
            made, "policy rank (of 2)", "policy_lost", kill_while_training(made, 1)
        )
        assert begin["why"].startswith("the policy group failed in train"), begin
        assert begin["lineage"] == 2
        assert begin["step"] >= 2

        made.until_event("checkpoint", step=begin["step"] + 1)
        next_mark(made, marks, "reset", 8)
        begin, driver = restored(
            made, "driver actor", "driver_lost", kill(made.actor("DriverActor"))
        )
        assert begin["lineage"] == 3
        assert (made.folder / "run.fence").read_text(encoding="utf-8") == "2", (
            "the driver that was lost may write nothing more"
        )
        made.ends(0)
    assert [record["step"] for record in made.metrics] == list(range(1, 7))
    counts = made.named("finished")[0]["ledger"]
    ledger_closes(counts)
    fault_table.record((rank, driver), counts)
    assert counts["trained"] == 6 * 8, counts


@pytest.mark.slow_faults
def test_the_only_rank_dies(tmp_path: Path, digits_model: Path) -> None:
    config = settings(
        tmp_path,
        digits_model,
        steps=4,
        checkpoint__every=2,
        rollout__sampling={"max_tokens": 200, "min_tokens": 200},
        reward__source__with={"seconds": 0.3},
    )
    with run(config) as made:
        made.until_event("checkpoint", step=2)
        killed = kill_while_training(made, 0)
        begin, rank = restored(made, "policy rank (of 1)", "policy_lost", killed)
        assert begin["lineage"] == 2
        made.ends(0)
    assert [record["step"] for record in made.metrics] == [1, 2, 3, 4]
    counts = made.named("finished")[0]["ledger"]
    ledger_closes(counts)
    fault_table.record((rank,), counts)


@pytest.mark.slow_faults
def test_a_rank_and_then_the_driver_are_frozen(tmp_path: Path, digits_model: Path) -> None:
    """As by a mount that hangs, a device that fell off the bus, or SIGSTOP: nobody waits for the
    deadline of the call.
    """
    config = settings(
        tmp_path,
        digits_model,
        steps=60,
        policy__ranks=2,
        checkpoint__every=2,
        recovery={"health_timeout": 15.0},
        reward__source__with={"seconds": 0.3},
    )
    with run(config) as made:
        made.until_event("checkpoint", step=2)
        stopped = time.time()
        pause(made.actors("PolicyRank")[1])
        begin, _ = restored(made, "policy rank frozen", "policy_lost", stopped)
        assert "gave no sign of life" in begin["why"], begin

        made.until_event("checkpoint", step=begin["step"] + 2)
        stopped = time.time()
        pause(made.actor("DriverActor"))
        begin, _ = restored(made, "driver frozen", "driver_lost", stopped)
        assert begin["why"].startswith("the driver has not answered for "), begin
        made.until(lambda: len(made.metrics) > begin["step"] + 1, "steps go on")
        made.process.terminate()
        made.ends(75)
