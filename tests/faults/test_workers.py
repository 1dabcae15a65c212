"""Workers of a real run are killed while they work; the run goes on and every trajectory is
accounted for.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from rayloop.cli import main
from tests.support import fault_table
from tests.support.marks import Marks, kill, marked, next_mark
from tests.support.runs import Run, ledger_closes, pause, resume, run, settings

pytestmark = pytest.mark.timeout(400)

STEPS = 24
"""They take a second each, together longer than four faults when this process gets little CPU."""


def replaced(made: Run, role: str, killed: float) -> tuple[str, fault_table.Times]:
    """Why a worker was lost, and when that happened, was noticed and mended."""

    def both() -> tuple[dict[str, Any], dict[str, Any]] | None:
        lost = [e for e in made.named("worker_lost", role=role) if e["time"] >= killed - 0.005]
        back = [
            e
            for e in made.named("worker_replaced", role=role)
            if lost and e["worker"] == lost[0]["worker"]
        ]
        return (lost[0], back[0]) if back else None

    lost, back = made.until(both, f"the {role} worker is replaced")
    return lost["why"], fault_table.Times(f"{role} actor", killed, lost["time"], back["time"])


@pytest.mark.slow_faults
def test_workers_die_at_work_one_after_the_other(tmp_path: Path, digits_model: Path) -> None:
    marks = Marks(tmp_path / "marks")
    config = settings(
        tmp_path,
        digits_model,
        steps=STEPS,
        checkpoint__every=STEPS,
        data__order="file",
        policy__loss__kl_coef=0.01,
        rollout__sampling={"max_tokens": 300, "min_tokens": 300},
        reward__source__with={"seconds": 0.3},
    )
    hung = tmp_path / "hung"
    hung.mkdir()
    config["environment"]["episode"] |= {"step_timeout": 2.0}
    config["environment"]["episode"]["environment"]["with"] = {
        "reset": {"train-17": "hang"},
        "once": str(hung),
    }
    with run(marked(config, marks)) as made:
        made.until_event("trained", step=1)

        next_mark(made, marks, "reset", 8)  # all episodes have begun: they generate
        why, rollout = replaced(made, "rollout", kill(made.actor("RolloutActor")))
        assert why.startswith("a request of episode")

        next_mark(made, marks, "reset", 8)
        _, environment = replaced(made, "environment", kill(made.actor("EnvironmentActor")))
        [failed, *_] = made.named("episode_failed")
        assert "environment actor was lost" in failed["why"], failed

        next_mark(made, marks, "score")
        _, reward = replaced(made, "reward", kill(made.actor("RewardActor")))

        victim = made.actor("ReferenceActor")
        next_mark(made, marks, "reset", 8)
        pause(victim)
        next_mark(made, marks, "score", 8)
        time.sleep(1.0)  # scored, hence waiting for the reference
        _, reference = replaced(made, "reference", kill(victim))

        made.ends(0)
    [fired] = hung.iterdir()
    [lost] = [
        e for e in made.named("worker_lost", role="environment") if "gave no answer" in e["why"]
    ]
    assert "FaultyEnvironment.reset of task train-17 gave no answer within 2 seconds" in lost["why"]
    [back] = made.named("worker_replaced", role="environment", worker=lost["worker"])
    stuck = fault_table.Times("hung environment", fired.stat().st_mtime, lost["time"], back["time"])
    assert [record["step"] for record in made.metrics] == list(range(1, STEPS + 1))
    counts = made.named("finished")[0]["ledger"]
    ledger_closes(counts)
    fault_table.record((rollout, environment, reward, reference, stuck), counts)
    assert counts["issued"] == counts["trained"] == STEPS * 8, counts
    assert all(0.2 < record["reward/min"] <= record["reward/max"] < 0.8 for record in made.metrics)
    assert made.metrics[-1]["rollout/reissued"] >= 1


@pytest.mark.slow_faults
def test_an_engine_that_stands_still_is_reported_and_replaced_and_does_not_wake(
    tmp_path: Path, digits_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(
        tmp_path,
        digits_model,
        steps=9,
        checkpoint__every=9,
        rollout__sampling={"max_tokens": 200, "min_tokens": 200},
        recovery={
            "health_timeout": 18.0
        },  # more than a wait that counts as late, a round and an answer: 13 s
    )
    with run(config) as made:
        made.until_event("trained", step=2)
        victim, stopped = made.actor("RolloutActor"), time.time()
        pause(victim)
        silent = made.until_event("silent", actor="rollout 0")
        assert silent["time"] - stopped < 20
        assert main(["status", str(made.folder)]) == 0
        assert "rollout 0 does not answer" in capsys.readouterr().out
        why, _ = replaced(made, "rollout", stopped)
        assert "did not answer within 18 s" in why
        if victim.is_running():
            resume(victim)
        made.ends(0)
    assert [record["step"] for record in made.metrics] == list(range(1, 10))
    counts = made.named("finished")[0]["ledger"]
    ledger_closes(counts)
    assert counts["trained"] == 9 * 8, counts
