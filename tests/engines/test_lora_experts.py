"""Adapters on a mixture of experts: the experts keep their weights, and it is said."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from rayloop.core.model_families import UNADAPTED
from rayloop.core.protocols import TrainItem
from rayloop.core.types import Version
from rayloop.doctor.checks import configuration
from rayloop.engines.models import hf_state, load_model
from rayloop.engines.settings import FsdpSettings, LoraSettings, ModelSettings
from rayloop.engines.shape import ModelSource
from rayloop.run.config import RunConfig
from rayloop.run.preflight import prepare
from tests.engines.training import engine, trajectory
from tests.support.model_families import write
from tests.support.runs import settings

SOME = LoraSettings(rank=4)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("qwen3_moe", tmp_path_factory.mktemp("mixture"))


def test_the_experts_keep_their_weights_and_the_log_says_so(
    mixture: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = hf_state(load_model(ModelSettings(path=str(mixture))))
    with (
        caplog.at_level(logging.INFO),
        engine(mixture, FsdpSettings(dtype="float32", lora=SOME)) as trained,
    ):
        trained.train([[TrainItem(trajectory(mixture, 0, [(5, None, 6)]), 1.0)]])
        after = trained.export(Version(0, 1))
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in changed} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    }
    assert caplog.text.count(UNADAPTED) == 1
    found = ModelSource(str(mixture)).shape.trained(FsdpSettings(lora=SOME))
    assert f"training {found} of" in caplog.text, "the estimate counts no adapters of experts"


def test_doctor_warns_of_them(mixture: Path, tmp_path: Path) -> None:
    adapted = RunConfig.model_validate(
        settings(tmp_path, mixture, policy__engine__lora={"rank": 4})
    )
    assert f"policy.engine.lora: {UNADAPTED}" in [
        one.found for one in configuration(prepare(adapted)) if one.level == "warning"
    ]
    whole = RunConfig.model_validate(settings(tmp_path, mixture))
    assert not [one for one in configuration(prepare(whole)) if "policy.engine.lora" in one.found]
