"""Cuts a step's groups into optimizer updates: epochs of mini-batches, cut at group boundaries, shuffled by seed."""

import random
from collections.abc import Sequence

from rayloop.core.types import derive
from rayloop.grpo.settings import UpdateSettings


def mini_batches(
    sizes: Sequence[int], update: UpdateSettings, seed: int, step: int, nominal: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """Returns a tuple of group indices (ascending) per optimizer update. ``sizes``: trajectories per group. Each epoch deals all
    groups in shuffled order, each to the mini-batch with the fewest trajectories so far. A step with fewer trajectories than
    ``nominal`` (its target) gets fewer mini-batches, and never more than it has groups."""
    count = min(update.mini_batches, len(sizes))
    if nominal is not None and sum(sizes) < nominal:
        count = min(count, max(1, update.mini_batches * sum(sizes) // nominal))
    updates: list[tuple[int, ...]] = []
    for epoch in range(update.epochs):
        order = list(range(len(sizes)))
        random.Random(derive(seed, "mini_batches", step, epoch)).shuffle(order)
        dealt: list[list[int]] = [[] for _ in range(count)]
        filled = [0] * count
        for index in order:
            least = filled.index(min(filled))
            dealt[least].append(index)
            filled[least] += sizes[index]
        updates.extend(tuple(sorted(part)) for part in dealt)
    return tuple(updates)
