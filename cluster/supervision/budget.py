"""How often a role may replace its actors.

Each slot has a budget, and the run ends when a role has no actor left.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from rayloop.core.failures import RolesExhausted
from rayloop.launch.restarts import REFILL_S, Budget
from rayloop.run.lifetime import RecoverySettings

LOOK_EVERY_S = 1.0
"""Minimum seconds between two looks at a role that is short of actors."""


def now() -> float:
    """Seconds of the event loop's clock."""
    return asyncio.get_running_loop().time()


class ReplacementBudget:
    """The ``size`` slots of a role, and the budget of each.

    ``why``: the last loss, or the last start that failed.
    """

    def __init__(self, role: str, size: int, settings: RecoverySettings) -> None:
        self.role = role
        self.size = size
        self.settings = settings
        self.why = ""
        self._budgets = [Budget(settings.replacements) for _ in range(size)]
        self._missing: set[int] = set()
        self._short: float | None = None
        self._trying: dict[int, float] = {}

    def lost(self, slot: int, why: object) -> None:
        """The slot has lost its actor."""
        self.why = str(why)
        self._missing.add(slot)
        if len(self._missing) == self.size and self._short is None:
            self._short = now()

    def served(self, slot: int) -> None:
        """The slot has an actor."""
        self._missing.discard(slot)
        self._short = None

    @contextmanager
    def trying(self, slot: int) -> Iterator[None]:
        """The slot may get an actor while the block lasts.

        The role is not given up during a block that began in time.
        """
        self._trying[slot] = now()
        try:
            yield
        finally:
            del self._trying[slot]

    async def afford(self, slot: int) -> None:
        """Wait until the slot's budget has a unit, and take it.

        Raises RolesExhausted when the role cannot be saved.
        """
        budget = self._budgets[slot]
        patience = self.settings.start_timeout
        while True:
            if self._hopeless():
                raise RolesExhausted(
                    f"the {self.role} role had fewer than 1 of {self.size} actors in service, and"
                    f" none came back within recovery.start_timeout ({patience:g} s);"
                    f" recovery.replacements allows {budget.per_hour} per slot and hour. The last"
                    f" loss: {self.why}; see events.jsonl for the others"
                )
            wait = budget.wait(now())
            if not wait:
                budget.take(now())
                return
            # A slot wakes early to see that the role cannot be saved. At the limit ``seconds_left``
            # is 0: without a minimum the loop would spin.
            seconds_left = REFILL_S if self._short is None else self._short + patience - now()
            await asyncio.sleep(min(wait, max(seconds_left, LOOK_EVERY_S)))

    def _hopeless(self) -> bool:
        """Whether the role has no actor and cannot get one in time.

        No start that is under way or affordable can change that.
        """
        if self._short is None:
            return False
        limit = self._short + self.settings.start_timeout
        # A start that began in time has its own deadline, and may succeed after the limit.
        if any(began < limit for began in self._trying.values()):
            return False
        shortest_wait = min(self._budgets[slot].wait(now()) for slot in self._missing)
        return now() + shortest_wait >= limit
