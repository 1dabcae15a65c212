"""The Ray actor of the driver, with the methods that other processes call."""

import traceback
from collections.abc import Mapping
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
from rayloop.run.checkpoint import NOTHING, Origin
from rayloop.run.config import RunConfig
from rayloop.run.lock import OPEN, Fence
from rayloop.run.reporter import Reporter
from rayloop.view.words import doing


class DriverActor(Actor):
    """One asynchronous Ray actor per run, owned by the ``train`` process.

    ``folder``: the run folder, visible to all nodes; ``hashes``: of rayloop/run/identity.py;
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
    ) -> None:
        self.config, self.folder, self.hashes = config, folder, hashes
        # ``here``: a network file system may have another device number on the node of this actor.
        self.origin = Origin.of(
            Path(folder) / "checkpoints", resume, since, fence.here() if fence.number else fence
        )
        self.reporter = Reporter(config, Path(folder), open_logger)
        self.driver: Driver | None = None
        self.stopping = False

    def make(self, handle: Handle[LeasesEngines]) -> Driver:
        """The driver, which reads the data. ``handle`` is that of this actor."""
        services = TrainingServices(self.config, self.folder, self.reporter.event)
        return Driver(self.config, services, self.reporter, self.origin, handle, self.hashes)

    async def main(self) -> dict[str, Any]:
        """Make the driver here, since Ray strips a constructor's errors of their type, and return
        ``Driver.main``.
        """
        try:
            self.driver = self.make(ray.get_runtime_context().current_actor)
        except Exception as error:
            end = typed(error)
            self.reporter.failed(
                end,
                Ledger().counts(),
                traceback.format_exc() if isinstance(end, Unforeseen) else "",
            )
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
        """For environment actors: another engine for an episode whose request failed on engine
        ``lost``.
        """
        assert self.driver is not None
        return await self.driver.player.calls.replace_engine(episode, lost, why)

    async def about(self) -> RunConfig:
        """The run's configuration, for `policy serve`."""
        return self.config

    async def updates(self, since: int) -> tuple[int, list[tuple[str, Any]], str]:
        """For the console: the number of reports so far, those after the first ``since``, and the
        present activity.
        """
        driver = self.driver
        now = (
            doing("start", None)
            if driver is None
            else doing(driver.timings.phase, progress(driver))
        )
        return *self.reporter.updates.since(since), now

    async def workers(self) -> dict[str, list[Handle[Any]]]:
        """Live actor handles by role, for monitoring and fault injection."""
        if self.driver is None:
            return {}
        services = self.driver.services
        roles = {pool.role: [w.handle for w in pool.workers.values()] for pool in services.pools}
        return {**roles, "policy": list(services.policy.ranks)}

    async def stop(self) -> None:
        """End as preempted: finish an update or checkpoint under way, abandon everything else, and
        save.
        """
        self.stopping = True
        if self.driver is not None:
            self.driver.stop()


def progress(driver: Driver) -> tuple[int, int] | None:
    """The progress of the driver's phase, done and of how many: actors started, answers evaluated,
    or trajectories scored.
    """
    match driver.timings.phase:
        case "start":
            return driver.services.up, driver.services.wanted
        case "testing":
            return driver.player.evaluation
        case "gen":
            begun = (
                len(driver.rollouts.in_flight) + len(driver.rollouts.finished.groups)
            ) * driver.config.algorithm.group_size
            return max(begun - driver.player.playing, 0), begun
    return None
