"""The presets that users copy: each is a valid run, asks for the GPUs that its name says, and fits
into them by the arithmetic.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rayloop.config.settings import check_components
from rayloop.engines.settings import VllmEngineSettings
from rayloop.run.config import RunConfig, read
from rayloop.run.demand import demand
from rayloop.run.preflight import preflight, prepare
from tests.support.runs import ROOT

PRESETS = {"gpu_1": 1, "gpu_8": 8, "nodes_2": 16, "asynchronous": 8, "lora_kl": 2}
"""Name -> GPUs."""
PARAMETERS = {"Qwen/Qwen2.5-VL-3B-Instruct": 3.75e9, "Qwen/Qwen2.5-VL-7B-Instruct": 8.29e9}
"""By their model cards' safetensors."""
GPU = 80e9


@pytest.fixture(params=PRESETS)
def preset(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, RunConfig]:
    monkeypatch.chdir(ROOT)
    return request.param, read(ROOT / f"recipes/presets/{request.param}.yaml", [])


def test_there_are_no_others() -> None:
    assert {path.stem for path in (ROOT / "recipes/presets").glob("*.yaml")} == set(PRESETS)


def test_what_can_be_checked_before_a_start_is_fine(
    preset: tuple[str, RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's text files are those that are shipped, in the Hub's cache."""
    _, config = preset
    snapshot = (
        tmp_path / f"models--{config.model.path.replace('/', '--')}" / "snapshots" / ("0" * 40)
    )
    shutil.copytree(ROOT / "recipes/arc_vision/tiny", snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40, encoding="utf-8")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    check_components(config)
    preflight(prepare(config))


def test_it_asks_for_the_gpus_of_its_name(preset: tuple[str, RunConfig]) -> None:
    name, config = preset
    assert sum(placement.num_gpus for _, placement in demand(config, trains=True)) == PRESETS[name]


def test_steps_divide_evenly(preset: tuple[str, RunConfig]) -> None:
    _, config = preset
    algorithm, policy = config.algorithm, config.policy
    assert algorithm.target % policy.ranks == 0
    assert algorithm.groups_per_step % policy.update.mini_batches == 0
    assert algorithm.target % config.rollout.actors == 0
    assert config.evaluation.every
    assert config.checkpoint.every <= config.steps


def test_the_trainer_fits(preset: tuple[str, RunConfig]) -> None:
    """Weights, gradients and Adam in float32 over the ranks, or the frozen weights, take half; the
    rest computes.
    """
    _, config = preset
    each = 4 if config.policy.engine.lora else 16
    static = each * PARAMETERS[config.model.path] / config.policy.ranks
    assert static <= 0.5 * GPU * config.policy.placement.num_gpus
    assert config.policy.engine.gradient_checkpointing
    assert config.policy.engine.dtype == config.rollout.engine.dtype == "bfloat16"


def test_the_engine_fits(preset: tuple[str, RunConfig]) -> None:
    """Its share holds the weights with room for a cache; on a GPU that it shares it asks for no
    more than its part.
    """
    _, config = preset
    engine, share = config.engine, config.rollout.placement.num_gpus
    assert isinstance(engine, VllmEngineSettings)
    assert (
        2 * PARAMETERS[config.model.path] / engine.tensor_parallel
        <= 0.6 * engine.memory_fraction * GPU
    )
    assert engine.memory_fraction <= min(share, 0.9)
    if share < 1:
        assert engine.kv_cache_bytes is not None, (
            "what vLLM finds free on a shared GPU is the trainer's"
        )
        cache_and_weights = engine.kv_cache_bytes + 2 * PARAMETERS[config.model.path]
        assert cache_and_weights <= engine.memory_fraction * GPU
    in_flight = (1 + config.algorithm.staleness.max_staleness) * config.algorithm.target
    assert engine.max_sequences * config.rollout.actors >= in_flight, (
        "or a step is decoded in two rounds"
    )


def test_every_preset_says_what_it_has_been_run_on() -> None:
    for name in PRESETS:
        text = (ROOT / f"recipes/presets/{name}.yaml").read_text(encoding="utf-8")
        header = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
        assert "Not run on " in header, name
        assert "measured" not in header.replace("not measured", ""), name


def test_they_are_of_the_kind_that_their_names_say() -> None:
    made = {name: read(ROOT / f"recipes/presets/{name}.yaml", []) for name in PRESETS}
    assert {name for name, config in made.items() if config.algorithm.staleness.max_staleness} == {
        "asynchronous"
    }
    assert {name for name, config in made.items() if config.reference_kind == "adapter_off"} == {
        "lora_kl"
    }
    assert {n for n, c in made.items() if c.weight_sync.transport.kind == "collective"} == {
        "gpu_8",
        "nodes_2",
        "asynchronous",
    }
    assert Path(made["nodes_2"].output).is_absolute(), "on a file system that both see"


def test_the_page_names_each() -> None:
    page = (ROOT / "docs/choosing_settings.md").read_text(encoding="utf-8")
    assert [name for name in PRESETS if f"recipes/presets/{name}.yaml" not in page] == []
