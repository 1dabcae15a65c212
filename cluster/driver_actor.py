"""The Ray actor of the driver, with the methods that other processes call."""

import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from rayloop.actors.base import Actor
from rayloop.actors.failures import typed
from rayloop.actors.handles import Handle
from rayloop.actors.lease import Lease, LeasesEngines
from rayloop.actors.rollout import RolloutActor
from rayloop.cluster.driver import Driver
from rayloop.cluster.loop.loggers import open_logger
from rayloop.cluster.services import TrainingServices
from rayloop.core.failures import Unforeseen
from rayloop.core.ledger import Ledger
from rayloop.run.checkpoint import NOTHING
from rayloop.run.config import RunConfig
from rayloop.run.lock import OPEN, Fence
from rayloop.run.origin import Origin
from rayloop.run.reporter import Reporter
from rayloop.view.formatting import doing


class DriverActor(Actor):
    """One asynchronous Ray actor per run, owned by the ``train`` process.

    ``folder``: the run folder, visible to all nodes; ``hashes``, ``warnings``: of ``Driver``;
    ``resume``, ``since``, ``fence``: of ``Origin``, by default of a start now.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: str,
        resume: str,
        hashes: Mapping[str, str] = NOTHING,
        since: int | None = None,
        fence: Fence = OPEN,
        warnings: Sequence[str] = (),
    ) -> None:
        self.config = config
        self.folder = folder
        self.hashes = hashes
        self.warnings = warnings
        # ``here``: a network file system may have another device number on the node of this actor.
        fence = fence.here() if fence.number else fence
        self.origin = Origin.of(Path(folder) / "checkpoints", resume, since, fence)
        self.reporter = Reporter(config, Path(folder), open_logger)
        self.driver: Driver | None = None
        self.stopping = False

    def make(self, handle: Handle[LeasesEngines]) -> Driver:
        """The driver, which reads the data. ``handle`` is that of this actor."""
        services = TrainingServices(self.config, self.folder, self.reporter.event)
        return Driver(
            self.config, services, self.reporter, self.origin, handle, self.hashes, self.warnings
        )

    async def main(self) -> dict[str, Any]:
        """Make the driver, and return the result of ``Driver.main``.

        It is made here, since Ray strips a constructor's errors of their type.
        """
        try:
            self.driver = self.make(ray.get_runtime_context().current_actor)
        except Exception as error:
            end = typed(error)
            trace = traceback.format_exc() if isinstance(end, Unforeseen) else ""
            self.reporter.failed(end, Ledger().counts(), trace)
            # ``Driver.main`` closes the loggers, and it never begins in this case.
            await self.reporter.loggers.close()
            if end is not error:
                raise end from error
            raise

        # A stop may have arrived while the data was read, when there was no driver to pass it to.
        if self.stopping:
            self.driver.stop()
        return await self.driver.main()

    async def lease_engine(self, episode: str, lost: int, why: str) -> Lease[RolloutActor]:
        """Lease another engine for an episode whose request failed on engine ``lost``.

        Environment actors call it.
        """
        assert self.driver is not None
        return await self.driver.runner.calls.replace_engine(episode, lost, why)

    async def about(self) -> RunConfig:
        """The run's configuration, for `policy serve`."""
        return self.config

    async def updates(self, since: int) -> tuple[int, list[tuple[str, Any]], str]:
        """The reports after the first ``since``, for the console.

        Returns the number of reports so far, these reports, and the present activity.
        """
        if self.driver is None:
            activity = doing("start", None)
        else:
            activity = doing(self.driver.timings.phase, progress(self.driver))
        return *self.reporter.updates.since(since), activity

    async def workers(self) -> dict[str, list[Handle[Any]]]:
        """Live actor handles by role, for monitoring and fault injection."""
        if self.driver is None:
            return {}
        services = self.driver.services
        handles: dict[str, list[Handle[Any]]] = {}
        for pool in services.pools:
            handles[pool.role] = [worker.handle for worker in pool.workers.values()]
        handles["policy"] = list(services.policy.ranks)
        return handles

    async def stop(self) -> None:
        """End as preempted.

        Finishes an update or checkpoint under way, abandons everything else, and saves.
        """
        self.stopping = True
        if self.driver is not None:
            self.driver.stop()


def progress(driver: Driver) -> tuple[int, int] | None:
    """The progress of the driver's phase: how many are done, and of how many.

    These are actors started, answers evaluated, or trajectories scored.
    """
    match driver.timings.phase:
        case "start":
            return driver.services.up, driver.services.wanted
        case "testing":
            return driver.runner.evaluation
        case "gen":
            rollouts = driver.rollouts
            groups = len(rollouts.in_flight) + len(rollouts.finished.groups)
            trajectories = groups * driver.config.algorithm.group_size
            return max(trajectories - driver.runner.running, 0), trajectories
    return None
