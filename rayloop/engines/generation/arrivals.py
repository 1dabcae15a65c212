"""How requests arrive at an engine that decodes batch by batch, and how long it therefore waits for the next one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import mean

FIRST = 0.05
"""Seconds to wait while nothing is known."""
SHORTEST = 0.002
SHARE = 0.25
"""Of what batches lately took: requests further apart are not taken for one batch's, and the wait is never longer."""
BATCHES = 8
"""What the last so many batches had between two requests is taken to be what may come between the next two."""


class Arrivals:
    """A batch that is not full starts when no request came for ``wait`` seconds: twice the longest pause of the last batches.

    A batch that starts too early leaves the rest to a second one, which takes nearly as long again; one that waits delays all. How
    long pauses and batches are depends on the machine, on what else it does and on how requests are put: so they are measured.
    """

    def __init__(self) -> None:
        self.wait = FIRST
        self._last = float("-inf")
        self._pauses: deque[float] = deque(maxlen=BATCHES)
        self._seconds: deque[float] = deque(maxlen=BATCHES)

    def decoded(self, arrivals: Sequence[float], seconds: float) -> None:
        """A batch of requests that arrived at these times, in seconds and in order, took so long. The pause before its first one
        counts when it was short: then that one just missed the batch before."""
        self._seconds.append(seconds)
        longest = SHARE * mean(self._seconds)
        pauses = [later - earlier for earlier, later in pairwise((self._last, *arrivals))]
        self._last = arrivals[-1]
        if known := [pause for pause in pauses if pause <= longest]:
            self._pauses.append(max(known))
            self.wait = min(max(2 * max(self._pauses), SHORTEST), max(longest, SHORTEST))
