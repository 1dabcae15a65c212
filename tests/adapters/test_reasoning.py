"""Rows and scores of the published reasoning-gym package, and a step of training on them, directly
and by an agent.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rayloop.cli import main as run
from rayloop.core.failures import ConfigError, DataFailure
from rayloop.core.groups import Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import EndReason, Sampling, Task, Trajectory, TrajectoryId
from rayloop.data.dataset import Dataset
from rayloop.envs.adapters.reasoning_gym import ReasoningGymRows, ReasoningGymScore
from rayloop.recipes.reasoning.prepare import main, rows
from rayloop.run.folder import RunFolder

pytestmark = pytest.mark.adapters
pytest.importorskip("reasoning_gym", reason="make test-adapters installs reasoning-gym")
EMPTY_TRAJECTORY = Trajectory(TrajectoryId(0, 0), 0, "t", 0, (), Sampling(), EndReason.DONE)


def reader(shots: int = 0) -> ReasoningGymRows:
    return ReasoningGymRows(ReasoningGymRows.Settings(system="", shots=shots))


def one(name: str, config: str = "{}") -> Task:
    (row,) = rows(name, config, 0, 1, seed=1)
    return reader().task(row, "rows:1", Path())


def score(text: str, task: Task) -> tuple[float, float, tuple[str, ...]]:
    source = ReasoningGymScore(ReasoningGymScore.Settings(whole=True))
    found = source.score(EMPTY_TRAJECTORY, task, ScoreContext(0, ("earlier", text)))
    assert isinstance(found, Scored)
    return found.value, found.components["exact"], found.flags


def test_rows_are_different_questions_behind_solved_ones(tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path), "--train", "20", "--eval", "10"]) == 0
    train, held_out = (
        Dataset(tmp_path / f"{name}.jsonl", reader(1), True, pytest.fail)
        for name in ("train", "eval")
    )
    assert (len(train), len(held_out)) == (40, 20)
    assert {task.source for task in held_out} == {"word_sorting", "spell_backward"}
    asked = [message.parts for task in [*train, *held_out] for message in task.messages[2:]]
    shown = {message.parts for task in held_out for message in task.messages[:2:2]}
    assert len(set(asked)) == len(asked) == 60
    assert not shown & set(asked)
    assert [message.role for message in held_out[0].messages] == ["user", "assistant", "user"]


def test_a_row_that_is_one_of_the_solved_questions_is_bad_data() -> None:
    with pytest.raises(DataFailure, match="index 1 is one of the 2 solved questions"):
        reader(2).task({"task": "gcd", "seed": 0, "index": 1}, "rows:1", Path())


def test_the_packages_own_score_of_the_last_answer() -> None:
    task = one("gcd", '{"min_value": 6, "max_value": 9}')
    right = str(task.ground_truth)
    assert score(f" {right}\n", task) == (1.0, 1.0, ())
    assert score("no number", task) == (0.0, 0.0, ())
    assert score(f"It is {right}", task) == (
        pytest.approx(1 / 7),
        0.0,
        (),
    )  # one character of seven is the answer


def test_an_answer_that_the_scorer_cannot_read_gets_nothing() -> None:
    task = one("prime_factorization")
    assert score("12\n23", task) == (0.0, 0.0, ("unreadable",))
    assert score(str(task.ground_truth), task)[0] == 1.0


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("nothing", "not registered"),
        ("gcd:{x", "gcd with {x"),
        ('gcd:{"x": 2}', "unexpected keyword"),
        ('gcd:{"max_value": 2}', "3 different"),
    ],
)
def test_bad_tasks_are_named(tmp_path: Path, task: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        main(["--out", str(tmp_path), "--tasks", task])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["quickstart", "agent"])
def test_a_step_of_training(tmp_path: Path, mode: str) -> None:
    main(["--out", str(tmp_path), "--train", "8", "--eval", "2", "--shots", "0"])
    command = [
        sys.executable,
        "-m",
        "rayloop",
        "train",
        f"recipes/reasoning/{mode}.yaml",
        f"output={tmp_path}",
        "name=run",
        "steps=1",
        f"data.train={tmp_path / 'train.jsonl'}",
        "data.eval=null",
        "model.path=recipes/arc_vision/loose",
        "evaluation.every=0",
        "algorithm.groups_per_step=2",
        "algorithm.group_size=2",
        "algorithm.filtering.filters=[]",
        "checkpoint.every=1",
    ]
    assert subprocess.run(command, timeout=280).returncode == 0
    (step,) = RunFolder(tmp_path, "run").metrics
    assert step["rollout/trained"] == 4


def test_saved_answers_are_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = rows("gcd", '{"min_value": 6, "max_value": 9}', 0, 1, seed=1)
    right = str(reader().task(row, "rows:1", Path()).ground_truth)
    file = tmp_path / "saved.jsonl"
    file.write_text(json.dumps({**row, "completion": right}) + "\n", encoding="utf-8")
    assert run(["score", "reasoning", str(file)]) == 0
    assert json.loads(capsys.readouterr().out)["value"] == 1.0
    assert run(["score", "reasoning", str(file), "--variant", "tag"]) == 0
    assert json.loads(capsys.readouterr().out)["value"] == 0.0
