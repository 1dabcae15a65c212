"""docs/bring_your_own/data.md: the rows of the page are made as it says, and a run can use them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rayloop.cli import main
from tests.support.pages import write_snippets


def test_the_rows_of_the_page_are_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_snippets("bring_your_own/data.md", tmp_path)
    subprocess.run([sys.executable, "make_rows.py"], cwd=tmp_path, check=True, timeout=60)
    file = tmp_path / "train.jsonl"
    assert main(["data", "validate", str(file)]) == 0
    assert "2 rows read by rayloop.data.dataset:ChatRows, 0 problems" in capsys.readouterr().out
    spoilt = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    spoilt[1]["images"] = ["absent.png"]
    file.write_text("".join(json.dumps(row) + "\n" for row in spoilt), encoding="utf-8")
    assert main(["data", "validate", str(file)]) == 1
    assert f"{file}:2: " in capsys.readouterr().out
