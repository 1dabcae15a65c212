"""Real runs of what a configuration can choose: each trains, agrees with itself, accounts for
everything and cleans up.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.pictures import picture_rows
from tests.support.runs import Run, finished, ledger_closes, settings

pytestmark = pytest.mark.timeout(300)
STEPS = 2
PARTS = {"embedding", "language", "merger", "vision"}
LOOKS_TWICE = {
    "use": "rayloop.envs.scripted:ScriptedTool",
    "with": {"steps": [{"text": "Look closer.", "images": [{"width": 84, "height": 56}]}]},
}


def trained(config: dict[str, Any]) -> Run:
    """The run of ``config``, which ended well: log-prob check held, every step is recorded, the
    ledger is closed.
    """
    made = finished(config)
    [logprob_check] = made.named("logprob_check")
    assert logprob_check["step"] == 0
    assert logprob_check["mean"] <= logprob_check["tolerance"], logprob_check
    assert [record["step"] for record in made.metrics] == list(range(1, config["steps"] + 1))
    for record in made.metrics:
        assert record["actor/updates"] >= 1
        assert record["actor/skipped_updates"] == 0
        assert record["actor/grad_norm"] > 0
    ledger_closes(made.named("finished")[0]["ledger"])
    assert not made.named("logprob_warning")
    assert not made.named("worker_lost")
    assert not made.records("quarantine")
    return made


def lags(record: dict[str, Any]) -> set[int]:
    """The version lags of the tokens that a step trained on."""
    prefix = "actor/logprob_mismatch_k3/lag_"
    return {int(name.removeprefix(prefix)) for name in record if name.startswith(prefix)}


def on_policy(made: Run, tolerance: float = 1e-3) -> None:
    """With one update per step on fresh samples nothing is there to clip or to correct."""
    for record in made.metrics:
        assert record["actor/ratio_max"] == pytest.approx(1.0, abs=1e-6)
        assert record["actor/logprob_mismatch_mean"] < tolerance
        assert lags(record) == {0}


@pytest.mark.slow_faults
def test_pictures_in_two_turns_on_two_ranks(tmp_path: Path, picture_model: Path) -> None:
    config = settings(
        tmp_path,
        picture_model,
        steps=STEPS,
        data={"train": str(picture_rows(tmp_path, 8))},
        environment__episode={"environment": LOOKS_TWICE, "max_turns": 2},
        policy__ranks=2,
        policy__loss={"kl_coef": 0.05},
        weight_sync__logprob_check="self_test",
    )
    made = trained(config)
    [logprob_check] = made.named("logprob_check")
    assert logprob_check["images"] == 4
    assert logprob_check["swapped"] > 10 * logprob_check["mean"]
    tests = made.named("self_test", step=0)
    assert {test["group"] for test in tests} == PARTS
    assert all(test["follows"] <= logprob_check["tolerance"] < test["moved"] for test in tests), (
        tests
    )
    on_policy(made)
    for record in made.metrics:
        assert record["rollout/turns/mean"] == 2
        assert record["rollout/trained"] == 8
        # The first is a file, which the engine reads; the second, the same for all, goes once: no
        # other process asks.
        assert record["rollout/images_sent"] <= 1
        assert record["rollout/images_sent_again"] == 0
    kl = [record["actor/kl"] for record in made.metrics]
    assert kl[0] < 1e-8 < kl[1], "the reference is the start model, which the first update leaves"


@pytest.mark.slow_faults
def test_top_p_with_a_reference_and_weights_that_are_a_step_old(
    tmp_path: Path, digits_model: Path
) -> None:
    config = settings(
        tmp_path,
        digits_model,
        steps=4,
        rollout__sampling={"max_tokens": 30, "min_tokens": 30, "top_p": 0.8},
        policy__loss={"kl_coef": 0.05},
        weight_sync__logprob_check="self_test",
        reward__source__with={"seconds": 0.2},
        algorithm__staleness={"max_staleness": 1},
    )
    made = trained(config)
    assert {test["group"] for test in made.named("self_test", step=0)} == {"embedding", "language"}
    assert all(
        record.get("actor/logprob_mismatch_mean/lag_0", 0.0) < 1e-5 for record in made.metrics
    )
    assert made.metrics[0]["actor/kl"] < 1e-8 < made.metrics[1]["actor/kl"], (
        "the reference is over the kept tokens too"
    )
    assert 1 in set().union(*(lags(record) for record in made.metrics))


@pytest.mark.slow_faults
def test_replay_and_partial_groups_when_deterministic(tmp_path: Path, digits_model: Path) -> None:
    config = settings(
        tmp_path,
        digits_model,
        steps=STEPS,
        rollout__deterministic=True,
        reward__source__with={"fade": 1},
        algorithm__replay={"kind": "corrected"},
        algorithm__filtering={
            "filters": [{"kind": "equal_rewards"}, {"kind": "positive_negative_advantage"}]
        },
    )
    lines = (tmp_path / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(lines[:2]), encoding="utf-8")
    made = trained(config)
    sizes = [
        [len(samples) for samples in event["groups"].values()] for event in made.named("trained")
    ]
    assert any(0 < size < 4 for size in sizes[0]), sizes
    first, second = made.metrics
    assert first["filtered/positive_negative_advantage"] > 0
    assert first["rollout/replayed"] == 0
    assert second["rollout/replayed"] == len(sizes[1]) > 0
    assert second["reward/max"] == 0
    assert made.named("finished")[0]["ledger"]["replayed"] == second["rollout/groups"]


@pytest.mark.slow_faults
def test_adapters_with_themselves_switched_off_as_the_reference(
    tmp_path: Path, picture_model: Path
) -> None:
    config = settings(
        tmp_path,
        picture_model,
        steps=STEPS,
        data={"train": str(picture_rows(tmp_path, 8))},
        policy__engine={"threads": 1, "lora": {"rank": 4}},
        policy__loss={"kl_coef": 0.05},
        policy__optimizer={"lr": 1.0e-2},
        weight_sync__logprob_check="self_test",
    )
    made = trained(config)
    assert {test["group"] for test in made.named("self_test", step=0)} == PARTS
    on_policy(made)
    kl = [record["actor/kl"] for record in made.metrics]
    assert kl[0] < 1e-8 < kl[1]


@pytest.mark.slow_faults
def test_generation_runs_ahead_of_training(tmp_path: Path, digits_model: Path) -> None:
    config = settings(
        tmp_path,
        digits_model,
        steps=5,
        rollout__sampling={"max_tokens": 60, "min_tokens": 60},
        algorithm__staleness={"max_staleness": 1},
        reward__source__with={"seconds": 0.2},
    )
    made = trained(config)
    seen = set().union(*(lags(record) for record in made.metrics))
    assert seen == {0, 1}
    assert all(record["rollout/trained"] == 8 for record in made.metrics)


@pytest.mark.slow_faults
def test_bfloat16(tmp_path: Path, picture_model: Path) -> None:
    config = settings(
        tmp_path,
        picture_model,
        steps=STEPS,
        data={"train": str(picture_rows(tmp_path, 8))},
        policy__engine={"threads": 1, "dtype": "bfloat16"},
        rollout__engine={"threads": 1, "dtype": "bfloat16"},
        weight_sync__logprob_check="self_test",
    )
    made = trained(config)
    assert made.named("logprob_check")[0]["tolerance"] == 0.05
    assert {test["group"] for test in made.named("self_test", step=0)} == PARTS
    on_policy(made, tolerance=0.05)


@pytest.mark.slow_faults
def test_two_epochs_of_two_mini_batches(tmp_path: Path, digits_model: Path) -> None:
    config = settings(
        tmp_path,
        digits_model,
        steps=STEPS,
        policy__ranks=2,
        policy__update={"epochs": 2, "mini_batches": 2},
    )
    made = trained(config)
    for record in made.metrics:
        assert record["actor/updates"] == 4
        assert record["actor/sequences"] == record["rollout/trained"] == 8
        assert record["actor/ratio_max"] > 1.0001
        assert record["actor/logprob_mismatch_mean"] < 1e-3


@pytest.mark.slow_faults
def test_two_actors_of_every_role(tmp_path: Path, digits_model: Path) -> None:
    config = settings(
        tmp_path,
        digits_model,
        steps=STEPS,
        rollout__actors=2,
        environment__actors=2,
        reward__actors=2,
        reference={"actors": 2},
        policy__loss={"kl_coef": 0.05},
        policy__ranks=2,
        weight_sync={"transport": {"kind": "collective"}},
    )
    made = trained(config)
    on_policy(made)
    assert made.named("self_test", step=0)
    assert not made.named("broadcast_failed")
    assert all(record["rollout/trained"] == 8 for record in made.metrics)
