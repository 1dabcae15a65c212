"""How a step's groups become optimizer updates: epochs of mini-batches, cut at group boundaries, shuffled by seed."""

from __future__ import annotations

import random

from rayloop.core.seeds import derive
from rayloop.grpo.settings import UpdateSettings


def mini_batches(
    group_count: int, update: UpdateSettings, seed: int, step: int, nominal: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """One tuple of group indices (ascending) per optimizer update, over all epochs.

    Each epoch is a partition of ``range(group_count)`` into mini-batches whose sizes differ by at most one. A step with
    fewer groups than ``nominal`` (groups_per_step; None: no such rule) gets fewer mini-batches rather than tiny ones,
    and never more than it has groups.
    """
    count = min(update.mini_batches, group_count)
    if nominal is not None and group_count < nominal:
        count = min(count, max(1, update.mini_batches * group_count // nominal))
    updates: list[tuple[int, ...]] = []
    for epoch in range(update.epochs):
        order = list(range(group_count))
        random.Random(derive(seed, "mini_batches", step, epoch)).shuffle(order)
        updates.extend(tuple(sorted(order[i::count])) for i in range(count))
    return tuple(updates)
