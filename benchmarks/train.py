"""``bench train``: tokens per second of the trainer on a text model, as a share of what this machine's matrix products reach.

One rank in this process, no Ray. The ceiling is a product of square matrices in the same type with the same threads, measured
between the updates. Model FLOPs are 6 per token and parameter that is multiplied with it (the head's: per sampled token), and
6 T^2 per layer and attention width for causal attention over T tokens (Kaplan et al. 2020; Chowdhery et al. 2022, appendix B).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, get_args

from benchmarks.measure import machine
from rayloop.core.protocols import TrainItem
from rayloop.core.types import EndReason, Sampling, Trajectory, TrajectoryId, Turn, Version
from rayloop.engines.settings import Dtype, FsdpSettings, ModelSettings, OptimizerSettings
from rayloop.grpo.settings import LossSettings

SIDE = 2048
"""Of the square matrices on CPU; GPUs need larger ones to reach their ceiling."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="folder of a text model")
    parser.add_argument("--sequences", type=int, default=64, help="of an update, all with prompts of their own")
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--answer", type=int, default=192, help="sampled tokens")
    parser.add_argument("--rounds", type=int, default=5, help="updates; another one before them warms up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=get_args(Dtype), default="float32")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.set_defaults(run=_train)


def _train(arguments: argparse.Namespace) -> int:
    import torch

    from rayloop.engines.training.fsdp import FsdpEngine

    settings = FsdpSettings(
        dtype=arguments.dtype, threads=arguments.threads, gradient_checkpointing=arguments.gradient_checkpointing
    )
    model, address = ModelSettings(path=str(arguments.model)), f"file://{tempfile.mkdtemp()}/group"
    trainer = FsdpEngine(
        model, settings, OptimizerSettings(lr=1e-5), LossSettings(), rank=0, world_size=1, init_method=address, seed=0
    )
    batch = _items(arguments)
    seconds, ceilings = [], []
    for number in range(arguments.rounds + 1):
        ceilings.append(_ceiling(arguments.dtype))
        began = time.perf_counter()
        trainer.train([batch])
        seconds.append(time.perf_counter() - began)
        print(
            f"update {number}: {seconds[-1]:.3f} s, matrix products {ceilings[-1] / 1e9:.1f} GFLOP/s", file=sys.stderr
        )
    trainer.close()
    flops, tokens, update = (
        _flops(arguments),
        arguments.sequences * (arguments.prompt + arguments.answer),
        median(seconds[1:]),
    )
    gpu = torch.cuda.is_available()
    print(json.dumps({
        **{name: value for name, value in vars(arguments).items() if name not in ("command", "model", "run")},
        "model": str(arguments.model),
        "update_s": round(update, 4),
        "tokens_per_s": round(tokens / update, 1),
        "gflops": round(flops / update / 1e9, 2),
        "ceiling_gflops": round(median(ceilings[1:]) / 1e9, 2),
        "mfu": round(flops / update / median(ceilings[1:]), 3),
        "peak_gpu_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if gpu else None,
        "device": torch.cuda.get_device_name() if gpu else "cpu",
        "torch": torch.__version__,
        "machine": machine(),
    }))  # fmt: skip
    return 0


def _config(arguments: argparse.Namespace) -> dict[str, Any]:
    return json.loads((arguments.model / "config.json").read_text())


def _items(arguments: argparse.Namespace) -> list[TrainItem]:
    """Random tokens; every answer has an advantage."""
    import numpy as np

    rng, vocabulary = np.random.default_rng(0), _config(arguments)["vocab_size"]
    made = []
    for number in range(arguments.sequences):
        prompt, answer = (tuple(rng.integers(64, vocabulary, n).tolist()) for n in (arguments.prompt, arguments.answer))
        behaviour = tuple(rng.normal(-6, 0.5, arguments.answer).tolist())
        turns = (Turn("user", prompt, ()), Turn("assistant", answer, (), behaviour, Version(0, 0)))
        id = TrajectoryId(number, 0)
        trajectory = Trajectory(id, 0, f"task-{number}", number, turns, Sampling(), EndReason.DONE)
        made.append(TrainItem(trajectory, float(rng.choice([-1, 1]))))
    return made


def _flops(arguments: argparse.Namespace) -> float:
    """Of one update: forward and backward."""
    c = _config(arguments)
    hidden, layers, heads = c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"]
    width = heads * c.get("head_dim", hidden // heads)
    cache = c["num_key_value_heads"] * (width // heads)
    layer = hidden * (2 * width + 2 * cache) + 3 * hidden * c["intermediate_size"]
    length = arguments.prompt + arguments.answer
    per_sequence = (
        6 * (layers * layer * length + hidden * c["vocab_size"] * arguments.answer) + 6 * length**2 * width * layers
    )
    return float(arguments.sequences * per_sequence)


def _ceiling(dtype: str) -> float:
    """FLOP/s of square matrix products, the best of three."""
    import torch

    from rayloop.transports.manifest import DTYPES

    device = "cuda" if torch.cuda.is_available() else "cpu"
    side = 4 * SIDE if device == "cuda" else SIDE
    a, b = (torch.randn(side, side, device=device, dtype=DTYPES[dtype]) for _ in range(2))
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    best = 0.0
    for _ in range(3):
        wait()
        began = time.perf_counter()
        a @ b
        wait()
        best = max(best, 2 * side**3 / (time.perf_counter() - began))
    return best
