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
from statistics import mean
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import Field, model_validator

from cluster.config import DataSettings
from rayloop.core.config import Component, Settings
from rayloop.core.dataset import Dataset, TaskCursor
from rayloop.core.failures import DataFailure
from rayloop.core.protocols import TrainItem
from rayloop.core.types import EndReason, Sampling, Task, Trajectory, TrajectoryId, Turn, Version
from rayloop.engines.settings import Dtype, FsdpSettings, ModelSettings, OptimizerSettings
from rayloop.envs.rendering import Renderer
from rayloop.grpo.settings import LossSettings

if TYPE_CHECKING:
    from rayloop.engines.fsdp import FsdpEngine

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
    save_every: int | None = Field(None, gt=0)
    """Also write the model as ``output``/step_<N> after every so many steps, to choose one on held-out rows."""
    dtype: Dtype = "float32"
    """Type of the written weights; training itself is ``engine.dtype`` over float32 master weights."""
    batch_size: int = Field(32, gt=0)
    """Rows per optimizer update."""
    model: ModelSettings
    data: DataSettings
    answers: Component
    tiny: TinySettings | None = None
    engine: FsdpSettings = FsdpSettings()
    optimizer: OptimizerSettings = OptimizerSettings(lr=1e-3)
    """``total_updates`` of a schedule is ``steps`` unless given."""
    max_image_pixels: int = Field(50_000_000, gt=0)
    log_every: int = Field(25, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _schedule_ends_with_the_stage(cls, values: Any) -> Any:
        match values:
            case {"steps": steps, "optimizer": {"schedule": str(), **optimizer}} if "total_updates" not in optimizer:
                return {**values, "optimizer": {**values["optimizer"], "total_updates": steps}}
        return values


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

    output = Path(config.output)

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
    progress = Progress()
    for step in range(1, config.steps + 1):
        batch = [examples.item(dataset[cursor.next()], rng) for _ in range(config.batch_size)]
        progress.add(engine.train([batch]), len(batch))
        last = step == config.steps or (config.seconds is not None and progress.seconds > config.seconds)
        if step % config.log_every == 0 or last:
            print(progress.line(step), flush=True)
        if config.save_every is not None and step % config.save_every == 0:
            write_model(config, engine, output / f"step_{step}")
        if last:
            break
    write_model(config, engine, output)
    engine.close()
    print(f"wrote {output}")
    return 0


def write_model(config: SftConfig, engine: FsdpEngine, folder: Path) -> None:
    """The weights as they are now, as a model folder."""
    from rayloop.engines.models import save_model
    from rayloop.engines.scorer import COMPUTE_DTYPES

    tensors = engine.export(START)
    save_model(config.model.path, folder, {name: t.to(COMPUTE_DTYPES[config.dtype]) for name, t in tensors.items()})


def _make_tiny(config: SftConfig, tiny: TinySettings, dataset: Dataset) -> None:
    from rayloop.engines.tiny_vlm import write_tiny_vlm

    answers: Answers = config.answers.build()
    rng = random.Random(config.seed)
    texts = [part for task in dataset for message in task.messages for part in message.parts if isinstance(part, str)]
    texts += [answers.answer(task, rng) for task in dataset]
    write_tiny_vlm(
        config.model.path, texts, vision=tiny.vision, seed=config.seed, extra_tokens=answers.tokens, **tiny.sizes
    )


class Progress:
    """What the lines of progress say: means over the steps since the line before."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self._rows, self._reports = 0, list[dict[str, float]]()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def add(self, report: dict[str, float], rows: int) -> None:
        self._reports.append(report)
        self._rows += rows

    def line(self, step: int) -> str:
        """The behaviour log-probs of an answer are 0, so |old - behaviour| is its loss per token."""
        now = time.monotonic()
        loss = mean(report["actor/old_behaviour_mean"] for report in self._reports)
        report, rate = self._reports[-1], self._rows / (now - self._last)
        self._last, self._rows, self._reports = now, 0, []
        return (
            f"step {step}  {now - self._began:.0f} s  {rate:.0f} rows/s  loss {loss:.4f}  "
            f"grad norm {report['actor/grad_norm']:.2f}  lr {report['actor/lr']:.1e}"
        )
