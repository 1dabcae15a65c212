"""Dropout of the adapters is part of an update alone: log-probs, the reference and what is published are without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from rayloop.engines.settings import FsdpSettings, LoraSettings, OptimizerSettings
from rayloop.engines.training.fsdp import FsdpEngine
from tests.engines.training import VERSION, engine, mixed_items

FAST = OptimizerSettings(lr=1e-2)
FORGETFUL = FsdpSettings(lora=LoraSettings(rank=4, dropout=0.5))


def test_logprobs_are_without_dropout_also_after_an_update(tiny_vlm: Path, tmp_path: Path) -> None:
    items = mixed_items(tiny_vlm)
    played = [item.trajectory for item in items]

    def both(trainer: FsdpEngine) -> list[np.ndarray]:
        return [*trainer.logprobs(played), *trainer.logprobs(played, reference=True)]

    with engine(tiny_vlm, FORGETFUL, FAST) as trainer:
        trainer.train([items])
        trainer.train([items])
        first, second = both(trainer), both(trainer)
        trainer.save(str(tmp_path))
    with engine(tiny_vlm, FsdpSettings(lora=LoraSettings(rank=4)), FAST) as whole:
        whole.load(str(tmp_path))
        without = both(whole)
    for a, b, c in zip(first, second, without, strict=True):
        assert np.array_equal(a, b)
        assert np.array_equal(a, c)


def test_an_update_is_with_dropout_and_continues_bit_exactly(tiny_vlm: Path, tmp_path: Path) -> None:
    items, exported = mixed_items(tiny_vlm), dict[str, dict[str, torch.Tensor]]()
    for name, settings in (("whole", FsdpSettings(lora=LoraSettings(rank=4))), ("forgetful", FORGETFUL)):
        with engine(tiny_vlm, settings, FAST) as trainer:
            trainer.train([items])
            if name == "forgetful":
                trainer.save(str(tmp_path))
            trainer.train([items])
            exported[name] = trainer.export(VERSION)
    with engine(tiny_vlm, FORGETFUL, FAST, seed=5) as trainer:
        trainer.load(str(tmp_path))
        trainer.train([items])
        resumed = trainer.export(VERSION)
    assert all(torch.equal(tensor, resumed[key]) for key, tensor in exported["forgetful"].items())
    assert any(not torch.equal(tensor, exported["whole"][key]) for key, tensor in exported["forgetful"].items())
