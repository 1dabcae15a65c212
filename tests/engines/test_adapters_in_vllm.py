"""Adapters that vLLM gets alone: its answers and log-probs are those of the merged model, for a
small part of the bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rayloop.core.failures import WeightSyncError, WorkerLost
from rayloop.core.types import Version
from rayloop.engines.models.saving import save_model
from rayloop.engines.settings import (
    EnginePlace,
    FsdpSettings,
    LoraSettings,
    ModelSettings,
    VllmEngineSettings,
)
from rayloop.engines.training.fsdp import FsdpEngine
from rayloop.engines.training_settings import ADAPTERS
from rayloop.transports.manifest import manifest
from tests.contracts.test_engine import ENGINES, GREEDY, Served, agree, looks, questions
from tests.engines.prompts import prompt
from tests.engines.training import engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

TRAINER = FsdpSettings(lora=LoraSettings(rank=3, alpha=6.0))


class Adapted(Served):
    """vLLM beside a trainer with adapters."""

    def __init__(self, folder: Path) -> None:
        from rayloop.engines.generation.vllm import VllmEngine

        self.kind, self.folder, self._runner = "vllm", folder, asyncio.Runner()
        settings = VllmEngineSettings.model_validate(ENGINES["vllm"]).beside(TRAINER)
        self.engine = VllmEngine(ModelSettings(path=str(folder)), settings, EnginePlace())


@pytest.fixture(scope="module", params=["tiny_text", "tiny_vlm"])
def served(request: pytest.FixtureRequest) -> Iterator[Adapted]:
    made = Adapted(request.getfixturevalue(request.param))
    yield made
    made.close()


@pytest.fixture
def trainer(served: Adapted) -> Iterator[FsdpEngine]:
    with engine(served.folder, TRAINER) as made:
        yield made


def bytes_of(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def test_every_sync_is_followed_at_a_part_of_the_bytes(
    served: Adapted, trainer: FsdpEngine, tmp_path: Path
) -> None:
    """Of new adapters, which change nothing, and of others twice."""
    requests = [
        *questions(served.folder)[:6],
        *(looks(served.folder) if "vlm" in str(served.folder) else []),
    ]
    for step in range(3):
        alone, whole = (
            trainer.export(Version(0, step), adapters=True),
            trainer.export(Version(0, step)),
        )
        save_model(str(served.folder), tmp_path / str(step), whole)
        served.run(served.load(alone, Version(0, step)))
        done = agree(served, tmp_path / str(step), requests, GREEDY)
        assert {one.version for one in done} == {Version(0, step)}
        trainer.restore_parameters()
        trainer._seed += 1
        trainer.perturb(ADAPTERS)
    print(
        f"{len(alone)} tensors, {bytes_of(alone)} bytes alone; {len(whole)} tensors,"
        f" {bytes_of(whole)} bytes merged"
    )
    assert 5 * bytes_of(alone) < bytes_of(whole)


def dropped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.up_proj" not in name}


def unknown(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, "base_model.model.stray.lora_A.weight": torch.zeros(3, 2)}


def larger(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: torch.cat([tensor] * 6, dim=int("lora_B" in name)) for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("damage", [dropped, unknown, larger])
@pytest.mark.parametrize("sent_that_way", [False, True])
def test_damaged_adapters_serve_nothing_until_good_ones(
    served: Adapted,
    trainer: FsdpEngine,
    damage: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    sent_that_way: bool,
    tmp_path: Path,
) -> None:
    trainer.perturb(ADAPTERS)
    good = trainer.export(Version(0, 1), adapters=True)
    served.run(served.load(good, Version(0, 1)))
    bad = damage(good)

    async def test() -> None:
        await served.engine.pause()
        with pytest.raises(WeightSyncError, match=r"up_proj|stray|shape|size|rank|bytes"):
            await served.engine.load(manifest(Version(0, 2), bad if sent_that_way else good), bad)
        await served.engine.resume()
        with pytest.raises(WorkerLost, match="no weights"):
            await served.engine.generate(prompt(served.folder, "What"), GREEDY)

    served.run(test())
    served.run(served.load(good, Version(0, 3)))
    save_model(str(served.folder), tmp_path / "good", trainer.export(Version(0, 3)))
    agree(served, tmp_path / "good", [prompt(served.folder, "What")], GREEDY)
