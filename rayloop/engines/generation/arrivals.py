"""How long an engine that decodes batch by batch waits for the next request: from the pauses between earlier requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import mean

FIRST = 0.05
"""Seconds to wait before the first batch."""
SHORTEST = 0.002
SHARE = 0.25
"""Longest wait, as a share of the last batches' mean duration. Longer pauses separate batches and do not count."""
BATCHES = 8
"""Number of last batches whose pauses count."""


class Arrivals:
    """A batch that is not full starts when no request came for ``wait`` seconds: twice the longest pause of the last batches.

    A batch that starts too early leaves requests to a second batch, which takes nearly as long; a long wait delays all. Pauses and
    durations depend on the machine and its load, so the class measures them.
    """

    def __init__(self) -> None:
        self.wait = FIRST
        self._last = float("-inf")
        self._pauses: deque[float] = deque(maxlen=BATCHES)
        self._seconds: deque[float] = deque(maxlen=BATCHES)

    def decoded(self, arrivals: Sequence[float], seconds: float) -> None:
        """Count a batch that took ``seconds``, whose requests came at ``arrivals`` (seconds, ascending). A short pause before its
        first request counts: that request just missed the previous batch."""
        self._seconds.append(seconds)
        longest = SHARE * mean(self._seconds)
        pauses = [later - earlier for earlier, later in pairwise((self._last, *arrivals))]
        self._last = arrivals[-1]
        if known := [pause for pause in pauses if pause <= longest]:
            self._pauses.append(max(known))
            self.wait = min(max(2 * max(self._pauses), SHORTEST), max(longest, SHORTEST))
