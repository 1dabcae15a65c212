"""Whether the judge is well: a circuit breaker, and the canary, whose right verdicts are known."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from enum import IntEnum

from rayloop.core.failures import InfrastructureFailure, RayloopError
from rayloop.judge.api import JudgeVerdict, Result
from rayloop.judge.rubric import Labelled
from rayloop.judge.transport import BREAKER, CANARY, JudgeConnection

logger = logging.getLogger(__name__)


class BreakerState(IntEnum):
    """The states, with their values in the metric."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """Opens after ``failures`` in a row, until ``probe`` succeeds, which it awaits every
    ``interval`` seconds. ``probe`` raises RayloopError while the judge is not well; ``on_failure``
    receives that error.
    """

    def __init__(
        self,
        failures: int,
        interval: float,
        probe: Callable[[], Awaitable[None]],
        on_failure: Callable[[Exception], None],
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
            logger.warning("requests to the judge stop until its canary is judged right: %s", error)
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
            # With jitter, or all clients of a judge would probe it in the same moment.
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


GOOD = 5.0
"""Seconds for which ``recent`` reuses the last result."""


class Canary:
    """Asks the judge about ``items``.

    Unless ``right``, any verdict will do. ``on_results`` receives the results.
    """

    def __init__(
        self,
        items: Sequence[Labelled],
        connection: JudgeConnection,
        right: bool,
        on_results: Callable[[Sequence[Result]], None],
    ) -> None:
        self._items, self._connection, self._right, self._on_results = (
            items,
            connection,
            right,
            on_results,
        )
        self._asking: asyncio.Task[None] | None = None
        self._ended = 0.0

    async def ask(self) -> None:
        """Check the judge, once for all callers.

        Raises InfrastructureFailure for wrong verdicts, ConfigError for the key file.
        """
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
            self._asking.add_done_callback(
                lambda task: task.cancelled() or task.exception()
            )  # marks it as seen
        # A caller that is cancelled must not end the check for the others.
        await asyncio.shield(self._asking)

    async def recent(self) -> None:
        """Like ``ask``, but a result of the last seconds counts: a burst of bad answers causes one
        check.
        """
        asked = self._asking
        if (
            asked is not None
            and asked.done()
            and asyncio.get_running_loop().time() - self._ended < GOOD
        ):
            asked.result()
        else:
            await self.ask()

    async def close(self) -> None:
        """End a check that is under way."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _ask(self) -> None:
        right = False
        try:
            results = await self._connection.judge([one.item for one in self._items])
            self._on_results(results)
            wrong = [
                f"{one.id}: {result.verdict if isinstance(result, JudgeVerdict) else result.reason}"
                for one, result in zip(self._items, results, strict=True)
                if not isinstance(result, JudgeVerdict) or result.verdict != one.verdict
            ]
            if wrong and self._right:
                why = f"{len(wrong)} of {len(self._items)} canaries are judged wrong ({wrong[0]})"
                raise InfrastructureFailure(f"{self._connection.url}: {why}")
            right = True
        finally:
            CANARY.set(right)
            self._ended = asyncio.get_running_loop().time()
