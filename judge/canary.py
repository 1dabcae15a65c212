"""The canary from the client's side: whether the judge judges right what nobody doubts, asked by one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rayloop.core.failures import InfrastructureFailure
from rayloop.judge.api import JudgeVerdict, Result
from rayloop.judge.labelled import Labelled
from rayloop.judge.metrics import CANARY
from rayloop.judge.transport import Transport

GOOD = 5.0
"""Seconds for which ``recent`` believes the last result."""


class Canary:
    """``right`` off: an answer is enough, whatever it says. ``hear`` is told what was answered."""

    def __init__(
        self, items: Sequence[Labelled], transport: Transport, right: bool, hear: Callable[[Sequence[Result]], None]
    ) -> None:
        self._items, self._transport, self._right, self._hear = items, transport, right, hear
        self._asking: asyncio.Task[None] | None = None
        self._ended = 0.0

    async def ask(self) -> None:
        """Who asks while one is under way waits for that one. Raises InfrastructureFailure unless all are right, ConfigError
        for an unusable key file.
        """
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
            self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())  # perhaps nobody waits any more
        await asyncio.shield(self._asking)

    async def recent(self) -> None:
        """Like ``ask``, but the last result is good for a few seconds: a burst of bad answers is no burst of canaries."""
        asked = self._asking
        if asked is not None and asked.done() and asyncio.get_running_loop().time() - self._ended < GOOD:
            asked.result()
        else:
            await self.ask()

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _ask(self) -> None:
        right = False
        try:
            results = await self._transport.judge([one.item for one in self._items])
            self._hear(results)
            wrong = [
                f"{one.id}: {result.verdict if isinstance(result, JudgeVerdict) else result.reason}"
                for one, result in zip(self._items, results, strict=True)
                if not isinstance(result, JudgeVerdict) or result.verdict != one.verdict
            ]
            if wrong and self._right:
                why = f"{len(wrong)} of {len(self._items)} canaries are judged wrong ({wrong[0]})"
                raise InfrastructureFailure(f"{self._transport.url}: {why}")
            right = True
        finally:
            CANARY.set(right)
            self._ended = asyncio.get_running_loop().time()
