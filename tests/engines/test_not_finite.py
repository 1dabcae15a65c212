"""Weights and states that are not numbers: said with their name, and neither loaded, sent nor
saved.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rayloop.core.failures import ConfigError, Damaged, Diverged
from rayloop.core.types import Sampling, TokenPrompt
from rayloop.engines.models import load_model
from rayloop.engines.settings import FsdpSettings, LoraSettings, ModelSettings, OptimizerSettings
from rayloop.engines.training import checkpointing
from rayloop.engines.training.fsdp import FsdpEngine
from rayloop.engines.training.sharding import local
from rayloop.transports.manifest import has_nan
from tests.engines.prompts import engine as generation
from tests.engines.training import VERSION, engine, mixed_items, run_ranks

NAMED = r"NaN or an infinity in 1 of \d+ tensors, first \S*down_proj\.weight"
BAD = [math.nan, math.inf, -math.inf]


@torch.no_grad()
def spoil(trainer: FsdpEngine, part: str, value: float = math.nan) -> None:
    """Put one number that is none into the first parameter of that name."""
    parameter = next(p for name, p in trainer._parameters.items() if part in name)
    shard = local(parameter)
    if shard.numel():
        shard.view(-1)[0] = value


@pytest.fixture
def trained(tiny_vlm: Path) -> Iterator[FsdpEngine]:
    with engine(tiny_vlm, FsdpSettings(), OptimizerSettings(lr=1e-3)) as made:
        made.train([mixed_items(tiny_vlm)])
        yield made


@pytest.mark.parametrize("value", BAD)
def test_weights_that_are_not_finite_are_neither_sent_nor_saved(
    trained: FsdpEngine, value: float, tmp_path: Path
) -> None:
    spoil(trained, "down_proj", value)
    for made in (trained.export, lambda version: list(trained.stream(version))):
        with pytest.raises(
            Diverged,
            match=rf"weights of version 0\.0 are not numbers: {NAMED}.*Lower policy\.optimizer\.lr",
        ):
            made(VERSION)
    for save in (trained.save, trained.begin_save):
        with pytest.raises(Diverged, match="the trainer's state is not saved: NaN"):
            save(str(tmp_path / "state"))
    assert not (tmp_path / "state").exists()


def test_an_optimizer_whose_state_is_not_finite_is_not_saved(
    trained: FsdpEngine, tmp_path: Path
) -> None:
    state = next(iter(trained._optimizer.state().values()))
    local(state["exp_avg_sq"]).view(-1)[0] = math.inf
    with pytest.raises(
        Diverged, match=r"NaN or an infinity in 1 of \d+ tensors, first optimizer\.\S*\.exp_avg_sq"
    ):
        trained.save(str(tmp_path / "state"))


def test_a_checkpoint_of_what_is_not_finite_counts_as_damaged(
    trained: FsdpEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = str(tmp_path / "good"), str(tmp_path / "bad")
    trained.save(good)
    spoil(trained, "down_proj")
    with monkeypatch.context() as patched:
        patched.setattr(checkpointing, "not_finite", lambda *_: "")
        trained.save(bad)
    with pytest.raises(Damaged, match="saved when it was not numbers any more: NaN"):
        trained.load(bad)
    trained.load(good)
    assert trained.export(VERSION)


def test_adapters_that_are_not_finite_are_not_sent(tiny_vlm: Path) -> None:
    with engine(tiny_vlm, FsdpSettings(lora=LoraSettings(rank=4))) as made:
        spoil(made, "lora_B")
        for alone in (False, True):
            with pytest.raises(Diverged, match=r"first \S*lora_B"):
                made.export(VERSION, adapters=alone)


def _one_rank_is_wrong(rank: int, world_size: int, folder: Path, meeting: Path) -> str:
    with engine(folder, rank=rank, world_size=world_size, meeting=meeting) as trainer:
        if rank == 1:
            spoil(trainer, "down_proj")
        try:
            trainer.export(VERSION)
        except Diverged as error:
            return str(error)
    return ""


def test_all_ranks_stop_for_a_number_of_one_of_them(tiny_vlm: Path, tmp_path: Path) -> None:
    said = run_ranks(_one_rank_is_wrong, 2, tiny_vlm, tmp_path / "meeting")
    assert said[0] == said[1]
    assert "NaN or an infinity in 1 of" in said[0]


def spoiled(source: Path, folder: Path, value: float) -> Path:
    """A copy of a model folder with one row of one matrix spoiled."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][5] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("value", BAD)
def test_a_model_that_is_not_finite_is_not_loaded(
    value: float, tiny_text: Path, tmp_path: Path
) -> None:
    folder = spoiled(tiny_text, tmp_path / "broken", value)
    with pytest.raises(
        ConfigError,
        match=r"broken: NaN or an infinity in 1 tensor, first \S*down_proj\.weight: .* not finite",
    ):
        load_model(ModelSettings(path=str(folder)))


@pytest.mark.parametrize(
    "sampling",
    [Sampling(max_tokens=3), Sampling(max_tokens=3, temperature=0.0)],
    ids=["sampled", "greedy"],
)
def test_an_engine_whose_logits_are_nan_says_so_in_its_log_probs(
    sampling: Sampling, tiny_text: Path
) -> None:
    async def run() -> Any:
        served = await generation(tiny_text, dtype="float32")
        with torch.no_grad():
            next(p for name, p in served._parameters.items() if "down_proj" in name)[5] = math.nan
        return await served.generate(TokenPrompt((70, 71), (), seed=1), sampling)

    done = asyncio.run(run())
    assert done.token_ids
    assert all(math.isnan(one) for one in done.logprobs)


def test_what_is_looked_for() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for value in BAD:
            tensor = torch.zeros(3, 5, dtype=dtype)
            assert not has_nan(tensor)
            tensor[2, 4] = value
            assert has_nan(tensor)
    assert not has_nan(torch.empty(0, 4))
    assert not has_nan(torch.tensor([2**31 - 1], dtype=torch.int32))
