"""Which of several ways to compute the same is fastest on this machine: timed in turn, in a fraction of a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

GAIN = 0.75
"""Another way than PyTorch's own is taken where it needs at most so much of its time: less may be chance, on cores that others use
too."""
ROUNDS = 20


def timed(ways: Mapping[str, Callable[[], object]], until: float) -> dict[str, float]:
    """Each way's best time in seconds. They run in turn until this moment of ``time.perf_counter``, at least twice and at most
    ``ROUNDS`` times, after one round that warms up.
    """
    best = dict.fromkeys(ways, float("inf"))
    for number in range(ROUNDS):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            taken = time.perf_counter() - began
            best[name] = min(best[name], taken) if number else best[name]
        if number >= 2 and time.perf_counter() >= until:
            break
    return best
