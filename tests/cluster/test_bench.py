"""``python -m benchmarks``: the line of a real measurement, and the comparison of two programs'
lines.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from benchmarks.__main__ import parser
from benchmarks.train import flops
from rayloop.cli import main
from tests.support.runs import ROOT

pytestmark = pytest.mark.timeout(200)

SHAPE = {"prompts": 2, "group": 3, "completion": 5, "steps": 3, "threads": 1}
OPTIONS = [item for name, value in SHAPE.items() for item in (f"--{name}", str(value))]


@pytest.mark.slow_faults
def test_the_line_of_a_measured_run(digits_model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "step", "--model", str(digits_model), *OPTIONS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
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
    assert line["warm_steps"][-1] - line["warm_steps"][0] == pytest.approx(sum(warm), abs=0.002)
    assert line["samples_per_s"] == pytest.approx(6 / line["step_s_median"], rel=0.05)
    assert 0 < line["peak_pss_mb"] <= line["peak_rss_mb"]


def test_the_comparison_divides_ours_by_the_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.measure.measured", _scripted)
    assert (
        main(
            ["compare", "--model", str(tmp_path), "--peer-python", "peer", "--rounds", "3"], parser
        )
        == 0
    )
    *rounds, summary, line = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["ratio"] == {
        "step_s_median": 0.5,
        "gen_s_median": 0.25,
        "train_s_median": 0.75,
        "cpu_s_mean": 0.125,
    }
    assert len(rounds) == len(found["rounds"]) == 3
    assert "step 2.000 / 4.000 s = 0.500" in summary


def _scripted(command: list[str]) -> dict[str, float]:
    scale = 1.0 if command[0] == "peer" else 0.5
    return {
        "step_s_median": 4 * scale,
        "gen_s_median": 2 * scale**2,
        "train_s_median": 2 * (1.5 * scale if scale < 1 else 1),
        "cpu_s_mean": 5 * scale**3,
    }


def test_a_program_that_fails_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(
        ["compare", "--model", str(tmp_path / "absent"), "--peer-python", sys.executable, *OPTIONS],
        parser,
    )
    assert code == 1
    error = capsys.readouterr().err
    assert "BenchFailed" in error
    assert "trl_step.py" in error


def test_a_folder_without_a_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["step", "--model", str(tmp_path)], parser) == 2
    assert "no config.json" in capsys.readouterr().err


def bench(*options: str) -> dict[str, Any]:
    """The last line that ``bench`` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow_faults
def test_weights_are_published_over_every_transport() -> None:
    line = bench("weight_sync", "--mib", "8", "--tensors", "4", "--rounds", "1")
    assert line["ratio"].keys() == {"object_store", "collective"}
    for name, ratio in line["ratio"].items():
        assert ratio == pytest.approx(line["seconds"][name] / line["seconds"]["plain"], rel=0.05)


@pytest.mark.slow_faults
def test_the_driver_plays_among_simulated_actors() -> None:
    line = bench("scale", "cost", "--in-flight", "1", "32", "--trajectories", "64")
    alone, many = line["cost"]
    assert alone["trajectories"] >= 64
    assert many["trajectories"] >= 64
    assert alone["filtered_share"] == 0 < many["filtered_share"] < 0.6
    assert alone["cpu_ms_per_trajectory"] > 0 < many["cpu_ms_per_trajectory"]
    assert 0 <= many["idle_share"] < 1


@pytest.mark.slow_faults
def test_screenshots_travel_once() -> None:
    line = bench(
        "multi_turn",
        "--episodes",
        "16",
        "--turns",
        "4",
        "--size",
        "200000",
        "--steps",
        "1",
        "--seconds",
        "0.05",
    )
    assert 16 * 3 < line["requests"] <= 16 * 4, "the first turn of a group may be one request"
    assert line["distinct_mb"] == pytest.approx((2 + 16 * 3) * 0.2, rel=0.05)
    assert 1.0 <= line["ratio"] <= 1.2
    assert line["payload_mb"] >= 16 * 4 * 0.19
    assert {"EnvironmentActor", "CountingRollout"} <= line["cpu_s"].keys(), (
        "the driver may need next to nothing"
    )


def test_the_trainers_speed_is_a_share_of_matrix_products(digits_model: Path) -> None:
    line = bench(
        "train",
        "--model",
        str(digits_model),
        "--sequences",
        "4",
        "--prompt",
        "8",
        "--answer",
        "8",
        "--rounds",
        "2",
    )
    assert line["tokens_per_s"] == pytest.approx(4 * 16 / line["update_s"], rel=0.01)
    assert line["mfu"] == pytest.approx(line["gflops"] / line["ceiling_gflops"], rel=0.01)
    c = json.loads((digits_model / "config.json").read_text(encoding="utf-8"))
    layer = sum(
        math.prod(weight.shape)
        for name, weight in load_file(digits_model / "model.safetensors").items()
        if "proj" in name and name.endswith("weight")
    )
    forward = (
        2 * (layer * 64 + c["hidden_size"] * c["vocab_size"] * 32)
        + 2 * 16**2 * c["hidden_size"] * 4
    )
    assert line["gflops"] * line["update_s"] == pytest.approx(3 * forward / 1e9, rel=0.05)


def test_a_prompt_that_a_group_shares_counts_once() -> None:
    """Else the share of the machine's speed exceeds 1."""
    shape = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 16,
        "vocab_size": 0,
    }
    alone, shared = flops(shape, 8, 100, 10), flops(shape, 8, 100, 10, group=8)
    assert shared == pytest.approx(
        flops(shape, 1, 100, 10) + 7 * (flops(shape, 1, 100, 10) - flops(shape, 1, 100, 0))
    )
    assert alone == 8 * flops(shape, 1, 100, 10) > 4 * shared
