"""What ``report --files`` makes of a run's records: one JSON of its metrics, and one of each task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rayloop.cli import main
from rayloop.core.failures import ConfigError
from rayloop.run.folder import RunFolder
from rayloop.run.records.rollouts import RolloutRecord, RolloutTurn
from rayloop.view.page import write_files

TURN = RolloutTurn("assistant", "<answer>3</answer>", True)


def trained(task: str, reward: float | None, sample: int = 0) -> RolloutRecord:
    return RolloutRecord(
        1, sample, 0, task, "dots", "count", (), (TURN,), "done", reward, {"accuracy": 1.0}
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = RunFolder.at(tmp_path)
    folder.rollouts.path.mkdir()
    steps = (
        {"step": 1, "reward/mean": 0.5},
        {"step": 2, "reward/mean": None, "val/reward/mean": 0.75},
    )
    folder.metrics.path.write_text(
        "".join(json.dumps({"schema_version": 1, "time": 1.0, **step}) + "\n" for step in steps),
        encoding="utf-8",
    )
    folder.rollouts.write(1, [trained("a/b", 0.5), trained("c", None, sample=1)], {})
    folder.rollouts.write(2, [trained("a/b", 1.0)], {})
    held_out = {
        "schema_version": 1,
        "step": 2,
        "arm": "right",
        "task": "val-1",
        "source": "dots",
        "reward": 0.75,
    }
    folder.evaluations.path.mkdir(parents=True, exist_ok=True)
    folder.evaluations.file(2).write_text(
        json.dumps({**held_out, "text": "long"}) + "\n", encoding="utf-8"
    )
    return tmp_path


def results(run: Path) -> dict[str, Any]:
    return {
        path.name: json.loads(path.read_text(encoding="utf-8"))
        for path in (run / "task_results").iterdir()
    }


def test_metrics_are_lists_over_the_steps(run: Path) -> None:
    metrics, _ = write_files(run)
    found = json.loads(metrics.read_text(encoding="utf-8"))
    assert metrics.name == "training_metrics.json"
    assert found["steps"] == [1, 2]
    assert found["metrics"] == {"reward/mean": [0.5, None], "val/reward/mean": [None, 0.75]}


def test_a_task_has_its_answers_and_trajectories(run: Path) -> None:
    write_files(run)
    found = results(run)
    assert set(found) == {"a%2Fb.json", "c.json", "val-1.json"}
    assert found["a%2Fb.json"]["task"] == "a/b"
    assert [(one["step"], one["reward"]) for one in found["a%2Fb.json"]["training"]] == [
        (1, 0.5),
        (2, 1.0),
    ]
    assert found["c.json"]["training"][0]["reward"] is None
    assert found["val-1.json"]["evaluations"] == [{"step": 2, "arm": "right", "reward": 0.75}]
    assert found["val-1.json"]["training"] == []


def test_tasks_of_an_earlier_call_and_long_names_do_not_mix(run: Path) -> None:
    RunFolder.at(run).rollouts.write(3, [trained("x" * 300, 1.0), trained("x" * 301, 0.0)], {})
    write_files(run)
    assert sorted(len(found["task"]) for found in results(run).values()) == [1, 3, 5, 300, 301]
    RunFolder.at(run).rollouts.file(3).unlink()
    write_files(run)
    assert len(results(run)) == 3


def test_the_command_writes_them_beside_the_page(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run)]) == 0
    assert not (run / "task_results").exists()
    assert main(["report", str(run), "--files"]) == 0
    assert "training_metrics.json" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="holds no run"):
        write_files(tmp_path / "elsewhere")
