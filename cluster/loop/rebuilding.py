"""Rebuilding the policy of a run when one of its ranks is lost."""

import asyncio
import time
from typing import Protocol

from rayloop.cluster.services import TrainingServices
from rayloop.core import incidents
from rayloop.core.deadlines import until_stopped
from rayloop.core.failures import PolicyLost
from rayloop.run.reporter import Reporter


class RebuildingRun(Protocol):
    """The parts of the driver that a rebuild uses.

    ``policy_lost``: a rank died, and no step was restored since.
    """

    services: TrainingServices
    reporter: Reporter
    stopping: asyncio.Event
    policy_lost: bool

    async def run(self) -> None:
        """Train from the newest checkpoint to the last step."""


async def run_and_rebuild(run: RebuildingRun) -> None:
    """Run, and continue from the newest checkpoint when a rank of the policy is lost."""
    policy = run.services.policy
    while True:
        try:
            if run.policy_lost:
                await _rebuild(run)
            return await policy.while_alive(run.run())
        except PolicyLost as error:
            run.reporter.event(incidents.PolicyLostEvent(str(error), policy.blamed))
            run.policy_lost = True
            # The wait for the budget may last as long as
            # ``recovery.start_timeout``; a stop ends it.
            await until_stopped(run.stopping, policy.afford(error))


async def _rebuild(run: RebuildingRun) -> None:
    """Replace all ranks of the policy."""
    began = time.monotonic()
    policy = run.services.policy
    starting = run.services.colocation.start_ranks(policy.rebuild())
    await until_stopped(run.stopping, starting)
    seconds = round(time.monotonic() - began, 3)
    run.reporter.event(incidents.PolicyRebuilt(seconds, policy.places))
