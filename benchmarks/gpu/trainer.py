"""The trainer on a vision model of 3B's shape: memory, speed, waits for the device, packing, and
weight updates.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.gpu import models
from benchmarks.gpu.result import Found, Place, attempt
from benchmarks.train import MATRIX_SIDE, ceiling, flops
from rayloop.core.protocols import TrainItem
from rayloop.core.types import Version
from rayloop.engines.settings import FsdpSettings, ModelSettings, OptimizerSettings
from rayloop.grpo.losses.settings import PpoLoss

if TYPE_CHECKING:
    from rayloop.engines.training.fsdp import FsdpEngine

DTYPE = "bfloat16"
MEASURED_UPDATES = 3
"""Updates of which the median counts; another one before them warms up."""
WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "aten::nonzero",
    "aten::_local_scalar_dense",
    "aten::_unique2",
)
"""Calls that wait for the device, or make the host wait for it."""


def probe(place: Place) -> Found:
    """16 x 8 samples with two images each; micro-batches of several lengths, with and without
    checkpointed activations.
    """
    import torch

    folder = models.vlm(place)
    items = (
        models.batch(folder, 2, 2, 12, 8, 2)
        if place.tiny
        else models.batch(folder, 16, 8, 512, 512, 16)
    )
    side = (
        256 if place.tiny else MATRIX_SIDE
    )  # a CPU without bfloat16 needs 20 s for one product of 2,048 rows
    most = ceiling(DTYPE, side)
    yield "ceiling_tflops", most / 1e12
    for tokens in (64,) if place.tiny else (4096, 8192, 16_384):
        for checkpointing in (False, True):
            name = (
                f"update, micro-batches of {tokens} tokens, checkpointing"
                f" {'on' if checkpointing else 'off'}"
            )
            update = partial(_update, folder, items, most, tokens, checkpointing)
            yield name, attempt(update)
    if torch.cuda.is_available():  # on a CPU it does not train
        os.environ["RAYLOOP_ATTENTION"] = "flex"
        name = "update with FlexAttention, micro-batches of 16384 tokens, checkpointing on"
        yield name, attempt(lambda: _update(folder, items, most, 16_384, True))
        del os.environ["RAYLOOP_ATTENTION"]
    group = items[: 2 if place.tiny else 8]
    yield "waits in an update of one micro-batch", attempt(lambda: _waits(folder, group))
    yield "packed and shared against one by one", attempt(lambda: _packing(folder, group))
    yield (
        "what a weight update and a checkpoint need",
        attempt(lambda: _weight_update(folder, group)),
    )


@contextmanager
def _trainer(folder: Path, tokens: int, checkpointing: bool = True) -> Iterator[FsdpEngine]:
    """One rank in this process, which gives all memory back."""
    import torch

    from rayloop.engines.training.fsdp import FsdpEngine

    settings = FsdpSettings(
        dtype=DTYPE, micro_batch_tokens=tokens, gradient_checkpointing=checkpointing
    )
    engine = FsdpEngine(
        ModelSettings(path=str(folder)),
        settings,
        OptimizerSettings(lr=1e-6),
        PpoLoss(),
        rank=0,
        world_size=1,
        init_method=f"file://{tempfile.mkdtemp()}/group",
        seed=0,
    )
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        yield engine
    finally:
        engine.close()
        del engine
        gc.collect()
        torch.cuda.empty_cache()


def _update(
    folder: Path, items: list[TrainItem], most: float, tokens: int, checkpointing: bool
) -> dict[str, Any]:
    """Seconds of an update, tokens per second (each sequence in full), share of ``most`` FLOP/s,
    peak memory.
    """
    with _trainer(folder, tokens, checkpointing) as trainer:
        seconds = [_timed(lambda: trainer.train([items])) for _ in range(MEASURED_UPDATES + 1)]
        update = median(seconds[1:])
        return {
            "seconds": [round(one, 3) for one in seconds],
            "tokens_per_s": round(
                sum(len(item.trajectory.flatten().token_ids) for item in items) / update, 1
            ),
            "mfu": round(_flops(folder, items) / update / most, 4),
            "peak_gib": _peak(),
        }


def _flops(folder: Path, items: list[TrainItem]) -> float:
    """Of the language model (``benchmarks.train.flops``), and of the tower 6 per patch and
    parameter of its layers; not its attention.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tower, found = config["vision_config"], 0.0
    layer = 4 * tower["hidden_size"] ** 2 + 3 * tower["hidden_size"] * tower["intermediate_size"]
    for item in items:
        turns = item.trajectory.turns
        found += flops(config["text_config"], 1, len(turns[0].token_ids), len(turns[1].token_ids))
        patches = sum(ref.grid[1] * ref.grid[2] for turn in turns for ref in turn.images)
        found += 6 * tower["depth"] * layer * patches
    return found


def _waits(folder: Path, items: list[TrainItem]) -> dict[str, int]:
    """Calls of each of ``WAITS`` in one update whose samples fit a single micro-batch."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [
        ProfilerActivity.CPU,
        *([ProfilerActivity.CUDA] if torch.cuda.is_available() else []),
    ]
    with _trainer(folder, 1 << 20) as trainer:
        trainer.train([items])
        with profile(activities=activities) as profiler:
            trainer.train([items])
    return {one.key: one.count for one in profiler.key_averages() if one.key in WAITS}


def _packing(folder: Path, items: list[TrainItem]) -> dict[str, Any]:
    """Loss, norm of the gradient and log-probs of the same group in one row with a shared prompt,
    and sample by sample.
    """
    import numpy as np

    found: dict[str, Any] = {}
    logprobs = {}
    for name, tokens in (("packed", 1 << 20), ("one by one", 1)):
        with _trainer(folder, tokens) as trainer:
            logprobs[name] = np.concatenate(trainer.logprobs([item.trajectory for item in items]))
            report = trainer.train([items])
            found[name] = {"loss": report["actor/loss"], "grad_norm": report["actor/grad_norm"]}
    gap = np.abs(logprobs["packed"] - logprobs["one by one"])
    return {**found, "logprob_gap_mean": float(gap.mean()), "logprob_gap_max": float(gap.max())}


def _weight_update(folder: Path, items: list[TrainItem]) -> dict[str, Any]:
    """Seconds of perturbing and restoring each part, of an export, of saving and of loading;
    whether what was restored is equal.
    """
    found: dict[str, Any] = {}
    with _trainer(folder, 16_384) as trainer, tempfile.TemporaryDirectory() as saved:
        trainer.train([items])  # the optimizer has moments now
        before = trainer.export(Version(0, 0))
        for group in trainer.parameter_groups():
            found[f"perturb {group}"] = round(_timed(lambda g=group: trainer.perturb(g)), 3)  # type: ignore[misc]
            found[f"restore {group}"] = round(_timed(trainer.restore_parameters), 3)
        found["export"] = round(_timed(lambda: trainer.export(Version(0, 1))), 3)
        after = trainer.export(Version(0, 1))
        found["restored_equal"] = all(
            bool((after[name] == tensor).all()) for name, tensor in before.items()
        )
        found["exported_gb"] = round(sum(tensor.nbytes for tensor in before.values()) / 1e9, 3)
        found["save"] = round(_timed(lambda: trainer.save(saved)), 3)
        found["load"] = round(_timed(lambda: trainer.load(saved)), 3)
        found["saved_gb"] = round(
            sum(file.stat().st_size for file in Path(saved).rglob("*") if file.is_file()) / 1e9, 3
        )
    return found


def _timed(work: Callable[[], Any]) -> float:
    """Seconds, the device's included."""
    import torch

    wait = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began


def _peak() -> float | None:
    import torch

    return (
        round(torch.cuda.max_memory_allocated() / 2**30, 2) if torch.cuda.is_available() else None
    )
