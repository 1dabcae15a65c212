"""How the trajectories of one optimizer update are spread over the ranks. Pure and deterministic; no torch.

A rank computes a prompt that several of its trajectories begin with once (rayloop/grpo/packing.py). So groups stay whole, and what
is balanced are packed lengths: the prompt once, then what follows it in each trajectory.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rayloop.core.types import Summary

Place = tuple[int, int]
"""A trajectory: which group, and which member of it."""
Shares = tuple[tuple[Place, ...], ...]
"""For each rank its trajectories, ascending; nothing, where there are too few."""

WORTH = 0.98
"""Groups are cut where the fullest rank then has at most so much of its tokens: a cut computes a prompt twice."""


class Length(NamedTuple):
    """Tokens of a trajectory: of the prompt that it has in common with its group, and after it."""

    prompt: int
    rest: int

    @classmethod
    def of(cls, summary: Summary) -> Length:
        return cls(summary.prompt_tokens, summary.length - summary.prompt_tokens)


Groups = Sequence[Sequence[Length]]


def shares(groups: Groups, world_size: int) -> Shares:
    """Whole groups, or, where they are too few or too unequal to fill the ranks evenly, cut ones."""
    whole, cut = whole_groups(groups, world_size), cut_groups(groups, world_size)
    return cut if fullest(groups, cut) <= WORTH * fullest(groups, whole) else whole


def packed(groups: Groups, share: Iterable[Place]) -> int:
    """Tokens that a rank computes for its share: one prompt (its first) for each group that it has a part of."""
    share = tuple(share)
    prompts: dict[int, int] = {}
    for group, member in share:
        prompts.setdefault(group, groups[group][member].prompt)
    return sum(prompts.values()) + sum(groups[group][member].rest for group, member in share)


def fullest(groups: Groups, found: Shares) -> int:
    """Packed tokens of the rank that has most: all others wait for it."""
    return max(packed(groups, share) for share in found)


def whole_groups(groups: Groups, world_size: int) -> Shares:
    """Longest group first, each to the rank with the fewest tokens."""
    parts = [[(group, member) for member in range(len(members))] for group, members in enumerate(groups)]
    lengths = [packed(groups, part) for part in parts]
    ranks = [(0, rank) for rank in range(world_size)]
    dealt: list[list[Place]] = [[] for _ in ranks]
    for index in sorted(range(len(parts)), key=lambda i: (-lengths[i], i)):
        tokens, rank = ranks[0]
        heapq.heapreplace(ranks, (tokens + lengths[index], rank))
        dealt[rank] += parts[index]
    return tuple(tuple(sorted(share)) for share in dealt)


def cut_groups(groups: Groups, world_size: int) -> Shares:
    """All trajectories in a row, cut into one piece for each rank, so that the longest is as short as can be."""
    row = [(group, member) for group, members in enumerate(groups) for member in range(len(members))]
    low, high = 0, sum(sum(length) for members in groups for length in members)
    while low < high:
        middle = (low + high) // 2
        fits = len(_pieces(groups, row, middle)) <= world_size
        low, high = (low, middle) if fits else (middle + 1, high)
    pieces = _pieces(groups, row, high)
    return tuple(tuple(piece) for piece in (*pieces, *[[]] * (world_size - len(pieces))))


def _pieces(groups: Groups, row: Sequence[Place], most: int) -> list[list[Place]]:
    """The row in pieces of at most so many packed tokens; a longer trajectory is a piece of its own."""
    pieces: list[list[Place]] = []
    tokens, before = most + 1, -1
    for group, member in row:
        prompt, rest = groups[group][member]
        more = rest if group == before else prompt + rest
        if tokens + more > most:
            pieces.append([])
            tokens, more = 0, prompt + rest
        pieces[-1].append((group, member))
        tokens, before = tokens + more, group
    return pieces
