"""``python -m cluster bench``: the line of a real measurement, and the comparison of two programs' lines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.cli import main
from tests.support.runs import ROOT

pytestmark = pytest.mark.timeout(200)

SHAPE = {"prompts": 2, "group": 3, "completion": 5, "steps": 3, "threads": 1}
OPTIONS = [item for name, value in SHAPE.items() for item in (f"--{name}", str(value))]


def test_the_line_of_a_measured_run(digits_model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cluster", "bench", "step", "--model", str(digits_model), *OPTIONS],
        cwd=ROOT, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert {name: line[name] for name in SHAPE} == SHAPE
    assert line["tool"] == "rayloop"
    assert line["versions"].keys() == {"rayloop", "ray", "transformers", "torch"}
    assert line["params_m"] > 0
    assert line["completion_tokens"] == [2 * 3 * 5] * 3, "every answer has the full length"
    assert len(line["step_s"]) == len(line["gen_s"]) == len(line["reward"]) == 3
    assert all(0 < part < whole for part, whole in zip(line["gen_s"], line["step_s"], strict=True))
    assert line["wall_s"] == pytest.approx(sum(line["step_s"]), abs=0.02)
    warm = sorted(line["step_s"][1:])
    assert line["step_s_median"] == pytest.approx(sum(warm) / 2, abs=0.002)
    assert line["samples_per_s"] == pytest.approx(6 / line["step_s_median"], rel=0.05)
    assert 0 < line["peak_pss_mb"] <= line["peak_rss_mb"]


def test_the_comparison_divides_ours_by_the_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cluster.bench._measured", _scripted)
    assert main(["bench", "compare", "--model", str(tmp_path), "--peer-python", "peer", "--rounds", "3"]) == 0
    *rounds, summary, line = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["ratio"] == {"step_s_median": 0.5, "gen_s_median": 0.25, "train_s_median": 0.75}
    assert len(rounds) == len(found["rounds"]) == 3
    assert "step 2.000 / 4.000 s = 0.500" in summary


def _scripted(command: list[str]) -> dict[str, float]:
    scale = 1.0 if command[0] == "peer" else 0.5
    return {
        "step_s_median": 4 * scale,
        "gen_s_median": 2 * scale**2,
        "train_s_median": 2 * (1.5 * scale if scale < 1 else 1),
    }


def test_a_program_that_fails_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["bench", "compare", "--model", str(tmp_path / "absent"), "--peer-python", sys.executable, *OPTIONS])
    assert code == 1
    error = capsys.readouterr().err
    assert "BenchFailed" in error
    assert "trl_step.py" in error


def test_a_folder_without_a_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", "--model", str(tmp_path)]) == 2
    assert "no config.json" in capsys.readouterr().err
