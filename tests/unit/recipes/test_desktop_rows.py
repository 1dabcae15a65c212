"""``data prepare desktop``: every task is in one split, with the prompt that was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rayloop.core.failures import ConfigError
from rayloop.envs.desktop.tasks import SHIPPED, task_file
from rayloop.recipes.desktop.prepare import main


def test_each_task_is_in_one_split(tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path), "--prompt", "language"]) == 0
    train, val = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").open(encoding="utf-8")]
        for name in ("train", "val")
    )
    assert (len(train), len(val)) == (12, 4)
    assert sorted(row["desktop"] for row in train + val) == sorted(task_file(SHIPPED).tasks)
    assert all(row["prompt"] == {"task": "{instruction}"} for row in train)


def test_a_file_of_ones_own_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "- {id: a, instruction: Do it., checks: [{path: x, is: file}]}", encoding="utf-8"
    )
    assert main(["--out", str(tmp_path), "--tasks", str(file)]) == 0
    assert (tmp_path / "train.jsonl").read_text(encoding="utf-8").count("\n") == 1
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("- {id: a}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"--tasks: .*wrong.yaml is not a file of desktop tasks"):
        main(["--out", str(tmp_path), "--tasks", str(wrong)])
