"""``bench saving``: how long training is held up by a checkpoint, written while it waits and beside
it, alternately.

One rank in this process, no Ray, a text model of random weights with Adam's moments, all in
float32. Both ways write the same bytes (the model three times) and wait for the disk; beside
training they are copied first, which takes as much memory again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import machine
from benchmarks.train import train_item
from rayloop.core.types import Sampling
from rayloop.engines.settings import FsdpSettings, ModelSettings, OptimizerSettings
from rayloop.grpo.losses.settings import PpoLoss

SIZES: dict[str, dict[str, Any]] = {
    "digits": {"hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate": 256},
    "300m": {"hidden": 1024, "layers": 20, "heads": 16, "kv_heads": 4, "intermediate": 4096},
}
"""About as large as the quickstart's model, and 0.3 billion parameters."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=SIZES, default="digits", help="of the model")
    parser.add_argument("--sequences", type=int, default=8, help="of an update, 64 tokens each")
    parser.add_argument(
        "--rounds", type=int, default=5, help="of both ways; another one before them warms up"
    )
    parser.set_defaults(run=_saving)


def _saving(arguments: argparse.Namespace) -> int:
    from rayloop.engines.tiny_vlm import write_tiny_vlm
    from rayloop.engines.training.fsdp import FsdpEngine

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = write_tiny_vlm(
            folder / "model",
            [f"word {n}" for n in range(500)],
            vision=False,
            **SIZES[arguments.size],
        )
        trainer = FsdpEngine(
            ModelSettings(path=str(model)),
            FsdpSettings(),
            OptimizerSettings(),
            PpoLoss(),
            rank=0,
            world_size=1,
            init_method=f"file://{folder}/group",
            seed=0,
        )
        batch = [train_item((n, 0), (70,) * 32, 32, Sampling()) for n in range(arguments.sequences)]
        seconds: dict[str, list[float]] = {}
        for number in range(arguments.rounds + 1):
            size = _round(trainer, batch, folder, seconds)
            newest = {name: round(each[-1], 3) for name, each in seconds.items()}
            print(f"round {number}: {newest}", file=sys.stderr)
        trainer.close()
    medians = {name: round(median(each[1:]), 4) for name, each in seconds.items()}
    print(
        json.dumps(
            {
                "size": arguments.size,
                "rounds": arguments.rounds,
                "bytes": size,
                **medians,
                "machine": machine(),
            }
        )
    )
    return 0


def _round(trainer: Any, batch: list[Any], folder: Path, seconds: dict[str, list[float]]) -> int:
    """Save once while training waits and once beside it. Returns the size of a checkpoint.

    ``seconds`` gets a value for each part.
    """

    def clock(name: str, act: Any) -> Any:
        began = time.perf_counter()
        answer = act()
        seconds.setdefault(name, []).append(time.perf_counter() - began)
        return answer

    clock("update_s", lambda: trainer.train([batch]))
    clock("held_waiting_s", lambda: trainer.save(str(folder / "waiting")))
    trainer.train([batch])
    began = time.perf_counter()
    saving = clock("held_beside_s", lambda: trainer.begin_save(str(folder / "beside")))
    clock("update_beside_s", lambda: trainer.train([batch]))
    saving.result(600)
    seconds.setdefault("written_beside_s", []).append(time.perf_counter() - began)
    size = sum(file.stat().st_size for file in (folder / "beside").iterdir())
    shutil.rmtree(folder / "waiting")
    shutil.rmtree(folder / "beside")
    return size
