"""The reference's log-probs of a group's members."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rayloop.actors.reference import ReferenceActor
from rayloop.cluster.supervision.pool import CALL_ATTEMPTS, Calls, Pool
from rayloop.core.groups import Group
from rayloop.core.types import TrajectoryId

STEP_TIMEOUT_SHARE = 1 / 6
"""The share of ``policy.step_timeout`` in which the reference computes one group's log-probs."""


async def annotated(
    group: Group,
    indices: Sequence[int],
    pool: Pool[ReferenceActor],
    folder: Path | None,
    step_timeout: float,
) -> tuple[Group, set[TrajectoryId]]:
    """Attach the reference's log-probs (as references) to the members at ``indices``.

    ``folder``: the reference's weights; None for the configured ones. Returns the group, and
    the members whose payloads are lost.
    """
    members = [group.members[index] for index in indices]
    payloads = [member.payload for member in members if member.payload is not None]
    # Absolute, since an actor may have another working directory.
    path = None if folder is None else str(folder.resolve())
    annotators = Calls(pool, step_timeout * STEP_TIMEOUT_SHARE, CALL_ATTEMPTS)
    lost_positions, arrays = await annotators.split(
        1 + len(indices), ReferenceActor.annotate, payloads, path
    )

    members_by_index = {
        index: replace(member, ref_logprobs=array)
        for index, member, array in zip(indices, members, arrays, strict=True)
    }
    lost_ids = {members[position].summary.id for position in lost_positions}
    return group.map(members_by_index), lost_ids
