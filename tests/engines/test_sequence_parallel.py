"""Ranks that share packed rows train as one rank does."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rayloop.core.protocols import TrainItem
from rayloop.engines.settings import FsdpSettings
from rayloop.engines.tiny_vlm import write_tiny_vlm
from rayloop.grpo.losses.settings import GspoLoss, LossSettings, PpoLoss
from tests.engines.training import VERSION, Sgd, engine, mixed_items, refused, run_ranks, trajectory

pytestmark = pytest.mark.gpu_fake

TOLERANCE = 1e-6
TEXTS = [f"What is {i} + {3 * i}?" for i in range(50)]
WIDE = {
    "hidden": 64,
    "heads": 4,
    "kv_heads": 4,
    "intermediate": 128,
    "layers": 2,
    "vision_hidden": 64,
    "vision_heads": 2,
    "vision_depth": 2,
    "vision_intermediate": 96,
}
LOSSES: dict[str, LossSettings] = {
    "terms": PpoLoss(kl_coef=0.05, entropy_coef=0.01),
    "sequences": GspoLoss(),
    "entropy": PpoLoss(entropy_coef=0.02, aggregation="seq-mean-token-mean"),
}


def items_of(folder: Path) -> list[TrainItem]:
    """Among them one of three images, of which the second lies across the middle of the row."""
    long = trajectory(folder, 9, [(8, (2, 2), 6), (3, (6, 4), 5), (4, (2, 3), 9)])
    rollout_logprobs = long.flatten().rollout_logprobs[long.flatten().loss_mask]
    return [TrainItem(long, 0.6, rollout_logprobs - 0.1), *mixed_items(folder)]


def trained(
    rank: int, world_size: int, folder: Path, together: int, name: str
) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Losses, norms and tokens of two updates, and the weights after them, for rows of all
    trajectories and of a few.
    """
    found = []
    for micro_batch in (4096, 30):
        settings = FsdpSettings(sequence_parallel=together, micro_batch_tokens=micro_batch)
        share = items_of(folder)[rank // together :: world_size // together]
        meeting = folder / f"meeting-{micro_batch}" if world_size > 1 else None
        with engine(
            folder,
            settings,
            Sgd(lr=0.1),
            LOSSES[name],
            rank=rank,
            world_size=world_size,
            meeting=meeting,
        ) as trainer:
            reports = [trainer.train([share]) for _ in range(2)]
            names = [f"actor/{n}" for n in ("loss", "grad_norm", "tokens", "sequences", "entropy")]
            rows = torch.tensor(
                [[report[n] for n in names] for report in reports], dtype=torch.float64
            )
            found.append((rows, trainer.export(VERSION)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "together", "name"), [(2, 2, "terms"), (4, 2, "sequences"), (4, 4, "entropy")]
)
def test_ranks_that_share_rows_train_as_one(
    tmp_path: Path, world_size: int, together: int, name: str
) -> None:
    folder = write_tiny_vlm(tmp_path, TEXTS, **WIDE)
    reports, weights = trained(0, 1, folder, 1, name)[0]
    for found, own in run_ranks(trained, world_size, folder, together, name)[0]:
        assert torch.allclose(found, reports, rtol=TOLERANCE, atol=0), (found, reports)
        for key, weight in weights.items():
            assert (own[key] - weight).norm() <= TOLERANCE * weight.norm(), key


def test_an_image_lies_across_the_border(tiny_vlm: Path) -> None:
    long = items_of(tiny_vlm)[0].trajectory.flatten().token_ids
    middle = len(long) // 2
    assert (long[middle - 1 : middle + 1] == long[12]).all(), (
        "both sides of the border are image tokens"
    )


def _scored(rank: int, world_size: int, folder: Path) -> list[Tensor]:
    with engine(
        folder,
        FsdpSettings(sequence_parallel=2),
        rank=rank,
        world_size=world_size,
        meeting=folder / "meeting",
    ) as trainer:
        played = [item.trajectory for item in items_of(folder)]
        return [
            torch.from_numpy(found) for found in (*trainer.logprobs(played), *trainer.logprobs([]))
        ]


@pytest.mark.slow
def test_each_rank_has_all_log_probs(tmp_path: Path) -> None:
    folder = write_tiny_vlm(tmp_path, TEXTS, **WIDE)
    with engine(folder) as trainer:
        alone = trainer.logprobs([item.trajectory for item in items_of(folder)])
    for rank in run_ranks(_scored, 2, folder):
        assert all(
            torch.allclose(a, torch.from_numpy(b), rtol=0, atol=1e-6)
            for a, b in zip(rank, alone, strict=True)
        )


@pytest.mark.slow
def test_heads_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_vlm(tmp_path, TEXTS, **{**WIDE, "kv_heads": 1})
    for message in run_ranks(partial(refused, sequence_parallel=2), 2, folder):
        assert message.startswith(
            "policy.engine.sequence_parallel: 2 does not divide the model's key-value heads (1)"
        )
