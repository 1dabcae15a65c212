"""What is exported of a family loads in vLLM on a CPU, which samples with the trainer's log-probs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from rayloop.core.types import Trajectory, Version
from rayloop.engines.models import hf_state, load_model
from rayloop.engines.settings import EnginePlace, FsdpSettings, ModelSettings, build_engine
from rayloop.run.sections import RolloutSettings
from rayloop.transports.manifest import manifest
from tests.contracts.test_engine import ENGINES
from tests.contracts.test_model_family import episodes, gaps, sampled
from tests.engines.training import engine as trainer
from tests.support.model_families import VLLM, write

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1400)]

LIMIT = 1e-4


@pytest.mark.parametrize("kind", VLLM)
def test_vllm_samples_what_the_trainer_computes(kind: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder = write(kind, tmp_path)
    model = ModelSettings(path=str(folder))

    async def run() -> list[Trajectory]:
        chosen = RolloutSettings.model_validate({"engine": ENGINES["vllm"]}).engine
        served: Any = build_engine(model, chosen, EnginePlace())
        try:
            weights = hf_state(load_model(model))
            await served.load(manifest(Version(0, 0), weights), weights)
            return await episodes(served, folder, Version(0, 0))
        finally:
            served.close()

    played = asyncio.run(run())
    with trainer(folder, FsdpSettings(dtype="float32")) as trained:
        assert gaps(trained.logprobs(played), sampled(played)).max() < LIMIT
