"""Real runs whose reward asks the served judge over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayloop.judge.calibrate import CALIBRATION, Gate, calibrate
from rayloop.judge.client import JudgeClient
from rayloop.judge.rubric import FOLDER, load_rubrics
from rayloop.measure.protocol import read
from tests.serve.conftest import arguments
from tests.support.judges import ModelStub, Served, served
from tests.support.runs import ROOT, Run, finished, ledger_closes, run, settings

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


def evaluated(*words: object) -> str:
    """What ``eval`` prints; each answer must have a score."""
    done = subprocess.run(
        [sys.executable, "-m", "rayloop", "eval", *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


async def calibrated(judge: Served) -> dict[str, Any]:
    """The report on the judge, where ``judge calibrate`` leaves it."""
    file = judge.folder / CALIBRATION
    client = JudgeClient(judge.settings())
    try:
        await calibrate(client, Gate(), drift=True, keep=file)
    finally:
        await client.close()
    report: dict[str, Any] = json.loads(file.read_bytes())
    return report


@pytest.mark.timeout(2400)
def test_a_judged_number_is_repeated_and_a_changed_rubric_is_named(
    judge: Served, model: ModelStub, digits_model: Path, tmp_path: Path
) -> None:
    judge.ready(2)
    report = asyncio.run(calibrated(judge))
    values = judged(tmp_path, digits_model, announced(judge))
    values["data"]["eval"] = values["data"]["train"]
    values["evaluation"] = {"limit": 8, "samples": 1}
    config = tmp_path / "judged.yaml"
    config.write_text(yaml.safe_dump(values), encoding="utf-8")
    number = tmp_path / "number.json"

    text = evaluated(config, "--protocol", number)
    published = read(number)
    assert f"protocol {published.hash} and number: {number}" in text
    assert {answer.reward for answer in published.number.answers} == {0.0, 1.0}
    part = published.protocol["judge"]
    assert part["rubric"] == load_rubrics()["equivalence"].digest
    assert part["fingerprint"] == report["fingerprint"]
    figures = report["scores"][-1]
    assert part["calibration"]["count"] == str(figures["count"])
    assert float(part["calibration"]["accuracy"]) == pytest.approx(figures["accuracy"], 1e-3)

    again = evaluated("--like", number)
    assert f"compared with {number}, {published.hash}, by the same protocol\n" in again
    assert "+0.000 [+0.000, +0.000], which holds 0; 8 tasks" in again
    judge.folder.joinpath(CALIBRATION).unlink()

    # The rubric keeps its name and its version, as when somebody only mends its words.
    rubrics = tmp_path / "rubrics"
    shutil.copytree(FOLDER, rubrics)
    rubric = rubrics / "equivalence.yaml"
    was = rubric.read_text(encoding="utf-8")
    rubric.write_text(was.replace("You grade short", "You grade strictly short"), encoding="utf-8")
    with served(tmp_path, arguments(model, rubrics=str(rubrics))) as strict:
        strict.ready(2)
        in_reward = "reward.source.with"
        changed = evaluated(
            "--like",
            number,
            f"{in_reward}.rubrics={rubrics}",
            f"{in_reward}.judge.discovery.with.path={strict.announced}",
        )
    start = changed.index("by another protocol. Parts that differ:\n")
    end = changed.index("the same weights, paired by task:")
    parts = {line.strip().partition(": ")[0] for line in changed[start:end].splitlines()[1:]}
    # Another rubric makes another judge, which nobody has calibrated.
    of_the_calibration = {name for name in parts if name.startswith("judge.calibration")}
    assert "judge.calibration.accuracy" in of_the_calibration
    assert parts - of_the_calibration == {
        "judge.fingerprint",
        "judge.rubric",
        "settings.reward.source.with.rubrics",
    }
