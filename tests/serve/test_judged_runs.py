"""Real runs whose reward asks the served judge over HTTP."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.judges import ModelStub, Served
from tests.support.runs import Run, finished, ledger_closes, run, settings

pytestmark = [pytest.mark.judge, pytest.mark.timeout(400)]


def judged(folder: Path, model: Path, judge: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A run whose every answer goes to the judge, and from there to its model."""
    config = settings(folder, model, **changes)
    with_ = {"judge": judge, "answer": "whole", "rules_first": False}
    config["reward"] = {"source": {"use": "rayloop.judge.reward:JudgeReward", "with": with_}}
    config["algorithm"]["filtering"] = {"filters": []}
    return config


def announced(judge: Served) -> dict[str, Any]:
    """A client that finds the judge by its file; several requests per group."""
    found = {"use": "rayloop.judge.discovery:FileDiscovery", "with": {"path": str(judge.announced)}}
    return {"url": "auto", "discovery": found, "batch": 2, "concurrency": 4}


def every_trajectory_has_a_verdict(made: Run) -> None:
    assert len(made.metrics) == 3
    for record in made.metrics:
        assert record["reward/component/correct/mean"] == record["reward/mean"]
        assert not [name for name in record if name.startswith("excluded/")]
    assert any(0 < record["reward/mean"] < 1 for record in made.metrics), (
        "the model's verdicts, not zeros"
    )
    ledger_closes(made.named("finished")[0]["ledger"])


def test_a_replica_killed_during_a_run_costs_no_trajectory(
    judge: Served, model: ModelStub, digits_model: Path, tmp_path: Path
) -> None:
    config = judged(tmp_path, digits_model, announced(judge))
    victim, _ = judge.ready(2)[:2]
    seen = len(model.bodies)
    with run(config) as made:
        made.until(lambda: len(model.bodies) > seen + 2, "verdicts are being asked for")
        victim.kill()
        made.ends(0)
    every_trajectory_has_a_verdict(made)
    assert judge.key_file.read_text(encoding="utf-8").strip() not in made.text
    judge.ready(2)


def test_a_run_waits_while_all_replicas_are_gone_for_20_seconds(
    judge: Served, model: ModelStub, digits_model: Path, tmp_path: Path
) -> None:
    judge.ready(2)
    seen = len(model.bodies)
    with run(judged(tmp_path, digits_model, announced(judge))) as made:
        made.until(lambda: len(model.bodies) > seen + 2, "verdicts are being asked for")
        until = time.monotonic() + 20
        while time.monotonic() < until:
            judge.kill()
            time.sleep(0.1)
        assert len(made.metrics) < 3
        made.ends(0)
    every_trajectory_has_a_verdict(made)
    judge.ready(2)


def test_a_judge_that_is_gone_for_good_ends_the_run_with_its_url_and_last_error(
    digits_model: Path, tmp_path: Path
) -> None:
    config = judged(tmp_path, digits_model, {"url": "http://127.0.0.1:9"})
    config["reward"]["source"]["with"] |= {"on_unavailable": "stop", "patience": 5.0}
    made = finished(config, code=69)
    (line,) = [line for line in made.text.splitlines() if line.startswith("rayloop:")]
    assert (
        "RewardLost: the judge gave no verdict (on_unavailable: stop, 5 s): http://127.0.0.1:9:"
        " ConnectError" in line
    )


def test_a_key_that_cannot_be_read_ends_the_run_as_a_configuration_error(
    digits_model: Path, tmp_path: Path
) -> None:
    made = finished(
        judged(tmp_path, digits_model, {"url": "http://127.0.0.1:9", "key_file": "/nowhere/key"}),
        code=2,
    )
    (line,) = [line for line in made.text.splitlines() if line.startswith("rayloop:")]
    assert "ConfigError: the judge's key file /nowhere/key cannot be read" in line
