"""Evaluation on held-out tasks, through the same actors as training. Nothing of it enters the ledger."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from statistics import mean

from cluster.config import RunConfig
from cluster.player import Player
from rayloop.core.dataset import Dataset
from rayloop.core.seeds import derive
from rayloop.core.types import Member, PlayRequest, Scored, TrajectoryId

AT_ONCE = 128


async def evaluate(config: RunConfig, dataset: Dataset, player: Player, step: int) -> dict[str, float]:
    """Play each task once. Returns val/reward/mean, val/<source>/reward/mean, val/<component>/mean and val/unscored.

    Tasks without a score are left out of the means and counted in val/unscored.
    """
    count = min(len(dataset), config.evaluation.limit or len(dataset))
    sampling = config.rollout.sampling.sampling(greedy=config.evaluation.greedy)
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(index: int) -> Member:
        task = dataset[index]
        seed = derive(config.seed, "evaluation", task.id)
        async with gate:
            return await player.play(PlayRequest(task, TrajectoryId(-1 - index, 0), 0, seed, sampling), step)

    return summarise(list(await asyncio.gather(*(one(index) for index in range(count)))))


def summarise(members: list[Member]) -> dict[str, float]:
    """Means over the scored members, in all and by source, of the reward and of each component."""
    values: dict[str, list[float]] = defaultdict(list)
    for member in members:
        if isinstance(member.outcome, Scored):
            values["reward"].append(member.outcome.value)
            if member.summary.source:
                values[f"{member.summary.source}/reward"].append(member.outcome.value)
            for name, value in member.outcome.components.items():
                values[name].append(value)
    scored = len(values["reward"])
    means = {f"val/{name}/mean": mean(numbers) for name, numbers in values.items() if numbers}
    return {**means, "val/scored": float(scored), "val/unscored": float(len(members) - scored)}
