"""The records of a step: which groups are sampled, their rollouts, and the updates it skipped."""

import asyncio
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from operator import attrgetter

from rayloop.cluster.supervision.attempts import EpisodeRunner
from rayloop.core import incidents
from rayloop.core.failures import Diverged
from rayloop.core.groups import Group
from rayloop.run.records.rollouts import RolloutRecord
from rayloop.run.records.step_metrics import Collected
from rayloop.run.reporter import Reporter


def sampled_groups(collected: Collected, count: int) -> list[Group]:
    """The first ``count`` groups of a step by number, trained and dropped ones in turn."""
    trained = sorted(collected.groups, key=attrgetter("number"))
    trained_numbers = {group.number for group in trained}
    finished = sorted(collected.ended_groups, key=attrgetter("number"))
    dropped = [group for group in finished if group.number not in trained_numbers]

    sample: list[Group] = []
    for pair in zip_longest(trained, dropped):
        sample += filter(None, pair)
    return sample[:count]


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
