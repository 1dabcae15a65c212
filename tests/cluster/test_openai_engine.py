"""A server with the OpenAI interface as the engine: it is measured over chat, and trained where it
takes weights.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rayloop.run.held_out import read_items
from tests.support.openai_server import serving
from tests.support.runs import ROOT, finished, settings

pytestmark = pytest.mark.timeout(200)
DATA = ROOT / "tests/data/grounding"


@pytest.mark.slow_faults
def test_a_server_is_measured_on_screenshots(tmp_path: Path, grounding_model: Path) -> None:
    with serving(grounding_model) as server:
        server.reply = {"message": {"content": "<bbox>[0,0,1,1]</bbox>"}, "finish_reason": "stop"}
        engine = {"kind": "openai_http", "base_url": f"{server.url}/v1", "model": "theirs"}
        config = settings(
            tmp_path,
            grounding_model,
            rollout__engine=engine,
            rollout__sampling__max_tokens=32,
            data={
                "train": str(DATA / "train.jsonl"),
                "reader": {"use": "rayloop.recipes.arc_vision.data:GroundingRows"},
            },
            reward={"source": {"use": "rayloop.recipes.arc_vision.reward:IoUReward"}},
            environment__episode__environment={"use": "rayloop.envs.single_turn:SingleTurn"},
        )
        file, out = tmp_path / "eval.yaml", tmp_path / "out"
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        benchmark = (
            "--benchmark",
            "screenspot",
            "evaluation.by=[page]",
            "evaluation.solved=format",
            "--samples",
            "2",
        )
        command = (
            "eval",
            str(file),
            *benchmark,
            "--data",
            str(DATA / "test.jsonl"),
            "--out",
            str(out),
        )
        done = subprocess.run(
            [sys.executable, "-m", "rayloop", *command],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
        assert done.returncode == 0
    items = read_items(out / "items.jsonl")
    rows = len((DATA / "test.jsonl").read_text(encoding="utf-8").splitlines())
    assert len(items) == len(server.requests) == 3 * rows, "one greedy answer and two sampled ones"
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert (results["benchmark"], len(results["tasks"]), results["cut"]) == ("screenspot", rows, 0)
    assert {k: found[0] for k, found in results["pass_at"].items()} == {
        "1": 1.0,
        "2": 1.0,
    }, "the whole page holds every middle"
    assert len(results["by"]["page"]) == rows, "every page is of its own type"
    assert all(item.reward is not None and item.reward > 0 for item in items), (
        "the answer is the whole page"
    )
    assert (
        json.loads((out / "identity.json").read_text(encoding="utf-8"))["weights"]
        == f"theirs at {server.url}/v1"
    )
    for _, _, body in server.requests:
        [image] = [part for part in body["messages"][-1]["content"] if part["type"] == "image_url"]
        assert image["image_url"]["url"].startswith("data:image/")


@pytest.mark.slow_faults
def test_a_server_that_takes_weights_is_trained(tmp_path: Path, digits_model: Path) -> None:
    with serving(digits_model) as server:
        update = {"/load": {"model_path": "{folder}"}}
        engine = {
            "kind": "openai_http",
            "base_url": f"{server.url}/v1",
            "model": "ours",
            "interface": "tokens",
            "update": update,
            "dtype": "float32",
        }
        made = finished(
            settings(
                tmp_path,
                digits_model,
                rollout__engine=engine,
                steps=2,
                weight_sync__logprob_check="self_test",
            )
        )
    [logprob_check] = made.named("logprob_check")
    assert logprob_check["mean"] < 1e-4
    assert len(made.metrics) == 2
    assert [test["group"] for test in made.named("self_test")], "each part of the weights arrived"
