"""Percentile bootstrap intervals over items (Efron, 1979). numpy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESAMPLES, LEVEL = 10_000, 95.0
PICKED = 2**22
"""Items that are picked at a time: what a resampling of many items needs of memory stays below 64 MiB."""
LEAST = 8
"""Items below which there is no interval: resamples of few items vary too little. A 95 % interval of normal values covers the mean
in 92 % of cases for 20 items, 89 % for 8, 79 % for 4, 51 % for 2, and never for 1."""

Interval = tuple[float, float | None, float | None]
"""Mean, lower and upper bound; no bounds for fewer than ``LEAST`` items."""


def interval(values: Sequence[float], seed: int = 0) -> Interval:
    """The mean of ``values`` with its 95 % interval over resampled items. Raises ValueError without values."""
    if not len(values):
        raise ValueError("no values: there is no mean")
    array = np.asarray(values, np.float64)
    if len(array) < LEAST:
        return float(array.mean()), None, None
    generator, means = np.random.default_rng(seed), np.empty(RESAMPLES)
    block = max(1, PICKED // len(array))
    for start in range(0, RESAMPLES, block):
        size = (min(block, RESAMPLES - start), len(array))
        means[start : start + block] = array[generator.integers(0, len(array), size, dtype=np.int32)].mean(axis=1)
    low, high = map(float, np.percentile(means, [(100 - LEVEL) / 2, (100 + LEVEL) / 2]))
    return float(array.mean()), low, high


def paired_interval(after: Sequence[float], before: Sequence[float], seed: int = 0) -> Interval:
    """The mean of ``after - before`` item by item, with its 95 % interval. Raises ValueError when the lengths differ."""
    if len(after) != len(before):
        raise ValueError(f"{len(after)} and {len(before)} values cannot be paired")
    return interval(np.subtract(after, before).tolist(), seed)
