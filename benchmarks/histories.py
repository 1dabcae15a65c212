"""``bench histories``: what a trainer computes for an episode under each history, and its time.

The episode has screenshots of noise and a scripted policy that thinks and presses. ``tokens`` and
``attended``, the pairs of tokens in attention, are counted in the batches of the trainer's plan;
``distinct_tokens`` are the nodes of the contexts' prefix tree, ``repeated_tokens`` and
``repeated_attended`` those of contexts that share nothing. The forward pass of a transformer with W
weights and L layers of width H takes ``2 W tokens + 4 L H attended`` operations.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from benchmarks.measure import machine
from rayloop.chat.rendering import Renderer
from rayloop.core.protocols import Observation, StepResult, TrainItem
from rayloop.core.types import (
    Completion,
    FinishReason,
    ImageSource,
    Message,
    RolloutRequest,
    Sampling,
    Task,
    TokenPrompt,
    Trajectory,
    TrajectoryId,
    Version,
)
from rayloop.data.images import png
from rayloop.engines.settings import FsdpSettings, ModelSettings
from rayloop.envs.episode import run_episode
from rayloop.envs.history.policies import EpisodeHistory, Window
from rayloop.envs.instance import InThread
from rayloop.envs.settings import EpisodeSettings

if TYPE_CHECKING:
    import torch

    from rayloop.engines.training.scorer import Scorer
    from rayloop.grpo.batch import Batch, TrainSample

HISTORIES: dict[str, dict[str, Any]] = {
    "full": {},
    "drop_thoughts": {"answers": "{action}"},
    "last_images(2)": {"last_images": 2},
    "last_turns(4)": {"last_turns": 4},
    "last_turns(1)": {"last_turns": 1},
    "thoughts and images": {"last_images": 2, "answers": "{action}"},
}
PROMPT = "You see the screen of a computer, and press its buttons until the form is sent. " * 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--side", type=int, default=448, help="of a screenshot, in pixels")
    parser.add_argument("--budget", type=int, default=16384, help="micro_batch_tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.set_defaults(run=_histories)


def _histories(arguments: argparse.Namespace) -> int:
    import torch

    from rayloop.engines.tiny_vlm import write_tiny_vlm

    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        spoken = "this is the thought number 0123456789</think>press Previous actions: Step"
        model = write_tiny_vlm(Path(folder) / "model", [PROMPT, spoken], seed=0)
        rows = [measure(model, name, arguments) for name in HISTORIES]
    result = {
        "turns": arguments.turns,
        "side": arguments.side,
        "budget": arguments.budget,
        "histories": rows,
        "machine": machine(),
    }
    print(json.dumps(result, indent=1))
    return 0


def measure(folder: Path, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Counts and seconds of one history, for a forward and a backward pass."""
    # Every benchmark imports this module, and measures its own CPU time.
    import torch

    from rayloop.engines.models import load_model
    from rayloop.engines.training.collator import Collator
    from rayloop.engines.training.scorer import Scorer

    settings = ModelSettings(path=str(folder))
    model = load_model(settings)
    scorer = Scorer(model, 2048)
    engine = FsdpSettings(micro_batch_tokens=arguments.budget)
    collator = Collator(model, settings, engine, torch.device("cpu"))
    size = (arguments.side, arguments.side)
    trajectory = contexts_of(folder, HISTORIES[name], arguments.turns, size=size)
    samples = [collator.sample(TrainItem(segment, 1.0)) for segment in trajectory.segments]
    batches = [collator.batch(part) for part in collator.plan(samples)]
    seconds = median(_seconds(scorer, batches) for _ in range(arguments.repeats))
    collator.close()
    return {
        "history": name,
        "contexts": len(samples),
        "sampled_tokens": trajectory.sampled_tokens,
        "trained_tokens": sum(batch.predict.numel() for batch in batches),
        "tokens": sum(batch.token_ids.numel() for batch in batches),
        "distinct_tokens": distinct_tokens(samples, model.config.image_token_id),
        "repeated_tokens": sum(sample.length for sample in samples),
        "attended": sum(_attended(batch.starts[0]) for batch in batches),
        "repeated_attended": sum(_pairs(sample) for sample in samples),
        "seconds": round(seconds, 3),
    }


def _attended(positions: torch.Tensor) -> int:
    """A token at position p of its sequence attends to p + 1 tokens, shared ones included."""
    return int((positions + 1).sum())


def _pairs(sample: TrainSample) -> int:
    return sample.length * (sample.length + 1) // 2


def _seconds(scorer: Scorer, batches: list[Batch]) -> float:
    begin = time.perf_counter()
    for batch in batches:
        scorer(batch).logprobs.sum().backward()
    return time.perf_counter() - begin


def screenshot(number: int, width: int, height: int, seed: int = 0) -> ImageSource:
    """Noise: a picture that no other number or seed has."""
    rng = np.random.default_rng((seed, number))
    pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
    return ImageSource(data=png(Image.fromarray(pixels)))


class Screens:
    """A screenshot after each turn, and one at the beginning."""

    def __init__(self, size: tuple[int, int], seed: int) -> None:
        self._size, self._seed, self._turn = size, seed, 0

    def _shown(self) -> ImageSource:
        return screenshot(self._turn, *self._size, self._seed)

    def reset(self, task: Task) -> Observation:
        return Observation((Message("user", (PROMPT, self._shown())),))

    def step(self, text: str) -> StepResult:
        self._turn += 1
        return StepResult(Observation((Message("user", (self._shown(),)),)))

    def evaluate(self) -> float:
        return 1.0

    def close(self) -> None:
        pass


def contexts_of(
    folder: Path,
    history: dict[str, Any],
    turns: int,
    seed: int = 0,
    size: tuple[int, int] = (84, 56),
) -> Trajectory:
    """The episode of a policy that thinks and presses, under a history."""
    renderer = Renderer(ModelSettings(path=str(folder)))
    said = (f"this is the thought number {turn}</think>press {turn}" for turn in range(turns))

    async def generate(prompt: TokenPrompt, sampling: Sampling) -> Completion:
        ids = (*renderer.encode(next(said)), renderer.end_tokens[0])
        return Completion(ids, (-0.5,) * len(ids), FinishReason.END_TOKEN, Version(0, 1))

    settings = EpisodeSettings(max_turns=turns, max_tokens=1 << 20, max_images=turns + 1)
    chosen = EpisodeHistory(Window(Window.Settings.model_validate(history)))
    episode = run_episode(
        RolloutRequest(Task("t", ()), TrajectoryId(seed, 0), 0, seed, Sampling(max_tokens=200)),
        InThread("Screens", lambda: Screens(size, seed)),
        renderer,
        settings,
        generate,
        history=chosen,
    )
    return asyncio.run(episode)


def distinct_tokens(samples: Sequence[TrainSample], image_token: int) -> int:
    """The tokens of all samples when each beginning counts once: the nodes of their prefix tree."""
    nodes: dict[tuple[int, Any], int] = {}
    for sample in samples:
        images = iter(
            [
                id(pixels)
                for pixels, count in zip(sample.pixels, sample.image_tokens, strict=True)
                for _ in range(count)
            ]
        )
        node = 0
        for token in sample.token_ids.tolist():
            content = ("image", next(images)) if token == image_token else token
            node = nodes.setdefault((node, content), len(nodes) + 1)
    return len(nodes)
