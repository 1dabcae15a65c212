"""Episodes that may be longer than the model has positions are said of, and refused where positions
are a table.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rayloop.commands.data import validate_run
from rayloop.core.failures import ConfigError
from rayloop.core.model_families import learned_positions, positions
from rayloop.doctor.checks import configuration
from rayloop.run.config import RunConfig
from rayloop.run.preflight import beyond_positions, preflight, prepare
from tests.support.runs import ROOT

MODEL = ROOT / "recipes/arc_vision/tiny"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ({}, None),
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 32768, "rope_scaling": None}, 32768),
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {"type": "mrope", "mrope_section": [1]},
            },
            32768,
        ),
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                },
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 2048,
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            },
            4096,
        ),
    ],
)
def test_how_many_positions_a_model_has(text: dict[str, Any], found: int | None) -> None:
    assert positions(text) == found


@pytest.mark.parametrize(
    ("name", "is_table"),
    [
        ("transformer.wpe.weight", True),
        ("model.decoder.embed_positions.weight", True),
        ("bert.embeddings.position_embeddings.weight", True),
        ("model.embed_tokens.weight", False),
        ("vision_tower.embeddings.position_embeddings", False),
        ("visual.pos_embed.weight", False),
        ("model.layers.0.self_attn.q_proj.weight", False),
    ],
)
def test_which_tensors_are_tables_of_positions(name: str, is_table: bool) -> None:
    assert learned_positions([name]) is is_table


def run_of(folder: Path, limit: int, **changes: Any) -> RunConfig:
    """A run on a model that says it has so many positions."""
    model = shutil.copytree(MODEL, folder / "model")
    described = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (described.get("text_config") or described)["max_position_embeddings"] = limit
    (model / "config.json").write_text(json.dumps(described), encoding="utf-8")
    (folder / "rows.jsonl").write_text(
        json.dumps({"prompt": "How many?", "answer": "3"}) + "\n", encoding="utf-8"
    )
    values: dict[str, Any] = {
        "name": "run",
        "steps": 1,
        "model": {"path": str(model)},
        "data": {"train": str(folder / "rows.jsonl")},
        "reward": {"source": {"use": "rayloop.recipes.digits.data:SortReward"}},
    }
    return RunConfig.model_validate(values | changes)


def episode(**settings: Any) -> dict[str, Any]:
    return {"environment": {"episode": settings}}


@pytest.mark.parametrize(
    ("changes", "longest"),
    [
        ({}, 4096 + 64),
        (episode(max_prompt_tokens=200), 200 + 64),
        (episode(max_prompt_tokens=200, max_turns=3), 8192),
        (episode(max_prompt_tokens=100) | {"rollout": {"sampling": {"max_tokens": 100}}}, 200),
    ],
)
def test_longer_episodes_are_said_of_before_and_at_the_start(
    changes: dict[str, Any], longest: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path, 128, **changes)
    said = beyond_positions(prepare(run))
    assert (
        f"has 128 positions (max_position_embeddings), and an episode may have {longest} tokens"
        in said
    )
    preflight(prepare(run))
    [warning] = [finding for finding in configuration(prepare(run)) if finding.level == "warning"]
    assert "128 positions" in warning.found
    assert warning.remedy.startswith("Set environment.episode.max_tokens")
    assert validate_run(run) == 0
    assert "warning: model.path" in capsys.readouterr().out


def test_nothing_is_said_of_episodes_that_fit(tmp_path: Path) -> None:
    run = run_of(tmp_path, 128, **episode(max_tokens=128, max_prompt_tokens=64))
    assert beyond_positions(prepare(run)) == ""
    assert [finding.level for finding in configuration(prepare(run))] == ["ok"]


def test_held_out_episodes_may_be_the_longer_ones(tmp_path: Path) -> None:
    short = episode(max_tokens=128, max_prompt_tokens=64)
    over = {"environment.episode.max_tokens": 512, "environment.episode.max_prompt_tokens": 400}
    data = {"train": str(tmp_path / "rows.jsonl"), "eval": str(tmp_path / "rows.jsonl")}
    run = run_of(tmp_path, 128, **short, evaluation={"over": over}, data=data)
    assert "an episode may have 464 tokens" in beyond_positions(prepare(run))


def test_a_table_of_positions_that_ends_too_early_is_an_error(tmp_path: Path) -> None:
    run = run_of(tmp_path, 128)
    file = tmp_path / "model/model.safetensors"
    save_file(
        {**load_file(file), "model.embed_positions.weight": torch.zeros(128, 4)},
        file,
        {"format": "pt"},
    )
    with pytest.raises(
        ConfigError, match=r"has 128 positions .* Set environment.episode.max_tokens"
    ):
        preflight(prepare(run))
    assert configuration(prepare(run))[0].level == "error"
