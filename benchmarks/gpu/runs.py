"""Whole runs on one GPU: policy and engine share it, weights are broadcast by gloo or go through
the object store.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu import models
from benchmarks.gpu.children import completed
from benchmarks.gpu.result import Found, Place, attempt
from benchmarks.measure import BenchFailed
from rayloop.run.folder import RunFolder

CONFIG = "recipes/arc_vision/quickstart.yaml"
RUN_TIMEOUT_S = 840.0
"""Seconds for one run."""
SHORT = [
    "steps=3",
    "evaluation.every=0",
    "evaluation.controls=false",
    "checkpoint.resume=never",
    "policy.optimizer.schedule=constant",
]
GPU = [
    "rollout.engine.kind=vllm",
    "rollout.engine.dtype=bfloat16",
    "policy.engine.dtype=bfloat16",
    "rollout.placement.num_gpus=0.4",
    "policy.placement.num_gpus=0.4",
    "policy.engine.gradient_checkpointing=true",
    "recovery.start_timeout=700",
]
CACHE = {
    "quickstart": "rollout.engine.extra.kv_cache_memory_bytes=8589934592",
    "3B": "rollout.engine.extra.kv_cache_memory_bytes=17179869184",
}
RANDOM = [
    "algorithm.groups_per_step=8",
    "algorithm.group_size=4",
    "reward.source={use: 'benchmarks.gpu.spread:spread'}",
]
"""For a model with random weights, whose answers all get the recipe's reward of 0: no group would
be left to train on.
"""
TINY = ["algorithm.groups_per_step=2", "algorithm.group_size=2", "weight_sync.logprob_check=stop"]


def whole(place: Place) -> Found:
    """The quickstart on one GPU: log-prob check, self-test and three steps; without a GPU, its
    engine and transport.
    """
    yield "quickstart", attempt(lambda: run(place, "quickstart", "collective", None))


def weight_update(place: Place) -> Found:
    """A model of 3B's shape through both transports: seconds of every weight update, which is all
    that differs.
    """
    folder = models.vlm(place)
    for kind in ("collective", "object_store"):
        yield kind, attempt(lambda k=kind: run(place, "3B", k, folder))  # type: ignore[misc]


def run(place: Place, name: str, kind: str, model: Path | None) -> dict[str, Any]:
    """Train for three steps, and return what the run folder has of it.

    Raises BenchFailed with the end of what it said.
    """
    import torch

    gpu = torch.cuda.is_available()
    own = [*GPU, CACHE[name], f"weight_sync.transport.kind={kind}"] if gpu else []
    own += [] if model is None else [f"model.path={model}", *RANDOM]
    with tempfile.TemporaryDirectory() as output:
        command = [
            sys.executable,
            "-m",
            "rayloop",
            "train",
            CONFIG,
            *SHORT,
            *own,
            *(TINY if place.tiny else []),
            f"output={output}",
            "name=probe",
        ]
        done = completed(
            command, RUN_TIMEOUT_S, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        found = recorded(RunFolder.at(Path(output) / "probe"))
    if done.returncode:
        raise BenchFailed(
            f"the run ended with {done.returncode} after {found}:\n{done.stdout[-3000:]}"
        )
    return {"gpu": gpu, "transport": kind if gpu else "object_store", **found}


def recorded(folder: RunFolder) -> dict[str, Any]:
    """Seconds of each part of the steps, and what the proofs at the start found."""
    events, steps = list(folder.events), list(folder.metrics)
    proofs = [
        {key: value for key, value in event.items() if key not in ("schema_version", "time")}
        for event in events
        if event["event"] in ("logprob_check", "self_test", "started")
    ]
    timings = sorted({name for step in steps for name in step if name.startswith("timing_s/")})
    return {
        "proofs": proofs,
        "steps": len(steps),
        "median_s": {
            name: round(median(step.get(name) or 0.0 for step in steps), 3) for name in timings
        },
    }
