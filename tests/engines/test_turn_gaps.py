"""The engine's log-probs against the trainer's, by turn of what was trained: what an update
computes anyhow.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from rayloop.core.protocols import TrainItem
from rayloop.core.types import Trajectory, Turn
from rayloop.engines.settings import FsdpSettings, LoraSettings, OptimizerSettings
from rayloop.grpo.losses.settings import PpoLoss
from tests.engines.training import engine, mixed_items


def moved(played: Trajectory, ours: np.ndarray, by: dict[int, float]) -> Trajectory:
    """As an engine would have sampled it whose log-probs in turn k differ by ``by[k]``, at its
    first token three times as much.
    """
    known, turns, number = iter(ours.tolist()), list[Turn](), 0
    for turn in played.turns:
        if turn.sampled:
            logprobs = [
                next(known) + by.get(number, 0.0) * (3.0 if first == 0 else 1.0)
                for first, _ in enumerate(turn.token_ids)
            ]
            turn, number = dataclasses.replace(turn, logprobs=tuple(logprobs)), number + 1
        turns.append(turn)
    return dataclasses.replace(played, turns=tuple(turns))


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("micro", [1, 4096])
def test_the_gap_of_each_turn_is_that_before_the_first_update(
    tiny_vlm: Path, rounds: int, micro: int
) -> None:
    items = [dataclasses.replace(item, ref_logprobs=None) for item in mixed_items(tiny_vlm)]
    by = {0: 0.25, 2: -0.5}
    settings = FsdpSettings(micro_batch_tokens=micro, lora=LoraSettings(rank=2))
    with engine(tiny_vlm, settings, OptimizerSettings(lr=1e-1), PpoLoss()) as trainer:
        ours = trainer.logprobs([item.trajectory for item in items])
        items = [
            dataclasses.replace(i, trajectory=moved(i.trajectory, own, by))
            for i, own in zip(items, ours, strict=True)
        ]
        trainer.train([items] * rounds)
        first = trainer.gaps
        trainer.train([items])
        later = trainer.gaps
    silent = [item for item in items if item.advantage == 0]
    assert len(silent) == 1
    for item in items:
        found, turns = first[item.trajectory.id], item.trajectory.sampled_turns
        assert len(found) == len(turns)
        if item in silent:
            assert set(found) == {None}, "nothing was computed for it"
            continue
        for number, (gap, turn) in enumerate(zip(found, turns, strict=True)):
            shift, tokens = abs(by.get(number, 0.0)), len(turn.token_ids)
            assert gap == pytest.approx((shift * (tokens + 2) / tokens, 3 * shift), abs=1e-4)
    assert any(later[i.trajectory.id][0][1] > 0.76 for i in items if i.advantage), (
        "the weights have moved"
    )  # type: ignore[index]


def test_a_trajectory_of_several_contexts_has_its_turns_in_order(tiny_vlm: Path) -> None:
    item = mixed_items(tiny_vlm)[3]
    anew = dataclasses.replace(item.trajectory.turns[0], restart=True)
    played = dataclasses.replace(
        item.trajectory, turns=(*item.trajectory.turns[:2], anew, *item.trajectory.turns[2:])
    )
    with engine(tiny_vlm) as trainer:
        (ours,) = trainer.logprobs([played])
        trainer.train([[TrainItem(moved(played, ours, {0: 0.5, 1: 0.125}), 1.0)]])
        (found,) = trainer.gaps.values()
    assert [gap and gap[1] for gap in found] == pytest.approx([1.5, 0.375, 0.0], abs=1e-4)
