"""The masked pictures of PAPO in the trainer: what is masked, what is compared, and what it moves."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rayloop.core.protocols import TrainItem
from rayloop.core.types import Trajectory, derive
from rayloop.data.images import MASKED_SIDE_PIXELS, decode, masked, png
from rayloop.engines.settings import OptimizerSettings
from rayloop.grpo.losses.settings import PpoLoss
from tests.engines.training import Sgd, engine, trajectory

SEED = 5
PERCEPTION = {"coef": 0.02, "entropy": 0.0}


def test_squares_of_a_picture_are_black_at_random() -> None:
    picture = Image.fromarray(np.full((500, 711, 3), 200, np.uint8))
    pixels = np.array(masked(picture, 0))
    black = (pixels == 0).all(2)
    assert set(np.unique(pixels)) == {0, 200}
    assert 0.55 < black.mean() < 0.65
    of_squares = black[::MASKED_SIDE_PIXELS, ::MASKED_SIDE_PIXELS]
    side = np.ones((MASKED_SIDE_PIXELS, MASKED_SIDE_PIXELS), bool)
    assert (np.kron(of_squares, side)[:500, :711] == black).all()
    assert (np.array(masked(picture, 0)) == pixels).all()
    assert (np.array(masked(picture, 1)) != pixels).any()


def with_masked_pictures(played: Trajectory) -> Trajectory:
    """What the trainer compares with, as a trajectory with other files."""
    turns, files = [], {}
    for turn in played.turns:
        refs = []
        for ref in turn.images:
            seed = derive(SEED, "mask", played.id.group, ref.sha256)
            data = png(masked(decode(played.image_bytes[ref.sha256]), seed))
            other = dataclasses.replace(ref, sha256=hashlib.sha256(data).hexdigest())
            files[other.sha256] = data
            refs.append(other)
        turns.append(dataclasses.replace(turn, images=tuple(refs)))
    return dataclasses.replace(played, turns=tuple(turns), image_bytes=files)


@pytest.mark.parametrize("updates", [1, 2])
def test_the_kl_is_to_the_policy_that_sees_masked_pictures(tiny_vlm: Path, updates: int) -> None:
    shapes = [
        [(3, (2, 2), 4), (2, (3, 1), 5)],
        [(5, None, 3)],
        # The first turn has seen no picture yet.
        [(6, None, 4), (2, (4, 2), 3)],
    ]
    played = [trajectory(tiny_vlm, n, turns) for n, turns in enumerate(shapes)]
    items = [TrainItem(one, 0.0) for one in played]
    loss = PpoLoss(perception=PERCEPTION)
    with engine(tiny_vlm, optimizer=Sgd(lr=1e-9), loss=loss, seed=SEED) as trainer:
        whole = trainer.logprobs(played)
        compared = trainer.logprobs([with_masked_pictures(one) for one in played])
        expected = []
        for number, (c, m) in enumerate(zip(whole, compared, strict=True)):
            divergence = np.minimum(np.exp(m - c) - (m - c) - 1, 10)
            expected += [0.0] * 3 if number == 1 else divergence.tolist()
        assert expected[-7:-3] == pytest.approx([0.0] * 4, abs=1e-6)
        assert max(expected) > 1e-3
        report = trainer.train([items] * updates)
    assert report["actor/perception_kl"] == pytest.approx(np.mean(expected), rel=1e-3)
    assert report["actor/computed_tokens"] == updates * len(expected), "also with advantages of 0"


def test_the_update_moves_the_policy_away_from_the_masked_one(tiny_vlm: Path) -> None:
    items = [TrainItem(trajectory(tiny_vlm, n, [(3, (3, 2), 6)]), 0.0) for n in range(4)]
    settings = OptimizerSettings(lr=1e-3)

    def divergences(coef: float, entropy: float) -> tuple[list[float], list[float]]:
        loss = PpoLoss(perception={"coef": coef, "entropy": entropy})
        with engine(tiny_vlm, optimizer=settings, loss=loss, seed=SEED) as trainer:
            reports = [trainer.train([items]) for _ in range(6)]
        return (
            [report["actor/perception_kl"] for report in reports],
            [report["actor/entropy"] for report in reports],
        )

    kl, _ = divergences(0.02, 0.0)
    assert kl[-1] > 2 * kl[0]
    _, entropy = divergences(1e-6, 0.03)
    assert entropy[-1] < entropy[0]
