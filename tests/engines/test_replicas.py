"""Copies of a sharded model (HSDP) train as one rank does."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rayloop.core.failures import DataFailure
from rayloop.core.protocols import TrainItem
from rayloop.core.types import ImageRef
from rayloop.engines.settings import FsdpSettings, LoraSettings
from rayloop.engines.tiny_vlm import write_tiny_vlm
from tests.engines.training import (
    SMALL,
    VERSION,
    Sgd,
    engine,
    mixed_items,
    refused,
    run_ranks,
    trajectory,
)

pytestmark = pytest.mark.gpu_fake

TEXTS = [f"What is {i} + {3 * i}?" for i in range(50)]
NAMES = [f"actor/{name}" for name in ("loss", "grad_norm", "tokens", "sequences")]
TOLERANCE = 1e-6


def with_lost_image(item: TrainItem) -> TrainItem:
    """The same with another image's name, of which there are no bytes."""
    first, *others = item.trajectory.turns
    lost = tuple(
        ImageRef("0" * 64, ref.width, ref.height, ref.grid, ref.tokens) for ref in first.images
    )
    turns = (dataclasses.replace(first, images=lost), *others)
    return dataclasses.replace(
        item, trajectory=dataclasses.replace(item.trajectory, turns=turns, image_bytes={})
    )


def trained(
    rank: int, world_size: int, folder: Path, replicas: int, lora: LoraSettings | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses and norms of two updates of several micro-batches, one that fails midway between them,
    and the weights at the end.
    """
    settings = FsdpSettings(replicas=replicas, micro_batch_tokens=30, lora=lora)
    items = mixed_items(folder)
    broken = with_lost_image(TrainItem(trajectory(folder, 40, [(4, (2, 3), 9)]), 1.0))
    meeting = folder / f"meeting-{replicas}" if world_size > 1 else None
    with engine(
        folder, settings, Sgd(lr=0.1), rank=rank, world_size=world_size, meeting=meeting
    ) as trainer:
        share = [dataclasses.replace(item, ref_logprobs=None) for item in items[rank::world_size]]
        reports = [trainer.train([share])]
        with pytest.raises(DataFailure):
            trainer.train([[*share, broken]])
        trainer.perturb("language")
        trainer.restore_parameters()
        reports.append(trainer.train([share]))
        trainer.save(str(folder / f"saved-{replicas}"))
        rows = torch.tensor(
            [[report[name] for name in NAMES] for report in reports], dtype=torch.float64
        )
        return rows, trainer.export(VERSION)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4)])
def test_replicas_train_as_one_rank(tmp_path: Path, lora: LoraSettings | None) -> None:
    folder = write_tiny_vlm(tmp_path, TEXTS, **SMALL)
    reports, weights = trained(0, 1, folder, 1, lora)
    ranks = run_ranks(trained, 4, folder, 2, lora)
    for found, _ in ranks:
        assert torch.allclose(found, reports, rtol=TOLERANCE, atol=1e-7), (found, reports)
    for key, weight in weights.items():
        assert (ranks[0][1][key] - weight).norm() <= TOLERANCE * weight.norm(), key
    with engine(folder, FsdpSettings(lora=lora), Sgd()) as trainer:
        with pytest.raises(AssertionError):
            torch.testing.assert_close(trainer.export(VERSION), weights)
        trainer.load(str(folder / "saved-2"))
        torch.testing.assert_close(trainer.export(VERSION), weights, rtol=1e-5, atol=1e-6)


def noise(rank: int, world_size: int, folder: Path) -> bool:
    """Whether the replicas' weights are equal after a perturbation."""
    with engine(
        folder, FsdpSettings(replicas=2), rank=rank, world_size=world_size, meeting=folder / "met"
    ) as trainer:
        trainer.perturb("language")
        own = torch.cat([p.to_local().flatten() for p in trainer._model.parameters()])
        theirs = [torch.empty_like(own) for _ in range(world_size)]
        dist.all_gather(theirs, own)
        return torch.equal(theirs[0], theirs[1])


@pytest.mark.slow
def test_replicas_are_perturbed_alike(tmp_path: Path) -> None:
    """The self-test of the weight sync compares engines with one of them."""
    assert run_ranks(noise, 2, write_tiny_vlm(tmp_path, TEXTS, **SMALL)) == [True, True]


def summed(
    rank: int, world_size: int, folder: Path, operation: str, changes: dict[str, Any]
) -> list[int]:
    """How often gradients are summed by ``operation`` in an update of one micro-batch, and in one
    of several.
    """
    found = []
    for tokens in (4096, 30):
        settings, calls = FsdpSettings(micro_batch_tokens=tokens, **changes), list[int]()
        with (
            engine(
                folder,
                settings,
                Sgd(lr=0.1),
                rank=rank,
                world_size=world_size,
                meeting=folder / f"met-{tokens}",
            ) as trainer,
            pytest.MonkeyPatch.context() as patch,
        ):
            real = getattr(dist, operation)

            def counted(
                *arguments: Any, calls: list[int] = calls, real: Any = real, **options: Any
            ) -> Any:
                calls.append(
                    max(
                        one.numel()
                        for one in (*arguments, *options.values())
                        if isinstance(one, Tensor)
                    )
                )
                return real(*arguments, **options)

            patch.setattr(dist, operation, counted)
            trainer.train([mixed_items(folder)])
        found.append(sum(count > 50 for count in calls))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operation", "changes"),
    [
        ("all_reduce", {"replicas": 2}),
        ("reduce_scatter_single", {"lora": LoraSettings(rank=4)}),
    ],
)
def test_gradients_are_summed_once_in_an_update(
    tmp_path: Path, operation: str, changes: dict[str, Any]
) -> None:
    """Over replicas, whose sums cross the network; over all ranks, if they are an adapter's."""
    few, many = run_ranks(summed, 2, write_tiny_vlm(tmp_path, TEXTS, **SMALL), operation, changes)[
        0
    ]
    assert few == many > 0


@pytest.mark.slow
def test_ranks_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_vlm(tmp_path, TEXTS, **SMALL)
    for message in run_ranks(partial(refused, replicas=3), 2, folder):
        assert message == "policy.engine.replicas: 3 does not divide policy.ranks (2)"
