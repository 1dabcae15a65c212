"""What an evaluation asks for, and what its answers amount to: arms, the blind prior, metrics. Nothing is played here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from rayloop.core.types import Sampling, Task
from rayloop.data.dataset import Dataset
from rayloop.measure.controls import BLIND, OTHER, RIGHT, SAME, SAMPLED, BlindPrior, Item, swapped
from rayloop.run.config import RunConfig
from rayloop.run.folder import jsonable


@dataclass(frozen=True, slots=True)
class Play:
    """One answer to ask for."""

    arm: str
    task: Task
    sampling: Sampling
    sample: int = 0


def plays(config: RunConfig, tasks: Sequence[Task], *, controls: bool, samples: int = 0) -> list[Play]:
    """The right image once per task, the swapped images with ``controls``, and ``samples`` sampled answers per task."""
    sampling = config.rollout.sampling.sampling(greedy=config.evaluation.greedy)
    arms = {RIGHT: list(tasks)}
    if controls:
        arms |= {SAME: swapped(tasks, config.seed, same=True), OTHER: swapped(tasks, config.seed, same=False)}
    asked = [Play(arm, task, sampling) for arm, members in arms.items() for task in members]
    drawn = config.rollout.sampling.sampling()
    return asked + [Play(SAMPLED, task, drawn, sample) for sample in range(samples) for task in tasks]


def on_training_rows(config: RunConfig) -> str:
    """What is wrong with evaluating on the file that is trained on, when the run does; else ""."""
    train, held_out = config.data.train, config.data.eval
    if not config.evaluation.every or held_out is None or not Path(held_out).samefile(train):
        return ""
    return (
        f"data.eval is data.train ({train}): what is reported as held out was trained on, and says nothing about other tasks. "
        "Name rows that are not trained on; evaluation.every=0 does without"
    )


def never_evaluated(config: RunConfig) -> str:
    """That held-out rows are named and not used, when they are; else ""."""
    if config.data.eval is None or config.evaluation.every:
        return ""
    return f"data.eval names {config.data.eval}, and with evaluation.every: 0 the run never evaluates; set it to a number of steps"


def blind(config: RunConfig, train: Dataset, tasks: Sequence[Task]) -> list[Item]:
    """The blind prior's items; none when the configuration names no prior."""
    if config.evaluation.blind is None:
        return []
    prior: BlindPrior = config.evaluation.blind.build()
    prior.fit(train)
    found = [(task, prior.score(task)) for task in tasks]
    return [
        Item(BLIND, t.id, t.source, reward=s.value, components=s.components, truth=jsonable(t.ground_truth))
        for t, s in found
    ]


def metrics(items: Sequence[Item], table: dict[str, Any]) -> dict[str, float]:
    """val/reward/mean, val/<source>/reward/mean, val/<component>/mean of the right image, and val/control/<arm>/...

    Tasks without a score are left out of the means and counted in val/unscored.
    """
    right = [item for item in items if item.arm == RIGHT]
    names = {f"val/{name}/mean": value[0] for name, value in table.get(RIGHT, {}).items()}
    for source in sorted({item.source for item in right} - {""}):
        rewards = [item.reward for item in right if item.source == source and item.reward is not None]
        if rewards:
            names[f"val/{source}/reward/mean"] = mean(rewards)
    for arm in table.keys() - {RIGHT}:
        names |= {f"val/control/{arm}/{name}/mean": value[0] for name, value in table[arm].items()}
    scored = sum(item.reward is not None for item in right)
    return {**names, "val/scored": float(scored), "val/unscored": float(len(right) - scored)}
