"""Which of several ways to compute the same is fastest on this machine: timed in turn, in a fraction of a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import TypeVar

K = TypeVar("K")

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


def medians(ways: Mapping[K, Callable[[], float]], seconds: float) -> dict[K, float]:
    """The median of the seconds that each way says it took: what it usually takes, others' work on these cores included. They run
    in turn for so long, at least three times and at most ``ROUNDS`` times, after one round that warms up.
    """
    until = time.perf_counter() + seconds
    took: dict[K, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS):
        for name, way in ways.items():
            spent = way()
            if number:
                took[name].append(spent)
        if number >= 3 and time.perf_counter() >= until:
            break
    return {name: median(times) for name, times in took.items()}
