"""The models that the shipped configurations name, by their shapes, and an update of each
configuration's longest rows.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

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
from rayloop.estimate.memory import Lengths
from rayloop.estimate.run import lengths, plan
from rayloop.run.config import RunConfig, read
from rayloop.sft.stage import SftConfig
from tests.gpu_fake.shapes import SHAPES, ModelShape
from tests.support.runs import ROOT

IMAGE = 151_655
WORDS = 1000
"""Ordinary tokens in these trajectories."""


def configurations() -> list[Path]:
    """Those of runs and supervised stages below ``recipes``, relative to the root, whose trainer
    has GPUs.
    """
    runs = [path for path in sorted((ROOT / "recipes").glob("*/*.yaml")) if _has_gpus(path)]
    return [path.relative_to(ROOT) for path in runs if run_of(path).policy.placement.num_gpus > 0]


def run_of(path: Path | str) -> RunConfig:
    """The configuration, relative to the root, with overrides behind a ``+`` each; of a supervised
    stage, a run with as many rows in an update, which share nothing.
    """
    name, *overrides = str(path).split("+")
    file = ROOT / name
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    if "answers" not in content:
        return read(file, overrides)
    stage, run = SftConfig(**content), read(file.with_name(f"{file.parent.name}.yaml"), [])
    policy = run.policy.model_copy(
        update={"ranks": stage.workers, "engine": stage.engine, "placement": stage.placement}
    )
    algorithm = run.algorithm.model_copy(
        update={"group_size": 1, "groups_per_step": stage.batch_size}
    )
    return run.model_copy(update={"model": stage.model, "policy": policy, "algorithm": algorithm})


def _has_gpus(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    content = yaml.safe_load(text)
    if "extends" in content:
        return _has_gpus(path.parent / content["extends"])
    return bool({"policy", "answers"} & {*content}) and "num_gpus" in text


def shape_of(config: RunConfig) -> ModelShape:
    """The one of ``SHAPES`` that the configuration's model has."""
    (found,) = [shape for size, shape in SHAPES.items() if size in config.model.path]
    return found


def lengths_of(config: RunConfig) -> Lengths:
    """The longest trajectory that the configuration allows, with images of its model."""
    tower, model = shape_of(config).tower, config.model
    side = tower["patch_size"] * tower["spatial_merge_size"]
    return lengths(plan(config, None, model.max_pixels // side**2))


def same(path: Path) -> str:
    """Equal for configurations whose updates are the same for a rank."""
    config = run_of(path)
    engine, loss = config.policy.engine, config.policy.loss
    return repr((shape_of(config), Row.longest(config), config.policy.ranks, engine, loss))


def write_model(config: RunConfig, folder: Path, layers: int | None = None) -> None:
    """A folder with the model's config.json; ``layers``: of the language model, where not all."""
    shape = shape_of(config)
    text = shape.text | {
        "model_type": f"{shape.family}_text",
        "max_position_embeddings": 128_000,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "num_hidden_layers": layers or shape.text["num_hidden_layers"],
        "rope_parameters": shape.rotary,
    }
    content = {
        "architectures": [shape.architecture],
        "model_type": shape.family,
        "text_config": text,
        "vision_config": shape.tower | {"out_hidden_size": text["hidden_size"]},
        "tie_word_embeddings": text["tie_word_embeddings"],
        "image_token_id": IMAGE,
        "video_token_id": IMAGE + 1,
        "vision_start_token_id": IMAGE - 3,
        "vision_end_token_id": IMAGE - 2,
    }
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")


@dataclass(frozen=True)
class Row:
    """A micro-batch: so many trajectories, which ``share`` their prompt with its images or not."""

    trajectories: int
    share: bool
    lengths: Lengths
    images: int
    image_token_side: int
    """Pixels."""

    @classmethod
    def longest(cls, config: RunConfig) -> Row:
        """As many trajectories as fill the micro-batch, if an update has them: the longest that
        there may be with a common prompt, else equal ones.
        """
        side = shape_of(config).image_token_side
        each, engine, episode = (
            lengths_of(config),
            config.policy.engine,
            config.environment.episode,
        )
        together = engine.sequence_parallel
        budget = engine.micro_batch * together
        update = (
            config.algorithm.target
            * together
            // config.policy.ranks
            // config.policy.update.mini_batches
        )
        images = min(episode.max_images, episode.max_turns)
        if episode.max_turns == 1 and config.algorithm.group_size > 1:
            return cls(
                max(1, min((budget - each.prompt) // each.response, update)),
                True,
                each,
                images,
                side,
            )
        number = max(
            1,
            min(
                math.ceil(budget / each.whole),
                budget // (each.images + images + each.response),
                update,
            ),
        )
        if number > 1:
            each = replace(each, prompt=budget // number - each.response)
        return cls(number, False, each, images, side)

    @property
    def tokens(self) -> int:
        """Of the packed row."""
        one = self.lengths
        return (
            one.prompt + self.trajectories * one.response
            if self.share
            else self.trajectories * one.whole
        )

    def items(self) -> list[TrainItem]:
        """Its trajectories; those that share no prompt share no image."""
        return [self._item(number) for number in range(self.trajectories)]

    def _item(self, number: int) -> TrainItem:
        group = 0 if self.share else number
        refs = [
            _image(f"{group}-{i}", self.lengths.images // self.images - 1, self.image_token_side)
            for i in range(self.images)
        ]
        ids = [token for ref in refs for token in (*[IMAGE] * ref.tokens, group % WORDS)]
        ids = [group % WORDS + 1] * (self.lengths.prompt - len(ids)) + ids
        written = [number % WORDS] * self.lengths.response
        version = Version(0, 0)
        turns = (
            Turn("user", tuple(ids), tuple(refs)),
            Turn("assistant", tuple(written), (), (0.0,) * len(written), version),
        )
        made = Trajectory(
            TrajectoryId(group, number), 0, "task", 0, turns, Sampling(), EndReason.DONE
        )
        return TrainItem(made, 1.0, ref_logprobs=[0.0] * len(written), group_tokens=len(written))


def _image(name: str, most: int, side: int) -> ImageRef:
    """An image of almost ``most`` tokens of ``side`` pixels, as square as can be."""
    high = math.isqrt(most)
    wide = most // high
    return ImageRef(
        name,
        wide * side,
        high * side,
        (1, 2 * high, 2 * wide),
        high * wide,
    )
