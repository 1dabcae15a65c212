"""A budget that is a rate: units an hour, which come back with time (a token bucket). The caller passes the time."""

from __future__ import annotations

import math

HOUR = 3600.0
"""Seconds in which an empty budget is full again."""


class Budget:
    """``per_hour`` units at most, full at first; one comes back every ``HOUR / per_hour`` seconds.

    ``now`` is any clock in seconds that never goes back.
    """

    def __init__(self, per_hour: int) -> None:
        self.per_hour = per_hour
        self._left, self._at = float(per_hour), -math.inf

    def left(self, now: float) -> float:
        """Units left, fractions included."""
        since = 0.0 if self._at == -math.inf else now - self._at
        return min(float(self.per_hour), self._left + since * self.per_hour / HOUR)

    def wait(self, now: float) -> float:
        """Seconds until a unit is left: 0 when one is, infinity for a budget of 0."""
        if not self.per_hour:
            return math.inf
        return max(0.0, (1.0 - self.left(now)) * HOUR / self.per_hour)

    def take(self, now: float) -> None:
        """Take one unit. Raises ValueError when none is left: ``wait`` first."""
        left = self.left(now)
        if left < 0.99:  # a sleep may end a moment early
            raise ValueError(f"the budget of {self.per_hour} an hour has {left:.3f} left")
        self._left, self._at = max(0.0, left - 1.0), now
