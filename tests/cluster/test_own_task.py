"""docs/own_task.md: every snippet of the page is written to its file and run, as a reader would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rayloop", *words], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_the_rows_are_valid(folder: Path, digits_model: Path) -> None:
    done = command(folder, "data", "validate", "sums.yaml")
    assert (done.returncode, "4 rows read by" in done.stdout, "warning" in done.stdout) == (0, True, False), done.stdout


@pytest.mark.parametrize("name", ["sums", "guess"])
def test_each_configuration_can_be_tried(folder: Path, digits_model: Path, name: str) -> None:
    done = command(folder, "try", f"{name}.yaml", f"model.path={digits_model}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 answers have a reward" in done.stdout
    assert 'truth: "3"' in done.stdout


def test_the_environment_does_what_the_page_says(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    from importlib import import_module

    from rayloop.core.types import Task

    guess = import_module("guess")
    game = guess.Guess(guess.Guess.Settings())
    game.reset(Task("a", (), "3"))
    said = [game.step(text) for text in ("5", "1", "what?", "3")]
    assert [step.observation.messages[0].parts[0] for step in said[:3]] == ["Lower.", "Higher.", "A number, please."]
    assert said[2].error
    assert said[3].done
    assert game.evaluate() == 1.0


def test_it_trains(folder: Path, digits_model: Path) -> None:
    """One step; answers of a random model are all equally bad, so nothing is filtered."""
    small = ("steps=1", "algorithm.groups_per_step=1", "algorithm.filtering.filters=[]", "weight_sync.logprob_check=stop")
    done = command(folder, "train", "sums.yaml", f"model.path={digits_model}", *small)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 1/1" in done.stdout
    assert (folder / "runs/sums/rollouts/step_000001.jsonl").exists()
