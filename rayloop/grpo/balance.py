"""How the trajectories of one optimizer update are spread over the ranks. Pure and deterministic; no torch."""

from __future__ import annotations

from collections.abc import Sequence


def shares(lengths: Sequence[int], world_size: int) -> tuple[tuple[int, ...], ...]:
    """Token-balanced shares: longest first, each to the rank with the fewest tokens. Returns indices per rank, ascending.

    A share is empty when there are fewer trajectories than ranks.
    """
    loads = [0] * world_size
    taken: list[list[int]] = [[] for _ in range(world_size)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min(range(world_size), key=lambda r: (loads[r], r))
        loads[rank] += lengths[index]
        taken[rank].append(index)
    return tuple(tuple(sorted(share)) for share in taken)
