"""Dropout of the adapters is part of an update alone: log-probs, the reference and what is
published are without.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rayloop.core.ledger import Ledger
from rayloop.core.protocols import TrainItem
from rayloop.core.types import Trajectory
from rayloop.engines.settings import FsdpSettings, LoraSettings, OptimizerSettings
from rayloop.engines.training.fsdp import FsdpEngine
from rayloop.grpo.alarms import DRIFT, UNSEEN_STEPS, Alarms
from rayloop.rollout.manager import RolloutManager
from rayloop.run.config import RunConfig
from rayloop.run.order import training_rows
from tests.engines.training import VERSION, engine, mixed_items
from tests.support.runs import settings

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


def test_an_update_is_with_dropout_and_continues_bit_exactly(
    tiny_vlm: Path, tmp_path: Path
) -> None:
    items, exported = mixed_items(tiny_vlm), dict[str, dict[str, torch.Tensor]]()
    for name, chosen in (
        ("whole", FsdpSettings(lora=LoraSettings(rank=4))),
        ("forgetful", FORGETFUL),
    ):
        with engine(tiny_vlm, chosen, FAST) as trainer:
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
    assert any(
        not torch.equal(tensor, exported["whole"][key])
        for key, tensor in exported["forgetful"].items()
    )


def alarms(folder: Path, dropout: float, heard: list[Any]) -> Alarms:
    config = RunConfig.model_validate(
        settings(folder, folder, policy__engine__lora={"dropout": dropout})
    )
    reporter: Any = SimpleNamespace(event=heard.append, bad_row=None)
    history: Any = SimpleNamespace(lost_episodes=None)
    return RolloutManager(
        config, Ledger(), training_rows(config, reporter), reporter, history
    ).alarms


def sampled(item: TrainItem, logprobs: np.ndarray) -> TrainItem:
    """The item as an engine samples it that computes exactly what the trainer does."""
    values, turns = iter(logprobs.tolist()), []
    for turn in item.trajectory.turns:
        own = tuple(next(values) for _ in turn.token_ids) if turn.sampled else turn.logprobs
        turns.append(dataclasses.replace(turn, logprobs=own))
    played: Trajectory = dataclasses.replace(item.trajectory, turns=tuple(turns))
    return dataclasses.replace(item, trajectory=played, lag=0)


def test_dropout_is_no_weight_sync_that_was_lost(tiny_vlm: Path, tmp_path: Path) -> None:
    items, heard = mixed_items(tiny_vlm), list[Any]()
    watch = alarms(tmp_path, 0.5, heard)
    with engine(tiny_vlm, FORGETFUL, FAST) as trainer:
        trainer.train([items])
        for step in range(1, UNSEEN_STEPS + 1):
            scored = trainer.logprobs([item.trajectory for item in items])
            report = trainer.train([[sampled(*one) for one in zip(items, scored, strict=True)]])
            watch.step(report)
            assert heard == []
            assert watch.unseen == (step == UNSEEN_STEPS), (
                "fresh episodes are compared, whose log-probs are without"
            )
    assert report[DRIFT] > 1e-3
    for _ in range(3):
        watch.compared(0.5)
    assert len(heard) == 1


@pytest.mark.parametrize(("dropout", "unseen"), [(0.0, False), (0.1, True)])
def test_without_dropout_the_trained_samples_are_compared(
    tmp_path: Path, dropout: float, unseen: bool
) -> None:
    watch = alarms(tmp_path, dropout, [])
    for _ in range(UNSEEN_STEPS):
        watch.step({DRIFT: 0.0})
    assert watch.unseen == unseen
