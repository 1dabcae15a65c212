"""Determinism (docs/algorithm.md, section 12): a run that is killed and resumed equals one that
never was, bit for bit.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.runs import Run, finished, run, settings
from tests.support.saved import saved_tensors

pytestmark = pytest.mark.timeout(400)

STEPS, KILLS = 8, 3


def deterministic(folder: Path, model: Path) -> dict[str, Any]:
    folder.mkdir()
    rows = [json.dumps({"id": f"e{i}", "digits": [i, 1]}) + "\n" for i in range(3)]
    (folder / "eval.jsonl").write_text("".join(rows), encoding="utf-8")
    over = {"rollout.sampling.temperature": 0.5, "environment.episode.max_response_tokens": 20}
    made = settings(
        folder,
        model,
        steps=STEPS,
        environment__episode__max_response_tokens=50,
        evaluation={"every": 3, "first": False, "greedy": False, "samples": 1, "over": over},
        rollout__deterministic=True,
        rollout__sampling={"max_tokens": 60, "min_tokens": 1},
        reward__source__with={"seconds": 0.2, "faults": {"train-3": "half", "train-11": "nan"}},
        algorithm__filtering__max_generation_batches=6,
        policy__update={"epochs": 2, "mini_batches": 2},
    )
    made["data"]["eval"] = str(folder / "eval.jsonl")
    return made


def checkpoints(config: dict[str, Any]) -> list[str]:
    """The checkpoints that the runs so far have reported."""
    path = Path(config["output"]) / config["name"] / "events.jsonl"
    return (
        [
            line
            for line in path.read_text(encoding="utf-8").splitlines()
            if '"event":"checkpoint"' in line
        ]
        if path.exists()
        else []
    )


def trainer_state(made: Run) -> dict[str, torch.Tensor]:
    """Parameters, optimizer state and its position, flat, from the newest checkpoint of the run."""
    folder = (
        made.folder
        / "checkpoints"
        / (made.folder / "checkpoints" / "latest").read_text(encoding="utf-8")
    )
    return saved_tensors(folder / "trainer")


def of_each_step(made: Run, keys: tuple[str, ...]) -> dict[int, dict[str, float]]:
    return {record["step"]: {key: record[key] for key in keys} for record in made.metrics}


def trained_ids(made: Run) -> dict[int, Any]:
    """Of each step, the trajectories it trained; a step that was done again counts as it was done
    last.
    """
    return {event["step"]: event["groups"] for event in made.named("trained")}


REWARDS = (
    "reward/mean",
    "reward/std",
    "reward/min",
    "reward/max",
    "rollout/groups",
    "rollout/trained",
    "response_length/mean",
)
TRAINING = ("actor/loss", "actor/grad_norm", "actor/entropy", "actor/tokens", "rollout/acceptance")


@pytest.mark.slow_faults
def test_a_run_killed_three_times_equals_one_that_never_was(
    tmp_path: Path, digits_model: Path
) -> None:
    whole = finished(deterministic(tmp_path / "whole", digits_model))

    config = deterministic(tmp_path / "killed", digits_model)
    generator = random.Random(1)
    for _ in range(KILLS):
        saved = len(checkpoints(config))
        with run(config) as made:
            made.until(lambda: len(checkpoints(config)) > saved, "a new checkpoint")  # noqa: B023 (called in this round)
            time.sleep(generator.uniform(0.0, 0.5))
            assert not made.named("finished")
            made.killed()
    resumed = finished(config)

    assert len(resumed.named("begin")) == 1 + KILLS
    assert [e["restored"] is not None for e in resumed.named("begin")] == [False] + [True] * KILLS
    assert of_each_step(resumed, REWARDS) == of_each_step(whole, REWARDS)
    assert of_each_step(resumed, TRAINING) == of_each_step(whole, TRAINING)
    assert trained_ids(resumed) == trained_ids(whole)
    assert (
        resumed.named("finished")[0]["ledger"] | {"attempts": 0}
        == whole.named("finished")[0]["ledger"]
    )

    held_out = [
        {e["step"]: e["val/reward/mean"] for e in each.named("evaluated")}
        for each in (whole, resumed)
    ]
    assert held_out[0] == held_out[1]
    assert list(held_out[0]) == [3, 6, STEPS]

    expected, found = trainer_state(whole), trainer_state(resumed)
    assert expected.keys() == found.keys()
    assert any("exp_avg" in name for name in expected)
    different = [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]
    assert different == []
