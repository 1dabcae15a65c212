"""Adapters that a weight sync sends alone: their names, their values, the self-test's change, and
when they go alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rayloop.actors.policy import PolicyRank, RankSettings
from rayloop.core.model_families import FAMILIES, ModelFamily
from rayloop.core.protocols import TrainItem
from rayloop.core.types import Version
from rayloop.engines.generation.vllm import _arguments
from rayloop.engines.settings import (
    EngineChoice,
    FsdpSettings,
    LoraSettings,
    ModelSettings,
    OptimizerSettings,
    VllmEngineSettings,
)
from rayloop.engines.training_settings import ADAPTERS
from rayloop.grpo.losses.settings import PpoLoss
from rayloop.run.config import RunConfig
from rayloop.transports.settings import ObjectStoreTransport
from tests.engines.training import engine, run_ranks, trajectory
from tests.support.runs import settings

LORA = LoraSettings(rank=4, alpha=6.0)
VERSION = Version(0, 0)


def synced(config: RunConfig) -> EngineChoice:
    """The engine of a run that trains."""
    return config.engine.beside(config.policy.engine)


@pytest.mark.parametrize("fixture", ["tiny_text", "tiny_vlm"])
def test_the_adapters_and_the_model_they_began_with_are_the_merged_model(
    fixture: str, request: pytest.FixtureRequest
) -> None:
    with engine(request.getfixturevalue(fixture), FsdpSettings(lora=LORA)) as trainer:
        start = trainer.export(VERSION)
        trainer.perturb(ADAPTERS)
        alone, whole = trainer.export(VERSION, adapters=True), trainer.export(VERSION)
    layers = {name.removesuffix(".lora_A.weight") for name in alone if "lora_A" in name}
    assert set(alone) == {f"{layer}.lora_{matrix}.weight" for layer in layers for matrix in "AB"}
    adapted = {f"{layer.removeprefix('base_model.model.')}.weight": layer for layer in layers}
    assert (
        adapted.keys()
        == {name for name in start if not torch.equal(start[name], whole[name])}
        > set()
    )
    for name, layer in adapted.items():
        change = alone[f"{layer}.lora_B.weight"] @ alone[f"{layer}.lora_A.weight"] * 1.5
        torch.testing.assert_close(start[name] + change, whole[name])


def test_the_self_test_s_change_of_new_adapters_shows_and_is_undone(tiny_text: Path) -> None:
    played = [trajectory(tiny_text, 1, [(9, None, 12)])]
    with engine(tiny_text, FsdpSettings(lora=LORA)) as trainer:
        [before], start = trainer.logprobs(played), trainer.export(VERSION, adapters=True)
        trainer.perturb(ADAPTERS)
        [moved] = trainer.logprobs(played)
        assert abs(moved - before).mean() > 0.01
        trainer.restore_parameters()
        assert all(
            torch.equal(tensor, start[name])
            for name, tensor in trainer.export(VERSION, adapters=True).items()
        )
        trainer.train([[TrainItem(played[0], 1.0)]])
        assert any(
            not torch.equal(tensor, start[name])
            for name, tensor in trainer.export(VERSION, adapters=True).items()
        )


def _alone(rank: int, world_size: int, folder: Path, meeting: Path) -> dict[str, torch.Tensor]:
    with engine(
        folder, FsdpSettings(lora=LORA), rank=rank, world_size=world_size, meeting=meeting
    ) as trainer:
        return trainer.export(VERSION, adapters=True)


def test_the_first_rank_has_whole_adapters(tiny_text: Path, tmp_path: Path) -> None:
    first, second = run_ranks(_alone, 2, tiny_text, tmp_path / "met")
    with engine(tiny_text, FsdpSettings(lora=LORA)) as trainer:
        expected = trainer.export(VERSION, adapters=True)
    assert second == {}
    assert {name: tensor.shape for name, tensor in first.items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }


@pytest.mark.parametrize("taken", [True, False])
def test_a_rank_sends_what_the_engines_of_its_family_take(
    taken: bool, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "qwen2", ModelFamily(adapters=taken))
    made = RankSettings(
        ModelSettings(path=str(tiny_text)),
        FsdpSettings(lora=LORA),
        OptimizerSettings(),
        PpoLoss(),
        ObjectStoreTransport(),
        str(tmp_path),
        0,
        adapters_alone=True,
    )
    rank = PolicyRank(made, 0, 1)
    rank.join((tmp_path / "met").as_uri())
    try:
        groups, (sent, arrays) = rank.parameter_groups(), rank.export(VERSION)
        rank.write_model(str(tmp_path / "model"), VERSION)
    finally:
        rank.engine.close()
    assert sent is not None
    assert {".lora_" in name for name in sent.tensors} == {taken}
    assert sorted(groups) == ([ADAPTERS] if taken else ["embedding", "head", "language"])
    whole = load_file(tmp_path / "model" / "model.safetensors")
    assert not any(".lora_" in name for name in whole), "a model folder is always whole"
    print(
        {
            "sent": sum(array.nbytes for array in arrays.values()),
            "whole": sum(t.nbytes for t in whole.values()),
        }
    )


@pytest.mark.parametrize(
    ("lora", "trainer", "extra", "alone"),
    [
        ({"rank": 9}, {}, {}, True),
        (None, {}, {}, False),
        ({"rank": 9}, {"train_vision": True}, {}, False),
        ({"rank": 513}, {}, {}, False),
        ({"rank": 9}, {}, {"enable_lora": False}, False),
        ({"rank": 9}, {}, {"quantization": "fp8"}, False),
    ],
)
def test_adapters_go_alone_where_vllm_computes_with_them(
    lora: Any, trainer: dict[str, Any], extra: dict[str, Any], alone: bool, tmp_path: Path
) -> None:
    changes = {
        "rollout__engine": {"kind": "vllm", "extra": extra},
        "policy__engine": {"lora": lora, **trainer},
    }
    config = RunConfig.model_validate(settings(tmp_path, tmp_path, **changes))
    assert (synced(config).adapters is not None) is alone
    assert config.engine.adapters is None, "an evaluation loads whole models"
    made = synced(config)
    assert isinstance(made, VllmEngineSettings)
    arguments = _arguments(ModelSettings(path="m"), made, {}, made.adapters)
    assert arguments.get("max_lora_rank") == (16 if alone else None)
    config = RunConfig.model_validate(
        settings(tmp_path, tmp_path, policy__engine={"lora": {"rank": 4}})
    )
    assert synced(config).adapters is None, "other engines get the merged model"
