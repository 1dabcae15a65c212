"""Evaluation on held-out tasks, through the same actors as training. Nothing of it enters the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from cluster.loop.episode_runner import EpisodeRunner
from rayloop.core.groups import Group, Member, Scored
from rayloop.core.seeds import derive
from rayloop.core.types import PlayRequest, Sampling, Task, TrajectoryId
from rayloop.data.dataset import Dataset
from rayloop.measure.controls import BLIND, OTHER, RIGHT, SAME, SAMPLED, BlindPrior, Item, swapped
from rayloop.run.config import RunConfig
from rayloop.run.folder import jsonable

AT_ONCE = 128


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


async def play(
    asked: Sequence[Play], config: RunConfig, player: EpisodeRunner, step: int,
    keep: Callable[[Item, dict[str, bytes]], None], hear: Callable[[Member], None],
) -> list[Item]:  # fmt: skip
    """Play everything that is ``asked``. ``keep`` gets each item as soon as it is there, with its images by hash, and ``hear``
    what was played and scored: an item has no traceback."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(index: int, asked: Play) -> Item:
        seed = derive(config.seed, "evaluation", asked.task.id, *([asked.sample] if asked.sample else []))
        request = PlayRequest(asked.task, TrajectoryId(-1 - index, 0), 0, seed, asked.sampling)
        async with gate:
            try:
                member = await player.play(request, step, bad_data=player.tell_bad_data)
            finally:
                player.blame.forget(request.id.group)
            records, images = await player.describe(Group(-1 - index, asked.task, (member,)))
        outcome = member.outcome
        scored = outcome if isinstance(outcome, Scored) else None
        item = Item(
            asked.arm, asked.task.id, asked.task.source, asked.sample,
            reward=scored.value if scored else None,
            components=scored.components if scored else {},
            unscored=None if isinstance(outcome, Scored) else f"{outcome.kind}: {outcome.reason}",
            text="\n".join(turn.text for record in records for turn in record.turns if turn.sampled),
            truth=jsonable(asked.task.ground_truth),
            images=tuple(image for record in records for image in record.images),
        )  # fmt: skip
        keep(item, images)
        done = player.evaluation[0] if player.evaluation else 0
        player.evaluation = done + 1, total
        return item

    total = len(asked)
    player.evaluation = 0, total
    try:
        return list(await asyncio.gather(*(one(index, asked) for index, asked in enumerate(asked))))
    finally:
        player.evaluation = None


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
