"""What is refused before anything starts, and what a killed process left behind."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest

from rayloop.cli import main
from rayloop.config.settings import dump
from rayloop.core.failures import ConfigError
from rayloop.launch.ray_variables import LOCK, PREFIX, private_cluster, sweep
from rayloop.run.config import RunConfig
from rayloop.run.held_out import never_evaluated, on_training_rows
from rayloop.run.preflight import MAX_BIASED_TOKENS, bannable, preflight, prepare

MODEL = Path(__file__).parents[2] / "recipes/arc_vision/tiny"


def config(folder: Path, **changes: Any) -> RunConfig:
    (folder / "rows.jsonl").touch()
    values: dict[str, Any] = {
        "name": "run",
        "steps": 1,
        "model": {"path": str(MODEL)},
        "data": {"train": str(folder / "rows.jsonl")},
        "reward": {"source": {"use": "rayloop.recipes.digits.data:SortReward"}},
    }
    return RunConfig.model_validate(values | changes)


def refusal(made: RunConfig) -> str:
    """Why preflight refuses it; empty when it does not."""
    try:
        preflight(prepare(made))
    except ConfigError as error:
        return str(error)
    return ""


def test_a_configuration_whose_files_are_there_passes(tmp_path: Path) -> None:
    assert refusal(config(tmp_path)) == ""
    hub = refusal(config(tmp_path, model={"path": "Qwen/Qwen2.5-VL-3B-Instruct"}))
    assert "the cache does not have it, and the Hub cannot be asked: HF_HUB_OFFLINE is set" in hub


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": {"path": "/nowhere/model"}},
            r"model\.path: /nowhere/model is neither a folder here .* sft` makes a policy",
        ),
        (
            {"data": {"train": "/nowhere/rows.jsonl"}},
            r"data\.train: /nowhere/rows\.jsonl is not a file",
        ),
        (
            {"checkpoint": {"resume": "/nowhere/step_1"}},
            r"checkpoint\.resume: /nowhere/step_1 is not a folder",
        ),
    ],
)
def test_what_is_not_there_is_named_with_its_key(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        preflight(prepare(config(tmp_path, **changes)))


def test_only_what_a_command_reads_must_be_there(tmp_path: Path) -> None:
    gone = config(
        tmp_path,
        data={"train": "/nowhere/rows.jsonl", "eval": str(tmp_path / "rows.jsonl")},
        checkpoint={"resume": "/nowhere/step_1"},
    )
    preflight(prepare(gone), trains=False, reads=("eval",))
    with pytest.raises(ConfigError, match=r"data\.train: /nowhere/rows\.jsonl is not a file"):
        preflight(prepare(gone), trains=False, reads=("train",))


@pytest.mark.parametrize(("options", "code"), [((), 0), (("--controls",), 2)])
def test_an_evaluation_asks_for_training_rows_with_controls_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], code: int
) -> None:
    monkeypatch.setattr("rayloop.cluster.stages.evaluate.evaluate", lambda *_, **__: 0)
    rows, run = tmp_path / "rows.jsonl", tmp_path / "run.yaml"
    made = config(tmp_path, data={"train": "/nowhere/rows.jsonl"})
    run.write_text(dump(made), encoding="utf-8")
    assert (
        main(["eval", str(run), "--data", str(rows), "--out", str(tmp_path / "out"), *options])
        == code
    )


def test_a_run_that_evaluates_names_held_out_rows_when_it_trains(tmp_path: Path) -> None:
    unheld = config(tmp_path, evaluation={"every": 5})
    preflight(prepare(unheld), trains=False, reads=("train",))
    assert (
        refusal(unheld)
        == "evaluation.every is 5, but data.eval names no rows. Set data.eval=FILE, or"
        " evaluation.every=0"
    )


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no complete checkpoint"):
        preflight(prepare(config(tmp_path, checkpoint={"resume": str(tmp_path)})))


SERVER = {"kind": "openai_http", "base_url": "http://127.0.0.1:1/v1", "model": "theirs"}
UPDATE = {"update": {"/load": {}}}


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"engine": SERVER}, "brings back neither token ids nor log-probs"),
        ({"engine": SERVER | UPDATE}, "brings back neither token ids nor log-probs"),
        ({"engine": SERVER | {"interface": "tokens"}}, "the server would keep its weights"),
    ],
)
def test_engines_that_cannot_be_trained_are_refused_by_training_only(
    tmp_path: Path, rollout: dict[str, Any], message: str
) -> None:
    preflight(prepare(config(tmp_path, rollout=rollout)), trains=False)
    with pytest.raises(ConfigError, match=message):
        preflight(prepare(config(tmp_path, rollout=rollout)))


def test_engines_that_can_be_trained_pass(tmp_path: Path) -> None:
    for engine in ({}, {"kind": "transformers"}, SERVER | UPDATE | {"interface": "tokens"}):
        assert refusal(config(tmp_path, rollout={"engine": engine})) == ""


def test_folders_of_killed_processes_are_removed_and_others_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("rayloop.launch.ray_variables.MAX_FOLDER_CHARACTERS", 1000)
    for name in ("dead", "alive"):
        (tmp_path / (PREFIX + name)).mkdir()
        (tmp_path / (PREFIX + name) / LOCK).touch()
    with open(tmp_path / f"{PREFIX}alive" / LOCK, encoding="utf-8") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with private_cluster() as mine:
            sweep()
            left = {path.name for path in tmp_path.iterdir()}
            assert left == {f"{PREFIX}alive", Path(mine).name}
    assert [path.name for path in tmp_path.iterdir()] == [f"{PREFIX}alive"]


def test_evaluating_on_the_training_file_is_reported_whatever_it_is_called(tmp_path: Path) -> None:
    rows, link, other = tmp_path / "rows.jsonl", tmp_path / "link.jsonl", tmp_path / "other.jsonl"
    link.symlink_to(rows)
    other.touch()

    def said(held_out: Path, every: int = 1) -> str:
        data = {"train": str(rows), "eval": str(held_out)}
        return on_training_rows(config(tmp_path, data=data, evaluation={"every": every}))

    assert "data.eval is data.train" in said(rows)
    assert "data.eval is data.train" in said(link)
    assert said(other) == said(rows, every=0) == ""


def test_rows_that_are_named_and_never_evaluated_are_reported(tmp_path: Path) -> None:
    def said(every: int, **data: str) -> str:
        rows = {"train": str(tmp_path / "rows.jsonl"), **data}
        return never_evaluated(config(tmp_path, data=rows, evaluation={"every": every}))

    assert "evaluation.every: 0" in said(0, eval="held.jsonl")
    assert said(1, eval="held.jsonl") == said(0) == ""


@pytest.mark.parametrize(
    ("described", "why"),
    [
        (
            {"model_type": "gemma3", "vision_config": {}},
            "images of 'gemma3' models are not supported",
        ),
        ({"model_type": "qwen2_moe", "num_experts": 60}, "qwen2_moe is a mixture of 60 experts"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_before_ray_starts(
    tmp_path: Path, described: dict[str, Any], why: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(described), encoding="utf-8")
    assert why in refusal(config(tmp_path, model={"path": str(tmp_path)}))


def test_more_banned_tokens_than_vllm_takes_are_refused_before_its_engine_ends(
    tmp_path: Path,
) -> None:
    vllm = {"engine": {"kind": "vllm"}, "placement": {"num_gpus": 1}}
    bannable(config(tmp_path, rollout=vllm), MAX_BIASED_TOKENS)
    with pytest.raises(ConfigError, match="has 1025 ids without a text"):
        bannable(config(tmp_path, rollout=vllm), MAX_BIASED_TOKENS + 1)
    bannable(config(tmp_path, rollout={"engine": {"kind": "vllm"}}), MAX_BIASED_TOKENS + 1)
    bannable(config(tmp_path), MAX_BIASED_TOKENS + 1)
