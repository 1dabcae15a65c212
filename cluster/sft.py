"""Supervised steps on the answers of the training rows: the stage before GRPO, on the same engine and data.

The gradient of the log-likelihood is the policy gradient with advantage 1 at ratio 1, so an answer is a trajectory whose
sampled turn is the answer, and the trainer needs no second code path. One process; the model folder that it writes is
what ``model.path`` of a run takes.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field

from cluster.config import DataSettings
from rayloop.core.config import Component, Settings
from rayloop.core.dataset import Dataset, TaskCursor
from rayloop.core.failures import DataFailure
from rayloop.core.protocols import TrainItem
from rayloop.core.types import EndReason, Sampling, Task, Trajectory, TrajectoryId, Turn, Version
from rayloop.engines.settings import FsdpSettings, ModelSettings, OptimizerSettings
from rayloop.envs.rendering import Renderer
from rayloop.grpo.settings import LossSettings

START = Version(0, 0)


class Answers(Protocol):
    """Gives the text that the policy should have written. ``rng`` is for answers that are drawn.

    ``tokens``: texts that a tiny model made for this recipe has as single tokens.
    """

    tokens: tuple[str, ...]

    def answer(self, task: Task, rng: random.Random) -> str: ...


class TinySettings(Settings):
    """A tiny random model, made at ``model.path`` when that folder does not exist; its tokenizer learns the rows' texts."""

    vision: bool = True
    sizes: dict[str, int | float | bool] = {}
    """Fields of rayloop.engines.tiny_vlm.TinySizes; the defaults give 2 to 3 M parameters."""


class SftConfig(Settings):
    """``python -m cluster sft CONFIG``."""

    output: str
    """Folder of the trained model, in Hugging Face layout."""
    seed: int = 0
    steps: int = Field(gt=0)
    seconds: float | None = Field(None, gt=0)
    """Stop after this long, if that comes before ``steps``."""
    batch_size: int = Field(32, gt=0)
    """Rows per optimizer update."""
    model: ModelSettings
    data: DataSettings
    answers: Component
    tiny: TinySettings | None = None
    engine: FsdpSettings = FsdpSettings()
    optimizer: OptimizerSettings = OptimizerSettings(lr=1e-3)
    max_image_pixels: int = Field(50_000_000, gt=0)
    log_every: int = Field(25, gt=0)


class Examples:
    """Rows as trajectories whose only sampled turn is the answer."""

    def __init__(self, config: SftConfig) -> None:
        self.renderer = Renderer(config.model, config.max_image_pixels)
        self.answers: Answers = config.answers.build()
        self.sampling = self.renderer.sampling(Sampling())

    def item(self, task: Task, rng: random.Random) -> TrainItem:
        """Raises DataFailure for an unusable image."""
        prompt = self.renderer.prompt(task.messages)
        answer = (*self.renderer.encode(self.answers.answer(task, rng)), self.renderer.end_tokens[0])
        turns = (
            Turn("prompt", prompt.token_ids, tuple(image.ref for image in prompt.images)),
            Turn("assistant", answer, logprobs=(0.0,) * len(answer), version=START),
        )
        images = {image.ref.sha256: image.data for image in prompt.images if image.data is not None}
        trajectory = Trajectory(
            TrajectoryId(0, 0), 0, task.id, 0, turns, self.sampling, EndReason.DONE, image_bytes=images
        )
        return TrainItem(trajectory, advantage=1.0)


def sft(config: SftConfig) -> int:
    """Train and write the model. Returns the exit code 0; raises RayloopError."""
    from rayloop.engines.fsdp import FsdpEngine
    from rayloop.engines.models import save_model

    def quarantine(failure: DataFailure) -> None:
        print(f"left out: {failure}", flush=True)

    dataset = Dataset(config.data.train, config.data.reader.build(), config.data.strict, quarantine)
    if config.tiny is not None and not Path(config.model.path).exists():
        _make_tiny(config, config.tiny, dataset)
    cursor = TaskCursor(len(dataset), config.seed, config.data.shuffle)
    examples, rng = Examples(config), random.Random(config.seed)
    with tempfile.TemporaryDirectory() as meeting:
        engine = FsdpEngine(
            config.model, config.engine, config.optimizer, LossSettings(correction="none"),
            rank=0, world_size=1, init_method=f"file://{meeting}/store", seed=config.seed,
        )  # fmt: skip
    began = time.monotonic()
    for step in range(1, config.steps + 1):
        batch = [examples.item(dataset[cursor.next()], rng) for _ in range(config.batch_size)]
        report = engine.train([batch])
        out_of_time = config.seconds is not None and time.monotonic() - began > config.seconds
        if step % config.log_every == 0 or step == config.steps or out_of_time:
            print(line(step, time.monotonic() - began, report), flush=True)
        if out_of_time:
            break
    save_model(config.model.path, Path(config.output), engine.export(START))
    engine.close()
    print(f"wrote {config.output}")
    return 0


def _make_tiny(config: SftConfig, tiny: TinySettings, dataset: Dataset) -> None:
    from rayloop.engines.tiny_vlm import write_tiny_vlm

    answers: Answers = config.answers.build()
    rng = random.Random(config.seed)
    texts = [part for task in dataset for message in task.messages for part in message.parts if isinstance(part, str)]
    texts += [answers.answer(task, rng) for task in dataset]
    write_tiny_vlm(
        config.model.path, texts, vision=tiny.vision, seed=config.seed, extra_tokens=answers.tokens, **tiny.sizes
    )


def line(step: int, seconds: float, report: dict[str, Any]) -> str:
    """One line of progress. The behaviour log-probs of an answer are 0, so |old - behaviour| is its loss per token."""
    return (
        f"step {step}  {seconds:.0f} s  loss {report['actor/old_behaviour_mean']:.4f}  "
        f"grad norm {report['actor/grad_norm']:.2f}  lr {report['actor/lr']:.1e}"
    )
