"""``bench train``: how long the trainer takes for an update, and, of a text model, at what share of
the speed of matrix products.

One rank in this process, no Ray. ``--config``: the first rows of a configuration with random
answers of full length, images included. Otherwise random tokens, of which ``--group`` sequences
share a prompt; the ceiling is a product of square matrices in the same type with the same threads,
measured between the updates. Model FLOPs are 6 per token and parameter that is multiplied with it
(the head's: per sampled token), and 6 T^2 per layer and attention width for causal attention over T
tokens (Kaplan et al. 2020; Chowdhery et al. 2022, appendix B); the prompt of a group counts once,
as it is computed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, get_args

from benchmarks.measure import machine
from rayloop.config.model import Dtype
from rayloop.core.protocols import TrainItem
from rayloop.core.types import (
    EndReason,
    ImageRef,
    Sampling,
    TokenIds,
    Trajectory,
    TrajectoryId,
    Turn,
    Version,
)
from rayloop.engines.settings import FsdpSettings, ModelSettings, OptimizerSettings
from rayloop.grpo.losses.settings import PpoLoss

MATRIX_SIDE = 2048
"""Of the square matrices on CPU; GPUs need larger ones to reach their ceiling."""
FIRST_TEXT_ID = 63
"""Lower token ids may be special ones."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", type=Path, metavar="DIR", help="folder of a text model")
    what.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="a run's configuration: its model and first rows",
    )
    parser.add_argument("--sequences", type=int, default=64, help="of an update")
    parser.add_argument("--group", type=int, default=1, help="of them with the same prompt")
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--answer", type=int, default=192, help="sampled tokens")
    parser.add_argument(
        "--rounds", type=int, default=5, help="updates; another one before them warms up"
    )
    parser.add_argument(
        "--threads", type=int, help="as policy.engine.threads; not given: all cores"
    )
    parser.add_argument(
        "--dtype", choices=get_args(Dtype), default="float32", help="that is computed in"
    )
    parser.add_argument(
        "--micro-batch-tokens", type=int, metavar="N", help="as policy.engine.micro_batch_tokens"
    )
    parser.add_argument(
        "--gradient-checkpointing",
        action="store_true",
        help="as policy.engine.gradient_checkpointing",
    )
    parser.add_argument(
        "--profile",
        type=int,
        metavar="ROWS",
        help="print the costliest operations of one more update",
    )
    parser.set_defaults(run=_train)


def _train(arguments: argparse.Namespace) -> int:
    from rayloop.engines.training.fsdp import FsdpEngine

    wanted = arguments.micro_batch_tokens
    settings = FsdpSettings(
        dtype=arguments.dtype,
        threads=arguments.threads,
        gradient_checkpointing=arguments.gradient_checkpointing,
        **({} if wanted is None else {"micro_batch_tokens": wanted}),
    )
    model, batch = _of_config(arguments) if arguments.config else _random(arguments)
    address = f"file://{tempfile.mkdtemp()}/group"
    trainer = FsdpEngine(
        model,
        settings,
        OptimizerSettings(lr=1e-5),
        PpoLoss(),
        rank=0,
        world_size=1,
        init_method=address,
        seed=0,
    )
    seconds, processor, ceilings = [], [], []
    for number in range(arguments.rounds + 1):
        ceilings.append(ceiling(arguments.dtype))
        began, spent = time.perf_counter(), time.process_time()
        trainer.train([batch])
        seconds.append(time.perf_counter() - began)
        processor.append(time.process_time() - spent)
        print(
            f"update {number}: {seconds[-1]:.3f} s, {processor[-1]:.3f} of CPU, matrix products"
            f" {ceilings[-1] / 1e9:.1f} GFLOP/s",
            file=sys.stderr,
        )
    if arguments.profile:
        _profile(lambda: trainer.train([batch]), arguments.profile)
    trainer.close()
    tokens = sum(len(item.trajectory.flatten().token_ids) for item in batch)
    update = median(seconds[1:])
    rate = _rate(arguments, update, median(ceilings[1:])) if arguments.model else {}
    result = {
        **_asked_for(arguments),
        "model": model.path,
        "update_s": significant(update),
        "update_cpu_s": significant(median(processor[1:])),
        "tokens_per_s": significant(tokens / update),
        **rate,
        **_machine_of_the_update(),
    }
    print(json.dumps(result))
    return 0


def _asked_for(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of the command, without its parts that are not numbers or names."""
    left_out = ("command", "model", "config", "run")
    return {name: value for name, value in vars(arguments).items() if name not in left_out}


def _machine_of_the_update() -> dict[str, Any]:
    """The device, the library and the machine that computed it, with the peak of GPU memory."""
    import torch

    gpu = torch.cuda.is_available()
    peak = round(torch.cuda.max_memory_allocated() / 2**30, 2) if gpu else None
    return {
        "torch_threads": torch.get_num_threads(),
        "peak_gpu_gib": peak,
        "device": torch.cuda.get_device_name() if gpu else "cpu",
        "torch": torch.__version__,
        "machine": machine(),
    }


def _rate(arguments: argparse.Namespace, update: float, most: float) -> dict[str, float]:
    operations = flops(
        _config(arguments), arguments.sequences, arguments.prompt, arguments.answer, arguments.group
    )
    return {
        "gflops": significant(operations / update / 1e9),
        "ceiling_gflops": significant(most / 1e9),
        "mfu": significant(operations / update / most),
    }


def significant(value: float) -> float:
    """Four significant digits.

    A fixed number of decimals leaves nothing of a small model's rate on a busy machine.
    """
    return float(f"{value:.4g}")


def _profile(update: Callable[[], Any], rows: int) -> None:
    """Milliseconds of each operation itself, and how often it ran, in one update; on stderr."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        update()
    found = sorted(profiler.key_averages(), key=lambda one: -one.self_cpu_time_total)
    print(
        f"{'ms':>9} {'calls':>7}  of {sum(one.self_cpu_time_total for one in found) / 1e3:.0f} ms",
        file=sys.stderr,
    )
    for one in found[:rows]:
        print(f"{one.self_cpu_time_total / 1e3:9.1f} {one.count:7}  {one.key}", file=sys.stderr)


def _of_config(arguments: argparse.Namespace) -> tuple[ModelSettings, list[TrainItem]]:
    """The model and a step of a configuration: its first rows, and a group of answers of full
    length to each.
    """
    from rayloop.chat.rendering import Renderer
    from rayloop.data.dataset import Dataset
    from rayloop.run.config import read

    config = read(arguments.config, [])
    renderer, data = Renderer(config.model), config.data
    rows = Dataset(data.train, data.reader.build(), False, lambda _: None)
    sampling, made = renderer.sampling(config.rollout.sampling.sampling()), []
    for number in range(config.algorithm.groups_per_step):
        prompt = renderer.prompt(rows[number].messages)
        images = tuple(image.ref for image in prompt.images)
        pages = {image.ref.sha256: image.data for image in prompt.images if image.data is not None}
        for member in range(config.algorithm.group_size):
            made.append(
                train_item(
                    (number, member), prompt.token_ids, sampling.max_tokens, sampling, images, pages
                )
            )
    return config.model, made


def _config(arguments: argparse.Namespace) -> dict[str, Any]:
    return json.loads((arguments.model / "config.json").read_text(encoding="utf-8"))


def _random(arguments: argparse.Namespace) -> tuple[ModelSettings, list[TrainItem]]:
    """The model, and random tokens."""
    import numpy as np

    rng, made = np.random.default_rng(0), []
    for number in range(arguments.sequences // arguments.group):
        prompt = tuple(
            rng.integers(64, _config(arguments)["vocab_size"], arguments.prompt).tolist()
        )
        made += [
            train_item((number, member), prompt, arguments.answer, Sampling())
            for member in range(arguments.group)
        ]
    return ModelSettings(path=str(arguments.model)), made


def train_item(
    number: tuple[int, int],
    prompt: TokenIds,
    answer: int,
    sampling: Sampling,
    images: tuple[ImageRef, ...] = (),
    pages: Mapping[str, bytes] | None = None,
) -> TrainItem:
    """A random answer of so many tokens to the prompt; every one has an advantage."""
    import numpy as np

    rng, text = (
        np.random.default_rng(number),
        [token for token in prompt if token > FIRST_TEXT_ID] or [FIRST_TEXT_ID],
    )
    sampled = tuple(rng.choice(text, answer).tolist())
    rollout_logprobs = tuple(rng.normal(-6, 0.5, answer).tolist())
    turns = (
        Turn("user", prompt, images),
        Turn("assistant", sampled, (), rollout_logprobs, Version(0, 0)),
    )
    id = TrajectoryId(*number)
    trajectory = Trajectory(
        id, 0, f"task-{number[0]}", 0, turns, sampling, EndReason.DONE, image_bytes=pages or {}
    )
    return TrainItem(trajectory, float(rng.choice([-1, 1])))


def flops(
    config: Mapping[str, Any], sequences: int, prompt: int, answer: int, group: int = 1
) -> float:
    """Of one update of so many sequences with a text model's configuration; ``group`` share a
    prompt. Forward and backward.
    """
    hidden, layers, heads = (
        config["hidden_size"],
        config["num_hidden_layers"],
        config["num_attention_heads"],
    )
    width = heads * config.get("head_dim", hidden // heads)
    cache = config["num_key_value_heads"] * (width // heads)
    layer = hidden * (2 * width + 2 * cache) + 3 * hidden * config["intermediate_size"]

    def linear(tokens: int) -> float:
        return 6.0 * layers * (layer * tokens + width * tokens**2)

    head = 6 * hidden * config["vocab_size"] * answer
    prompts = math.ceil(sequences / group)
    return prompts * linear(prompt) + sequences * (linear(prompt + answer) - linear(prompt) + head)


def ceiling(dtype: str, side: int = MATRIX_SIDE) -> float:
    """FLOP/s of square matrix products of ``side`` rows (4 times as many on a GPU), the best of
    three.
    """
    import torch

    from rayloop.transports.manifest import DTYPES

    device = "cuda" if torch.cuda.is_available() else "cpu"
    side = 4 * side if device == "cuda" else side
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
