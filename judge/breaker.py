"""A circuit breaker: after several failures in a row nothing is sent until a probe succeeds."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from enum import IntEnum

from rayloop.core.failures import RayloopError
from rayloop.judge.metrics import BREAKER

logger = logging.getLogger(__name__)


class BreakerState(IntEnum):
    """The states, with their values in the metric."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """Opens after ``failures`` in a row; then it awaits ``probe`` every ``interval`` seconds until that does not raise.

    ``probe`` raises RayloopError while the judge is not well, and ``on_failure`` is called with that error.
    """

    def __init__(
        self, failures: int, interval: float, probe: Callable[[], Awaitable[None]], on_failure: Callable[[Exception], None]
    ) -> None:
        self.failures, self.interval = failures, interval
        self._enter(BreakerState.CLOSED)
        self._row = 0
        self._probe, self._on_failure = probe, on_failure
        self._closed = asyncio.Event()
        self._closed.set()
        self._probing: asyncio.Task[None] | None = None

    async def closed(self) -> None:
        """Wait until it is closed."""
        await self._closed.wait()

    def succeeded(self) -> None:
        """Count from 0 again: a request succeeded."""
        self._row = 0

    def failed(self, error: Exception) -> None:
        """Count one more failure in a row, and open at the limit."""
        self._row += 1
        if self._row >= self.failures and self.state is BreakerState.CLOSED:
            logger.warning("no more requests go to the judge until its canary is judged right: %s", error)
            self._closed.clear()
            self._enter(BreakerState.OPEN)
            self._probing = asyncio.create_task(self._until_well())

    async def close(self) -> None:
        """End the probing."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)

    async def _until_well(self) -> None:
        while True:
            await asyncio.sleep(self.interval * random.uniform(0.75, 1.25))
            self._enter(BreakerState.HALF_OPEN)
            try:
                await self._probe()
            except RayloopError as error:
                self._on_failure(error)
                self._enter(BreakerState.OPEN)
            else:
                break
        self._row = 0
        self._enter(BreakerState.CLOSED)
        self._closed.set()
        logger.warning("the judge is well again")

    def _enter(self, state: BreakerState) -> None:
        self.state = state
        BREAKER.set(state)
