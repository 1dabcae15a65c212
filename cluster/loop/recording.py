"""The records of a step: which groups are sampled, their rollouts, and the updates it skipped."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from operator import attrgetter
from typing import Any, Literal

from rayloop.cluster.loop.saving import fetch
from rayloop.cluster.supervision.attempts import EpisodeRunner
from rayloop.core import incidents
from rayloop.core.deadlines import with_deadline
from rayloop.core.failures import Diverged, WorkerLost
from rayloop.core.groups import Group
from rayloop.core.types import Version
from rayloop.rollout.plain import filled, held
from rayloop.rollout.step_record import plain_step, without_images
from rayloop.run.records.rollouts import RolloutRecord
from rayloop.run.records.step_metrics import Collected
from rayloop.run.reporter import Reporter


def sampled_groups(collected: Collected, count: int | Literal["all"]) -> list[Group]:
    """The first ``count`` groups of a step by number, trained and dropped ones in turn."""
    trained = sorted(collected.groups, key=attrgetter("number"))
    trained_numbers = {group.number for group in trained}
    finished = sorted(collected.ended_groups, key=attrgetter("number"))
    dropped = [group for group in finished if group.number not in trained_numbers]

    sample: list[Group] = []
    for pair in zip_longest(trained, dropped):
        sample += filter(None, pair)
    return sample if count == "all" else sample[:count]


async def described(
    runner: EpisodeRunner, groups: Sequence[Group]
) -> tuple[list[RolloutRecord], dict[str, bytes]]:
    """The records of the groups' rollouts, and their images by hash."""
    descriptions = await asyncio.gather(*(runner.rewards.describe(group) for group in groups))
    records: list[RolloutRecord] = []
    images: dict[str, bytes] = {}
    for group_records, group_images in descriptions:
        records += group_records
        images |= group_images
    return records, images


async def keep_step(
    reporter: Reporter,
    version: Version,
    collected: Collected,
    records: Sequence[RolloutRecord],
    warn: Callable[[str], None],
) -> None:
    """Write all that ``replay`` needs of a step (``keep_rollouts: all``).

    ``version``: the weights that the step made. Payloads that are lost are left out; ``warn`` gets
    the reason when all of them are late.
    """
    config = reporter.config
    trained_version = Version(version.lineage, version.step - 1)
    # The ranks that share rows have the same values.
    ranks = reporter.tokens[:: config.policy.engine.sequence_parallel]
    step = plain_step(config, trained_version, collected, records, ranks)
    values: dict[Any, Any] = {}
    payloads = fetch(held(step), values)
    try:
        await with_deadline(config.policy.step_timeout, payloads, "payloads for a step's record")
    except WorkerLost as error:
        warn(f"step {version.step} cannot be replayed: {error}")
        return
    value = filled(step, lambda ref: without_images(values.get(ref)))
    await asyncio.to_thread(reporter.replayable, version.step, value)


def report_skipped(reporter: Reporter, report: Mapping[str, float], *, last: bool) -> None:
    """Emit how many updates of a step were skipped.

    Raises Diverged when the ``last`` step of a run changed nothing.
    """
    skipped = int(report.get("actor/skipped_updates", 0))
    applied = int(report.get("actor/updates", 0))
    if skipped:
        reporter.event(incidents.UpdatesSkipped(skipped, skipped + applied))
    if skipped and not applied and last:
        raise Diverged(
            "each update of the last step was skipped, since its gradient was not finite."
            " Lower policy.optimizer.lr, or inspect the last batch"
        )
