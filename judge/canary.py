"""The client's canary: items whose right verdict is known, with which it checks that the judge is well."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rayloop.core.failures import InfrastructureFailure
from rayloop.judge.api import JudgeVerdict, Result
from rayloop.judge.labelled import Labelled
from rayloop.judge.metrics import CANARY
from rayloop.judge.transport import JudgeConnection

GOOD = 5.0
"""Seconds for which ``recent`` reuses the last result."""


class Canary:
    """Asks the judge about ``items``. Unless ``right``, any verdict will do. ``on_results`` receives the results."""

    def __init__(
        self, items: Sequence[Labelled], connection: JudgeConnection, right: bool, on_results: Callable[[Sequence[Result]], None]
    ) -> None:
        self._items, self._connection, self._right, self._on_results = items, connection, right, on_results
        self._asking: asyncio.Task[None] | None = None
        self._ended = 0.0

    async def ask(self) -> None:
        """Check the judge, together with a check that is under way.

        Raises InfrastructureFailure unless all verdicts are right, ConfigError for an unusable key file.
        """
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
            self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen, though nobody may wait
        await asyncio.shield(self._asking)

    async def recent(self) -> None:
        """Like ``ask``, but a result of the last seconds counts: a burst of bad answers causes one check."""
        asked = self._asking
        if asked is not None and asked.done() and asyncio.get_running_loop().time() - self._ended < GOOD:
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
