"""What the trainer's tests share: trajectories with images, engines, and ranks in processes of
their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch

from rayloop.core.failures import ConfigError
from rayloop.core.protocols import TrainItem
from rayloop.core.types import (
    EndReason,
    ImageRef,
    Sampling,
    Trajectory,
    TrajectoryId,
    Turn,
    Version,
)
from rayloop.engines.settings import FsdpSettings, ModelSettings, OptimizerSettings
from rayloop.engines.training.fsdp import FsdpEngine
from rayloop.grpo.losses.settings import LossSettings, PpoLoss
from tests.engines.prompts import image
from tests.support.warm import forks


class Sgd(OptimizerSettings):
    """Keeps no state: a step is the gradient times ``lr``."""

    kind: ClassVar[Literal["adamw", "sgd"]] = "sgd"


SMALL = {
    "hidden": 64,
    "heads": 2,
    "intermediate": 128,
    "layers": 2,
    "vision_hidden": 64,
    "vision_heads": 2,
    "vision_depth": 2,
    "vision_intermediate": 96,
}
TEXT_TOKENS = range(64, 320)
SIDE = 28
"""Pixels of one image token's side."""
VERSION = Version(0, 0)


def trajectory(
    folder: Path,
    number: int,
    turns: Sequence[tuple[int, tuple[int, int] | None, int]],
    sampling: Sampling | None = None,
) -> Trajectory:
    """``turns``: (context tokens, columns and rows of an image in tokens, or None, sampled tokens).

    The rollout log-probs are near an untrained model's.
    """
    rng = np.random.default_rng(number)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    made: list[Turn] = []
    images: dict[str, bytes] = {}
    for index, (context, size, sampled) in enumerate(turns):
        ids = rng.choice(TEXT_TOKENS, context).tolist()
        refs: tuple[ImageRef, ...] = ()
        if size is not None:
            shown = image(size[0] * SIDE, size[1] * SIDE, seed=100 * number + index)
            refs, images[shown.ref.sha256] = (shown.ref,), shown.data or b""
            pads = [config["image_token_id"]] * shown.ref.tokens
            ids += [config["vision_start_token_id"], *pads, config["vision_end_token_id"]]
        made.append(Turn("user", tuple(ids), refs))
        tokens = tuple(rng.choice(TEXT_TOKENS, sampled).tolist())
        made.append(
            Turn("assistant", tokens, (), tuple(rng.normal(-6, 0.5, sampled).tolist()), VERSION)
        )
    return Trajectory(
        TrajectoryId(number, 0),
        0,
        f"task-{number}",
        number,
        tuple(made),
        sampling or Sampling(),
        EndReason.DONE,
        image_bytes=images,
    )


def mixed_items(folder: Path) -> list[TrainItem]:
    """Text-only and image samples of unequal lengths, with reference log-probs; one advantage is 0.

    Three of them have the same prompt and begin differently after it.
    """
    shapes: list[list[tuple[int, tuple[int, int] | None, int]]] = [
        [(5, None, 3)],
        [(4, (2, 3), 7)],
        [(20, None, 11)],
        [(3, (2, 2), 4), (2, (3, 1), 5), (6, None, 2)],
        [(9, None, 6)],
        [(2, (4, 2), 3)],
    ]
    advantages = (1.3, -0.7, 0.4, -1.1, 0.0, 0.9)
    items = []
    played_once = [
        trajectory(folder, n, turns, Sampling(temperature=0.9)) for n, turns in enumerate(shapes)
    ]
    root = played_once[3]
    others = [
        dataclasses.replace(
            root, id=TrajectoryId(3, 1 + i), turns=(*root.turns[:1], *other.turns[1:])
        )
        for i, other in enumerate((played_once[0], played_once[4]))
    ]
    every = zip([*played_once, *others], (*advantages, 0.8, -0.5), strict=True)
    for number, (played, advantage) in enumerate(every):
        rollout_logprobs = played.flatten().rollout_logprobs[played.flatten().loss_mask]
        items.append(TrainItem(played, advantage, rollout_logprobs - 0.1, lag=number % 2))
    return items


@contextlib.contextmanager
def engine(
    model: Path | ModelSettings,
    settings: FsdpSettings | None = None,
    optimizer: OptimizerSettings | None = None,
    loss: LossSettings | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    meeting: Path | None = None,
    seed: int = 0,
) -> Iterator[FsdpEngine]:
    """An engine that leaves its process group at the end.

    Several ranks meet at the file ``meeting``, which none made.

    A file, since a port that is free when the ranks get it may be taken when they meet.
    """
    made = FsdpEngine(
        model if isinstance(model, ModelSettings) else ModelSettings(path=str(model)),
        settings or FsdpSettings(),
        optimizer or OptimizerSettings(lr=1e-2),
        loss or PpoLoss(),
        rank=rank,
        world_size=world_size,
        init_method=torch.distributed.HashStore() if meeting is None else meeting.as_uri(),
        seed=seed,
    )
    try:
        yield made
    finally:
        made.close()


def refused(rank: int, world_size: int, folder: Path, **changes: Any) -> str:
    """Why an engine with these settings does not start."""
    meeting = folder / "meeting"
    with (
        pytest.raises(ConfigError) as error,
        engine(folder, FsdpSettings(**changes), rank=rank, world_size=world_size, meeting=meeting),
    ):
        pass
    return str(error.value)


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """``function(rank, world_size, *arguments)`` in a process per rank; returns what each of them
    returned.
    """
    start_method = forks().get_start_method()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            _rank,
            (function, world_size, folder, arguments),
            nprocs=world_size,
            start_method=start_method,
        )
        return [
            torch.load(Path(folder) / f"{rank}.pt", weights_only=False)
            for rank in range(world_size)
        ]


def _rank(
    rank: int,
    function: Callable[..., Any],
    world_size: int,
    folder: str,
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    torch.save(function(rank, world_size, *arguments), Path(folder) / f"{rank}.pt")
    os._exit(
        0
    )  # gloo's threads now and then abort a process that leaves through the interpreter's end
