"""The judge's health: a circuit breaker, and the canary, whose right verdicts are known."""

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
    """A circuit breaker that opens after ``failures`` in a row, until ``probe`` succeeds.

    It awaits ``probe`` every ``interval`` seconds. ``probe`` raises RayloopError while the judge is
    not well; ``on_failure`` receives that error.
    """

    def __init__(
        self,
        failures: int,
        interval: float,
        probe: Callable[[], Awaitable[None]],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self.failures = failures
        self.interval = interval
        self._enter(BreakerState.CLOSED)
        self._failures_in_row = 0
        self._probe = probe
        self._on_failure = on_failure
        self._closed = asyncio.Event()
        self._closed.set()
        self._probing: asyncio.Task[None] | None = None

    async def closed(self) -> None:
        """Wait until it is closed."""
        await self._closed.wait()

    def succeeded(self) -> None:
        """Count from 0 again: a request succeeded."""
        self._failures_in_row = 0

    def failed(self, error: Exception) -> None:
        """Count one more failure in a row, and open at the limit."""
        self._failures_in_row += 1
        if self._failures_in_row >= self.failures and self.state is BreakerState.CLOSED:
            logger.warning("requests to the judge stop until its canary is judged right: %s", error)
            self._closed.clear()
            self._enter(BreakerState.OPEN)
            self._probing = asyncio.create_task(self._probe_until_well())

    async def close(self) -> None:
        """End the probing."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)

    async def _probe_until_well(self) -> None:
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
        self._failures_in_row = 0
        self._enter(BreakerState.CLOSED)
        self._closed.set()
        logger.warning("the judge is well again")

    def _enter(self, state: BreakerState) -> None:
        self.state = state
        BREAKER.set(state)


_REUSE_S = 5.0
"""Seconds for which ``recent`` reuses the last result."""


class Canary:
    """Asks the judge about ``items``.

    Unless ``right``, any verdict is accepted. ``on_results`` receives the results.
    """

    def __init__(
        self,
        items: Sequence[Labelled],
        connection: JudgeConnection,
        right: bool,
        on_results: Callable[[Sequence[Result]], None],
    ) -> None:
        self._items = items
        self._connection = connection
        self._right = right
        self._on_results = on_results
        self._check: asyncio.Task[None] | None = None
        self._check_time = 0.0

    async def ask(self) -> None:
        """Check the judge, once for all callers.

        Raises InfrastructureFailure for wrong verdicts, ConfigError for the key file.
        """
        if self._check is None or self._check.done():
            self._check = asyncio.create_task(self._ask())
            # Without a reader of the exception asyncio would log it.
            self._check.add_done_callback(lambda task: task.cancelled() or task.exception())
        # A caller that is cancelled must not end the check for the others.
        await asyncio.shield(self._check)

    async def recent(self) -> None:
        """Like ``ask``, but a result of the last seconds counts.

        A burst of bad answers causes one check.
        """
        check = self._check
        age = asyncio.get_running_loop().time() - self._check_time
        if check is not None and check.done() and age < _REUSE_S:
            check.result()
        else:
            await self.ask()

    async def close(self) -> None:
        """End a check that is running."""
        if self._check is not None:
            self._check.cancel()
            await asyncio.gather(self._check, return_exceptions=True)

    async def _ask(self) -> None:
        is_right = False
        try:
            results = await self._connection.judge([labelled.item for labelled in self._items])
            self._on_results(results)
            errors = [
                _error(labelled, result)
                for labelled, result in zip(self._items, results, strict=True)
                if not isinstance(result, JudgeVerdict) or result.verdict != labelled.verdict
            ]
            if errors and self._right:
                raise InfrastructureFailure(
                    f"{self._connection.url}: {len(errors)} of {len(self._items)} canaries are"
                    f" judged wrong ({errors[0]})"
                )
            is_right = True
        finally:
            CANARY.set(is_right)
            self._check_time = asyncio.get_running_loop().time()


def _error(labelled: Labelled, result: Result) -> str:
    verdict = result.verdict if isinstance(result, JudgeVerdict) else result.reason
    return f"{labelled.id}: {verdict}"
