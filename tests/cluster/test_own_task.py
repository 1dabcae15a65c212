"""docs/own_task.md: every snippet of the page is written to its file and run, as a reader would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.warm import rayloop

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/own_task.md").read_text(encoding="utf-8")
SNIPPET = re.compile(r"^```(\w*)(?: title=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the page's files."""
    for language, name, text in SNIPPET.findall(PAGE):
        assert name, f"a snippet of {language} has no file, so nothing would run it"
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_the_rows_are_valid(folder: Path, digits_model: Path) -> None:
    done = rayloop(("data", "validate", "sums.yaml"), folder)
    assert (done.returncode, "4 rows read by" in done.stdout, "warning" in done.stdout) == (
        0,
        True,
        False,
    ), done.stdout


def test_the_configuration_can_be_tried(folder: Path, digits_model: Path) -> None:
    done = rayloop(("try", "sums.yaml", f"model.path={digits_model}"), folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 answers have a reward" in done.stdout
    assert 'truth: "3"' in done.stdout


@pytest.mark.slow_faults
def test_it_trains(folder: Path, digits_model: Path) -> None:
    """One step; answers of a random model are all equally bad, so nothing is filtered."""
    small = (
        "steps=1",
        "algorithm.groups_per_step=1",
        "algorithm.filtering.filters=[]",
        "weight_sync.logprob_check=stop",
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "rayloop",
            "train",
            "sums.yaml",
            f"model.path={digits_model}",
            *small,
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 1/1" in done.stdout
    assert (folder / "runs/sums/rollouts/step_000001.jsonl").exists()
