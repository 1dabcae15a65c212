"""``data prepare --solvable-by``: rows whose answers have no score are kept and counted as unknown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rayloop.cli import main
from tests.unit.data.test_published import osworld, written


def prepared(folder: Path, items: list[dict[str, Any]]) -> int:
    for name in ("1", "2", "3"):
        written(
            folder / f"examples/os/{name}.json", {"id": name, "instruction": "Do.", "evaluator": {}}
        )
    written(folder / "list.json", {"os": ["1", "2", "3"]})
    written(folder / "played/items.jsonl", items)
    return main([*osworld(folder, "list.json"), "--solvable-by", str(folder / "played")])


def item(task: str, **scored: Any) -> dict[str, Any]:
    return {"arm": "right", "task": task, "source": "os", **scored}


def test_a_row_whose_answer_has_no_score_is_kept_as_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unscored = item("os/1", unscored="timeout"), item("os/2", reward=1.0)
    assert (
        prepared(tmp_path, [*unscored, item("os/3", reward=1.0, components={"success": 1.0})]) == 0
    )
    rows = [
        json.loads(line)
        for line in (tmp_path / "out/train.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [(row["id"], row.get("solved"), row.get("played")) for row in rows] == [
        ("os/1", None, None),
        ("os/2", None, None),
        ("os/3", 1, 1),
    ]
    assert "3 of 3 rows are kept: 1 solved at least once, 2 unknown" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "it is played: name the run's configuration with --config"),
        (["--config", "/nowhere/run.yaml"], "/nowhere/run.yaml"),
    ],
)
def test_what_playing_needs_is_asked_for_before_rows_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    written(tmp_path / "list.json", {"os": []})
    assert main([*osworld(tmp_path, "list.json"), "--solvable-by", str(tmp_path), *options]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([*osworld(tmp_path, "list.json"), "--solvable-by", "/nowhere/model", *options]) == 2
    assert "--solvable-by: /nowhere/model is not there" in capsys.readouterr().err


def test_an_evaluation_without_the_score_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepared(tmp_path, [item("os/1", reward=1.0)]) == 2
    assert f"no answer of {tmp_path / 'played'} has the score success" in capsys.readouterr().err
