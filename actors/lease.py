"""A lease on a pooled worker, and generation through leases that outlives the loss of an engine."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from actors.handles import Handle, submit
from actors.lost import cause, is_lost, object_lost
from rayloop.core.types import Cohort, Completion, PlayRequest, Sampling, TokenPrompt

logger = logging.getLogger(__name__)


A_co = TypeVar("A_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Lease(Generic[A_co]):
    """The right to use one worker: its serial number in the pool, its actor handle, and its slot, which a replacement takes."""

    worker: int
    handle: Handle[A_co]
    slot: int = 0


class Engine(Protocol):
    """What an episode asks of a rollout actor."""

    async def generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        """Sample one turn."""
        ...

    async def leave(self, cohort: str) -> None:
        """One episode of the cohort will ask for no more turns."""
        ...


class LeasesEngines(Protocol):
    """The actor that owns the pools: the driver, or an evaluation's."""

    async def lease_engine(self, episode: str, lost: int, why: str) -> Lease[Engine]:
        """Another engine for an episode (``<trajectory>@<attempt>``) whose request failed on engine ``lost``."""
        ...


class LeasedEngine:
    """Generation for one episode: on the leased engine, and when that is lost on the next one that the driver leases.

    In deterministic mode (``request.cohort``) the requests of a group's first attempt are decoded as one batch; after a
    loss, or in a later attempt, the episode generates alone.
    """

    def __init__(
        self, request: PlayRequest, lease: Lease[Engine], driver: Handle[LeasesEngines], timeout: float
    ) -> None:
        self._lease, self._driver, self._timeout = lease, driver, timeout
        self._key = f"{request.id}@{request.attempt}"
        self._cohort: Cohort | None = None
        if request.cohort is not None and request.attempt == 0:
            self._cohort = Cohort(str(request.id.group), request.cohort)

    async def generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        """Sample one turn; the same prompt and seed are sent again elsewhere when an engine is lost.

        Raises what the engine raises, and what ``driver.lease_engine`` raises when no engine is left. That call has no
        deadline here: the driver bounds the wait for a replacement.
        """
        while True:
            sent = dataclasses.replace(prompt, cohort=self._cohort)
            try:
                async with asyncio.timeout(self._timeout):
                    return await submit(self._lease.handle, Engine.generate, sent, sampling)
            except Exception as error:
                if not (is_lost(error) or object_lost(error)):  # the answer, too, can be lost
                    raise
                logger.warning("episode %s lost engine %d: %r", self._key, self._lease.worker, error)
                self._cohort = None
                why = f"{type(cause(error)).__name__}: {cause(error)}".splitlines()[0]
                self._lease = await submit(self._driver, LeasesEngines.lease_engine, self._key, self._lease.worker, why)

    def leave(self) -> None:
        """The episode has ended: its cohort no longer waits for it."""
        if self._cohort is not None:
            submit(self._lease.handle, Engine.leave, self._cohort.key)
