"""Evaluation on held-out tasks, through the same actors as training. Nothing of it enters the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from cluster.loop.episode_runner import EpisodeRunner
from rayloop.core.groups import Group, Member, Scored
from rayloop.core.seeds import derive
from rayloop.core.types import PlayRequest, TrajectoryId
from rayloop.measure.controls import Item
from rayloop.run.config import RunConfig
from rayloop.run.folder import jsonable
from rayloop.run.held_out import Play

AT_ONCE = 128


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
