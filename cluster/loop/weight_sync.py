"""Weight sync to the rollout engines: docs/algorithm.md, section 10.

Whether the weights arrive is checked in weight_check.py.
"""

import asyncio
from collections.abc import Callable
from functools import cached_property
from typing import Any

from rayloop.actors.failures import brief, object_lost
from rayloop.actors.handles import Handle, submit
from rayloop.actors.rollout import RolloutActor
from rayloop.cluster.services import TrainingServices
from rayloop.cluster.supervision.policy_group import MIN_LOADING_TIMEOUT_S
from rayloop.cluster.supervision.pool import Calls
from rayloop.core import incidents
from rayloop.core.deadlines import Patience, with_deadline
from rayloop.core.failures import AnswerLate, PolicyLost
from rayloop.core.types import Version
from rayloop.run.config import RunConfig
from rayloop.run.reporter import Reporter
from rayloop.transports.seam import WeightTransport, WeightUpdate, transport

MIN_LOAD_TIMEOUT_S = 60.0
"""Seconds that a load may take in any case."""
MIN_BROADCAST_TIMEOUT_S = 120.0
"""Seconds that a load of a broadcast may take in any case."""


class WeightSync:
    """Brings the policy's weights into every engine.

    It is the ``rayloop.transports.seam.Rollouts`` of the transport.
    """

    def __init__(self, config: RunConfig, services: TrainingServices, reporter: Reporter) -> None:
        self.config = config
        self.services = services
        self.reporter = reporter
        self._current: WeightUpdate[Any] | None = None
        self._available = asyncio.Event()
        self._lost = asyncio.Event()
        self.update_lock = asyncio.Lock()
        """Held from the beginning of an update until its weights are synced."""
        self._loads = Patience(config.sync_timeout, MIN_LOAD_TIMEOUT_S)
        self._broadcasts = Patience(config.sync_timeout, MIN_BROADCAST_TIMEOUT_S)
        self._spares = True
        self._order = 0

    @cached_property
    def _transport(self) -> WeightTransport[Any]:
        return transport(self.config.transport, self.services.weights)

    async def send(self, version: Version) -> None:
        """Load ``version`` into all engines in service.

        Raises WeightSyncError, and PolicyLost when weights were lost.
        """
        try:
            # Ranks that share GPUs with the engines must be awake before they can gather weights.
            await self.services.colocation.to_policy()
            try:
                await self._transport.deliver(self.services.policy, self, version)
            except AnswerLate as late:
                await self._send_again(version, late)
        except Exception as error:
            if object_lost(error):
                # The driver recovers from PolicyLost: it rebuilds
                # the ranks and syncs the checkpoint's weights.
                raise PolicyLost(
                    f"the weights of version {version} were lost while they were synced:"
                    f" {brief(error)}"
                ) from error
            raise

    async def _send_again(self, version: Version, late: AnswerLate) -> None:
        """Export and load ``version`` once more. An engine that is late again is replaced.

        A transfer that a broken link interrupted may not continue, while a transfer of a new object
        does.
        """
        self.reporter.event(incidents.WeightsLost(str(version), why=brief(late)))
        self._spares = False
        try:
            await self.services.colocation.to_policy()
            await self._transport.deliver(self.services.policy, self, version)
        finally:
            self._spares = True

    @property
    def members(self) -> tuple[int, ...]:
        """Serial numbers of the engines in service."""
        return tuple(self.services.rollout.workers)

    @property
    def patience(self) -> float:
        """Seconds that the next load of a broadcast may take."""
        return self._broadcasts.seconds

    def keep(self, update: WeightUpdate[Any]) -> None:
        """New engines load this update after this call."""
        self._current = update
        self._lost.clear()
        self._available.set()

    async def load(self, update: WeightUpdate[Any]) -> None:
        """Load an update into every engine in service.

        Raises the first failure, when all loads have ended. An engine is late when it takes much
        longer than earlier loads. If it is late for the update of ``keep``, AnswerLate is raised,
        and the caller exports that version again. If it is late in a broadcast, it is replaced: the
        other engines cannot finish the broadcast without it.
        """
        await self.services.colocation.to_rollout()
        is_current = update is self._current
        patience = self._loads if is_current else self._broadcasts
        timeout = patience.seconds
        spares = is_current and self._spares and timeout < patience.longest
        now = asyncio.get_running_loop().time
        began = now()
        engines = Calls(self.services.rollout, timeout, spares=spares)
        # Before the calls: an engine then drops an older load whose source arrives late.
        self._order += 1
        await engines.everywhere(RolloutActor.load, update.manifest, update.source, self._order)
        seconds = now() - began
        # After the timeout, an engine was replaced.
        if seconds < timeout:
            patience.durations.append(seconds)

    def fell_back(self, version: Version, error: Exception) -> None:
        """Emit that the transport's fast path failed; a slower one follows."""
        self.reporter.event(incidents.BroadcastFailedEvent(str(version), why=brief(error)))

    async def admit(self, engine: Handle[RolloutActor]) -> None:
        """Load the current weights into a new engine, if there are any.

        Waits for other weights when these are lost.
        """
        timeout = self._loads.seconds
        loaded: WeightUpdate[Any] | None = None
        while self._current is not None and self._current is not loaded:
            # A newer update may have been kept during this
            # load, and an engine must not serve the older one.
            loaded = self._current
            try:
                await self._load_into(engine, loaded, timeout)
            except Exception as error:
                is_late = isinstance(error, AnswerLate) and timeout < self.config.sync_timeout
                if not (is_late or object_lost(error) or isinstance(error, PolicyLost)):
                    raise
                # A late transfer may not continue, while one of a new object does.
                # If that one is late as well, the engine is to blame.
                if is_late:
                    timeout = self.config.sync_timeout
                # Otherwise newer weights were kept during the load, and the loop loads them.
                if loaded is self._current:
                    await self._wait_for_resend(loaded, error)

    async def _load_into(
        self, engine: Handle[RolloutActor], update: WeightUpdate[Any], timeout: float
    ) -> None:
        """Load an update into a new engine."""
        if isinstance(update.source, asyncio.Task):
            # Several engines await this copy; without the
            # shield one deadline would cancel it for all.
            copy = asyncio.shield(update.source)
            update = await with_deadline(
                self._resend_timeout(), copy, "the copy of weights that are sent"
            )
        answer = submit(engine, RolloutActor.load, update.manifest, update.source, self._order)
        await with_deadline(timeout, answer, "load of a new rollout engine", engine)

    async def _wait_for_resend(self, update: WeightUpdate[Any], error: Exception) -> None:
        """Report an update that was lost, and wait until ``resend_lost`` has made another."""
        self._available.clear()
        self._lost.set()
        version = str(update.manifest.version)
        self.reporter.event(incidents.WeightsLost(version, why=brief(error)))
        await with_deadline(
            self._resend_timeout(),
            self._available.wait(),
            "weights in place of the lost ones",
        )

    def _resend_timeout(self) -> float:
        """Seconds in which the ranks can start and sync their weights."""
        return (
            max(self.config.recovery.start_timeout, MIN_LOADING_TIMEOUT_S)
            + self.config.sync_timeout
        )

    async def resend_lost(self, version: Callable[[], Version]) -> None:
        """Send weights again that were lost with their node, while the run continues.

        Raises PolicyLost when the ranks were on that node.
        """
        while True:
            await self._lost.wait()
            async with self.update_lock:
                # The update that held the lock may have replaced the lost weights already.
                if self._lost.is_set():
                    await self.send(version())
