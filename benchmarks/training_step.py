"""Seconds of one update of a tiny Qwen2.5-VL: 32 distinct screens, and 16 GRPO groups of 8 with one screen each.

    python -m benchmarks.training_step [--dtype bfloat16] [--threads 2] [--repeats 8]

Images are 48 tokens (168 x 224 pixels), prompts 64 to 83 tokens, answers 10. Prints one JSON line: the fastest repeat
of each, images already decoded, and its CPU seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from pathlib import Path
from typing import get_args

import numpy as np

from rayloop.core.protocols import TrainItem
from rayloop.core.types import TrajectoryId
from rayloop.engines.fsdp import FsdpEngine
from rayloop.engines.settings import Dtype, FsdpSettings, OptimizerSettings
from rayloop.engines.tiny_vlm import write_tiny_vlm
from tests.engines.training import TEXT_TOKENS, engine, trajectory

IMAGE, ANSWER = (8, 6), 10


def items(folder: Path, prompts: int, samples: int) -> list[TrainItem]:
    """``samples`` random answers to each of ``prompts``; advantages are distinct from 0."""
    rng = np.random.default_rng(0)
    made = []
    for number in range(prompts):
        played = trajectory(folder, number, [(int(rng.integers(14, 34)), IMAGE, ANSWER)])
        prompt, answer = played.turns
        for sample in range(samples):
            turn = dataclasses.replace(answer, token_ids=tuple(rng.choice(TEXT_TOKENS, ANSWER).tolist()))
            member = dataclasses.replace(played, id=TrajectoryId(number, sample), turns=(prompt, turn))
            made.append(TrainItem(member, float(rng.uniform(0.1, 1))))
    return made


def fastest(trainer: FsdpEngine, batch: list[TrainItem], repeats: int) -> dict[str, float]:
    found = []
    for _ in range(repeats + 1):  # the first decodes the images
        wall, cpu = time.perf_counter(), time.process_time()
        trainer.train([batch])
        found.append((time.perf_counter() - wall, time.process_time() - cpu))
    wall, cpu = min(found[1:])
    return {"seconds": round(wall, 3), "cpu_seconds": round(cpu, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dtype", choices=get_args(Dtype), default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=8)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = write_tiny_vlm(Path(name), ["Click the red button below the dialog."] * 50, vocabulary=640)
        settings = FsdpSettings(dtype=chosen.dtype, threads=chosen.threads)
        with engine(folder, settings, OptimizerSettings(lr=1e-5)) as trainer:
            shapes = {"supervised 32": (32, 1), "grpo 16x8": (16, 8)}
            print(
                json.dumps({k: fastest(trainer, items(folder, *shape), chosen.repeats) for k, shape in shapes.items()})
            )


if __name__ == "__main__":
    main()
