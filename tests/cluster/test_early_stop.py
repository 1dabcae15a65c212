"""A whole run whose held-out reward is best after the first step: it ends two evaluations later,
and keeps that step.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rayloop.recipes.digits.data import rows
from tests.support.runs import ledger_closes, run, settings

pytestmark = [pytest.mark.slow_faults, pytest.mark.timeout(300)]


def test_a_run_is_given_up_and_its_best_checkpoint_stays(
    tmp_path: Path, digits_model: Path
) -> None:
    config = settings(tmp_path, digits_model, steps=20, checkpoint={"every": 10, "keep": 1})
    config["reward"]["source"]["use"] = "tests.support.rewards:Peak"
    _, held_out = rows(24, 4, 3, 5, seed=0)
    (tmp_path / "eval.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in held_out), encoding="utf-8"
    )
    config["data"]["eval"] = str(tmp_path / "eval.jsonl")
    config["evaluation"] = {"every": 1, "patience": 2}
    with run(config) as made:
        made.ends(0)
    assert [record["step"] for record in made.metrics] == [
        1,
        2,
        3,
    ], "steps 2 and 3 were no better than step 1"
    (stop,) = made.named("early_stop")
    assert stop["best"] == {"reward": 0.9, "step": 1}
    checkpoints = made.folder / "checkpoints"
    assert (checkpoints / "best").resolve().name == "step_000001"
    assert (checkpoints / "best" / "COMPLETE").is_file()
    assert sorted(path.name for path in checkpoints.glob("step_*")) == [
        "step_000001",
        "step_000003",
    ]
    (finished,) = made.named("finished")
    ledger_closes(finished["ledger"])
