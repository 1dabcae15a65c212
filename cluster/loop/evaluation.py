"""Evaluation on held-out tasks, through the same actors as training. Nothing of it enters the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rayloop.cluster.supervision.attempts import EpisodeRunner
from rayloop.core.groups import Group, Member, Scored
from rayloop.core.types import EndReason, RolloutRequest, TrajectoryId, derive
from rayloop.measure.controls import Item
from rayloop.rollout.scheduler import ConcurrencyLimit
from rayloop.run.config import RunConfig
from rayloop.run.folder import RolloutRecord, jsonable
from rayloop.run.held_out import Play

AT_ONCE = 128
"""Episodes that are played at once."""


async def play(
    asked: Sequence[Play], config: RunConfig, player: EpisodeRunner, step: int,
    keep: Callable[[Item, dict[str, bytes]], None], report: Callable[[Member], None],
) -> list[Item]:  # fmt: skip
    """Play all answers that are ``asked``; those of an arm to a task are a group. ``keep`` gets each item at once, with the images
    of its group by hash; ``report`` gets each member, which has the traceback."""
    together: dict[tuple[str, str], list[int]] = {}
    for index, one in enumerate(asked):
        together.setdefault((one.arm, one.task.id), []).append(index)
    gate = ConcurrencyLimit(AT_ONCE)
    items: dict[int, Item] = {}

    async def some(indices: Sequence[int]) -> None:
        group = -1 - indices[0]
        requests = [_request(config, asked[index], TrajectoryId(group, n)) for n, index in enumerate(indices)]
        async with gate.room(len(indices)):
            try:
                members = await player.play(requests, step, bad_data=player.emit_bad_data)
            finally:
                player.history.forget(group)
        for member in members:
            report(member)
        records, images = await player.rewards.describe(Group(group, asked[indices[0]].task, tuple(members)))
        for number, (index, member) in enumerate(zip(indices, members, strict=True)):
            items[index] = _item(asked[index], member, [one for one in records if one.sample == number])
            keep(items[index], images)
        player.evaluation = len(items), len(asked)

    player.evaluation = 0, len(asked)
    try:
        await asyncio.gather(*map(some, together.values()))
    finally:
        player.evaluation = None
    return [items[index] for index in range(len(asked))]


def _request(config: RunConfig, asked: Play, id: TrajectoryId) -> RolloutRequest:
    seed = derive(config.seed, "evaluation", asked.task.id, *([asked.sample] if asked.sample else []))
    return RolloutRequest(asked.task, id, 0, seed, asked.sampling)


def _item(asked: Play, member: Member, records: Sequence[RolloutRecord]) -> Item:
    scored = member.outcome if isinstance(member.outcome, Scored) else None
    return Item(
        asked.arm, asked.task.id, asked.task.source, asked.sample,
        reward=scored.value if scored else None,
        components=scored.components if scored else {},
        unscored=None if isinstance(member.outcome, Scored) else f"{member.outcome.kind}: {member.outcome.reason}",
        text="\n".join(turn.text for record in records for turn in record.turns if turn.sampled),
        truth=jsonable(asked.task.ground_truth),
        images=tuple(image for record in records for image in record.images),
        cut=member.summary.cut and member.summary.end_reason is not EndReason.OVER_LENGTH,
    )  # fmt: skip
