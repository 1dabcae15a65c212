"""Engines and ranks that have the same memory in turn in real runs on a CPU with a stub of an
engine that sleeps: each dies while the other has the turn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_policy_and_driver import kill_while_training
from tests.support.marks import kill
from tests.support.runs import Run, finished, ledger_closes, pause, resume, run, settings

pytestmark = pytest.mark.timeout(400)


def sharing(folder: Path, model: Path, level: str, **changes: Any) -> dict[str, Any]:
    own = {"use": "tests.support.sleepy:SleepyEngine", "with": {"sleep": level}}
    return settings(folder, model, rollout__engine=own, **changes)


def complete(made: Run, steps: int) -> None:
    assert [record["step"] for record in made.metrics] == list(range(1, steps + 1))
    counts = made.named("finished")[0]["ledger"]
    ledger_closes(counts)
    assert counts["trained"] == steps * 8, counts


@pytest.mark.slow_faults
def test_a_run_in_turns_passes_the_check_of_log_probs_and_the_self_test(
    tmp_path: Path, digits_model: Path
) -> None:
    made = finished(
        sharing(tmp_path, digits_model, "level2", weight_sync__logprob_check="self_test")
    )
    complete(made, 3)
    [check] = made.named("logprob_check")
    assert check["mean"] < 1e-4
    tested = [test for test in made.named("self_test") if test.get("moved")]
    assert {test["group"] for test in tested} >= {"embedding", "language"}, made.named("self_test")
    assert all(test["follows"] < test["moved"] / 3 for test in tested)


@pytest.mark.slow_faults
@pytest.mark.parametrize("level", ["level1", "level2"])
def test_an_engine_dies_while_the_policy_has_its_turn(
    tmp_path: Path, digits_model: Path, level: str
) -> None:
    # the engine that is left may play several before the other's loss is known and its next one
    # begins
    steps = 12
    config = sharing(tmp_path, digits_model, level, steps=steps, rollout__actors=2)
    with run(config) as made:
        made.until_event("trained", step=1)
        rank = made.actor("PolicyRank")
        made.until(
            lambda: "".join(rank.cmdline()).startswith("ray::PolicyRank.train"),
            "a step of the trainer",
        )
        pause(rank)
        victim, step = made.actors("RolloutActor")[0], len(made.named("trained")) + 1
        kill(victim)
        resume(rank)
        made.ends(0)
    [lost] = made.named("worker_lost", role="rollout")
    [back] = made.named("worker_replaced", role="rollout", worker=lost["worker"])
    [trained] = made.named("trained", step=step)
    assert back["time"] > trained["time"], "an engine starts only when the policy has left the GPU"
    complete(made, steps)


@pytest.mark.slow_faults
def test_a_rank_dies_in_its_turn_and_starts_while_the_engines_sleep(
    tmp_path: Path, digits_model: Path
) -> None:
    config = sharing(tmp_path, digits_model, "level2", steps=4)
    with run(config) as made:
        made.until_event("checkpoint", step=1)
        kill_while_training(made, 0)
        made.until_event("policy_rebuilt")
        made.ends(0)
    complete(made, 4)
