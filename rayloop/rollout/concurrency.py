"""How many episodes play at once: as many as the engines' caches hold, and no more that would only queue or push others out."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from rayloop.core.protocols import EngineHealth

FULL = 0.9
"""Share of an engine's cache from which on requests that wait mean that there are too many episodes."""
GROWTH = 1.25
"""Factor between two looks, while every admitted episode fits."""


class ConcurrencyLimit:
    """A limit without a setting: infinite, or what is given, until an engine's cache is full and requests wait for room in it.

    Engines without a cache that can run out (``EngineHealth.cache`` None) never set it.
    """

    def __init__(self, limit: float = math.inf) -> None:
        self.limit = limit
        self.inside = 0
        self.metrics: dict[str, float] = {}
        """What the engines said last."""
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    @asynccontextmanager
    async def room(self, episodes: int = 1) -> AsyncIterator[None]:
        """For so many episodes, which are let in together. Waits until there is room for one of them; first come, first served."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, episodes))
        self._let_in()
        try:
            await turn
            yield
        finally:
            if turn.cancelled():
                self._waiting = deque(other for other in self._waiting if other[0] is not turn)
            else:
                self.inside -= episodes
            self._let_in()

    def observe(self, engines: Sequence[EngineHealth]) -> None:
        """Adapt the limit to what the engines say: down to the episodes that they really decode, up by ``GROWTH``."""
        caches = [engine.cache for engine in engines if engine.cache is not None]
        if not caches:
            return
        running, waiting = sum(engine.running for engine in engines), sum(engine.waiting for engine in engines)
        self.metrics = {"rollout/cache": max(caches), "rollout/waiting": float(waiting)}
        if waiting and max(caches) >= FULL:
            self.limit = max(len(caches), math.floor(self.inside * running / (running + waiting)))
        elif not waiting and max(caches) < FULL and self.inside >= self.limit:
            self.limit = math.ceil(self.limit * GROWTH)
            self._let_in()
        if self.limit < math.inf:
            self.metrics["rollout/in_flight_limit"] = float(self.limit)

    def _let_in(self) -> None:
        while self._waiting and self.inside < self.limit:
            turn, episodes = self._waiting.popleft()
            if not turn.done():
                self.inside += episodes
                turn.set_result(None)
