"""``data validate``: repeated rows, held-out rows that are trained on, prompts that are too long."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from rayloop.cli import main
from tests.support.runs import ROOT


def rows(path: Path, *asked: tuple[str, int]) -> str:
    """Questions, each about an image of one shade."""
    lines = []
    for number, (question, shade) in enumerate(asked):
        file = io.BytesIO()
        Image.new("RGB", (56, 56), (shade, 0, 0)).save(file, "PNG")
        (path.parent / f"{shade}.png").write_bytes(file.getvalue())
        lines.append(
            {
                "id": f"{path.stem}{number}",
                "prompt": question,
                "image": f"{shade}.png",
                "answer": "1",
            }
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def validated(
    folder: Path, capsys: pytest.CaptureFixture[str], train: str, held_out: str, **changes: Any
) -> tuple[int, str]:
    config = {
        "name": "a",
        "steps": 1,
        "model": {"path": str(ROOT / "recipes/arc_vision/tiny"), "max_pixels": 37632},
        "data": {"train": train, "eval": held_out},
        "reward": {"source": {"use": "rayloop.recipes.digits.data:SortReward"}},
        **changes,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    code = main(["data", "validate", str(folder / "run.yaml")])
    return code, capsys.readouterr().out


def test_held_out_rows_that_are_trained_on_are_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = rows(tmp_path / "train.jsonl", ("How many?", 1), ("Which?", 2))
    code, said = validated(
        tmp_path, capsys, train, rows(tmp_path / "val.jsonl", ("How many?", 3), ("How many?", 1))
    )
    assert code == 1
    assert "1 held-out rows are trained on: " in said
    assert "val.jsonl:2 (as " in said
    assert "train.jsonl:1)" in said
    code, said = validated(
        tmp_path, capsys, train, rows(tmp_path / "val.jsonl", ("Other?", 1), ("How many?", 3))
    )
    assert code == 0
    assert "warning: 1 images of" in said
    code, said = validated(tmp_path, capsys, train, rows(tmp_path / "val.jsonl", ("Which?", 1)))
    assert code == 0, "the same image with another question, the same question about another image"


def test_repeated_rows_are_counted_and_tokens_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = rows(tmp_path / "train.jsonl", ("How many?", 1), ("How many?", 1), ("Which?", 1))
    held_out = rows(tmp_path / "val.jsonl", ("Else?", 9))
    code, said = validated(tmp_path, capsys, train, held_out)
    assert code == 0
    assert "warning: 1 rows of" in said
    assert "train.jsonl:2 (as " in said
    assert "prompts of " in said
    code, said = validated(
        tmp_path, capsys, train, held_out, environment={"episode": {"max_prompt_tokens": 3}}
    )
    assert code == 1
    assert f"{held_out}:1: a prompt of " in said
    assert "above max_prompt_tokens (3)" in said
    code, said = validated(tmp_path, capsys, train, held_out, model={"path": "owner/name"})
    assert code == 0
    assert "token lengths are not counted: model.path: owner/name is not a folder here" in said


def test_held_out_prompts_are_as_long_as_evaluations_allow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, held_out = (
        rows(tmp_path / "train.jsonl", ("Which?", 1)),
        rows(tmp_path / "val.jsonl", ("Else?", 9)),
    )
    for own, evaluations, named in ((100, 3, held_out), (3, 100, train)):
        evaluation = {"over": {"environment.episode.max_prompt_tokens": evaluations}}
        episode = {"max_prompt_tokens": own}
        code, said = validated(
            tmp_path,
            capsys,
            train,
            held_out,
            evaluation=evaluation,
            environment={"episode": episode},
        )
        assert code == 1
        assert [
            line.partition(":1: ")[0]
            for line in said.splitlines()
            if "above max_prompt_tokens (3)" in line
        ] == [named]


def games(path: Path, *asked: str) -> str:
    """Rows of a game that all begin with one screen."""
    file = io.BytesIO()
    Image.new("RGB", (56, 56)).save(file, "PNG")
    (path.parent / f"{path.stem}.png").write_bytes(file.getvalue())
    lines = [
        {"id": f"{path.stem}{n}", "prompt": "Play.", "image": f"{path.stem}.png", "asked": one}
        for n, one in enumerate(asked)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def test_games_that_begin_with_one_screen_are_told_apart_by_the_columns_that_they_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, held_out = (
        games(tmp_path / "train.jsonl", "left", "right"),
        games(tmp_path / "val.jsonl", "up"),
    )
    plays = {"environment": {"episode": {"environment": {"use": "rayloop.envs.tools:ToolCalls"}}}}
    code, said = validated(tmp_path, capsys, train, held_out, **plays)
    assert "repeat" not in said
    assert "trained on: " not in said
    assert code == 0
    again = games(tmp_path / "val.jsonl", "right", "right")
    code, said = validated(tmp_path, capsys, train, again, **plays)
    assert "1 held-out rows are trained on: " in said, (
        "the name of the picture's file is no difference"
    )
    assert "1 rows of" in said
    assert code == 1
    code, said = validated(tmp_path, capsys, train, games(tmp_path / "val.jsonl", "up"))
    assert "1 held-out rows are trained on: " in said, "no environment reads the column"


def test_tasks_that_differ_by_their_seed_are_no_repetitions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "pages.jsonl"
    made = [
        {"id": str(n), "prompt": "{instruction}", "page": "click", "seed": str(n)} for n in range(3)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
    assert main(["data", "validate", str(file)]) == 0
    assert "repeat" not in capsys.readouterr().out
