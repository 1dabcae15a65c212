"""What recipes bring, and ``python -m rayloop.benchmarks recipe``: which evaluations it asks for, and what it makes of them."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayloop import recipes
from rayloop.benchmarks import recipe
from rayloop.cli import main
from rayloop.measure.benchmark import Benchmark, HeldOut
from rayloop.run.config import read

ROOT = Path(__file__).parents[3]
SUMMARY = {"items": 9, "arms": {"right": {"iou": [0.5, 0.25, 0.75]}}, "unscored": 0}


def test_every_recipe_brings_its_data_and_its_benchmark() -> None:
    folders = sorted(path.parent.name for path in (ROOT / "recipes").glob("*/__init__.py"))
    assert recipes.having("prepare") == folders
    trained = [name for name in folders if name != "desktop"]  # whose rows are an environment's, and no policy's yet
    assert recipes.having("benchmark") == recipes.having("score") == trained
    assert all((ROOT / "recipes" / name / file).is_file() for name in trained for file in ("README.md", "quickstart.yaml"))
    assert recipes.having("nothing") == []


@pytest.mark.parametrize("name", recipes.having("benchmark"))
def test_a_benchmark_names_what_is_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    benchmark: Benchmark = import_module(f"rayloop.recipes.{name}.benchmark").BENCHMARK
    config = read(Path(benchmark.config), [])
    assert benchmark.sets
    for held_out in benchmark.sets.values():
        assert benchmark.missing if held_out.path.startswith("runs/") else Path(held_out.path).is_file()
        assert held_out.path != config.data.train
        assert not held_out.controls or config.evaluation.blind


class Evaluations:
    """Stands in for ``python -m rayloop``: writes a summary, and ends with ``code``."""

    def __init__(self, code: int, summary: dict[str, Any] = SUMMARY) -> None:
        self.code, self.summary = code, summary
        self.asked: list[list[str]] = []

    def run(self, command: list[str]) -> Any:
        self.asked.append(command[3:])
        out = Path(command[command.index("--out") + 1])
        out.mkdir(parents=True)
        if self.code in (0, 1):
            (out / "summary.json").write_text(json.dumps(self.summary), encoding="utf-8")
        return SimpleNamespace(returncode=self.code)


def measured(folder: Path, evaluations: Evaluations, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(recipe, "subprocess", SimpleNamespace(run=evaluations.run))
    monkeypatch.chdir(ROOT)
    return main(["bench", "recipe", "arc_vision", "--checkpoint", "tiny", "--out", str(folder), "evaluation.limit=9"])


def test_each_set_is_evaluated_with_what_it_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluations = Evaluations(0)
    assert measured(tmp_path, evaluations, monkeypatch) == 0
    test, ood = evaluations.asked
    assert test[:3] == ood[:3] == ["eval", "recipes/arc_vision/learn.yaml", "evaluation.limit=9"]
    assert (test[test.index("--samples") + 1], "--controls" in test) == ("4", True)
    assert (ood[ood.index("--samples") + 1], "--controls" in ood) == ("0", False)
    found = json.loads((tmp_path / "benchmark.json").read_text(encoding="utf-8"))
    assert found == {"recipe": "arc_vision", "checkpoint": "tiny", "sets": {"test": SUMMARY, "ood": SUMMARY}}
    assert "test: iou 0.500 [0.250, 0.750] over 9 rows" in capsys.readouterr().out


def test_answers_without_a_score_are_no_success_and_a_failure_is_none_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measured(tmp_path / "unscored", Evaluations(1, {**SUMMARY, "unscored": 2}), monkeypatch) == 1
    assert measured(tmp_path / "refused", Evaluations(2), monkeypatch) == 1
    assert "ended with 2" in capsys.readouterr().err
    assert not (tmp_path / "refused" / "benchmark.json").exists()


def test_missing_rows_are_named_with_how_to_make_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lacking = Benchmark("x.yaml", {"eval": HeldOut("rows/eval.jsonl")}, "exact", missing="make rows")
    with pytest.raises(recipe.ConfigError, match=r"missing: rows/eval\.jsonl\. To make them: make rows"):
        recipe.measure(lacking, tmp_path, tmp_path, [])
