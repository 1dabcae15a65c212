"""Cuts a step's groups into optimizer updates, and spreads the trajectories of each over the ranks.

Pure; no torch. A rank computes the common prompt of its trajectories once: groups stay whole, and
packed lengths are balanced.
"""

import heapq
import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

from rayloop.core.types import Summary, derive
from rayloop.grpo.settings import UpdateSettings

Place = tuple[int, int]
"""A trajectory: index of the group, and of the member in the group."""
Shares = tuple[tuple[Place, ...], ...]
"""The trajectories of each rank, ascending; empty where there are too few."""

WORTH = 0.98
"""Groups are cut when that lowers the fullest rank's tokens to at most this share: a cut computes a
prompt twice.
"""


def mini_batches(
    sizes: Sequence[int], update: UpdateSettings, seed: int, step: int, nominal: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """Returns a tuple of group indices (ascending) per optimizer update.

    ``sizes``: trajectories per group. Each epoch deals all groups in shuffled order, each to the
    mini-batch with the fewest trajectories so far. A step with fewer trajectories than ``nominal``
    (its target) gets fewer mini-batches, and never more than it has groups.
    """
    count = min(update.mini_batches, len(sizes))
    if nominal is not None and sum(sizes) < nominal:
        # Updates of a short step keep their usual number of
        # trajectories, instead of a few with more noise.
        count = min(count, max(1, update.mini_batches * sum(sizes) // nominal))
    updates: list[tuple[int, ...]] = []
    for epoch in range(update.epochs):
        order = list(range(len(sizes)))
        # The seed names step and epoch, so that a resumed run deals the same groups.
        random.Random(derive(seed, "mini_batches", step, epoch)).shuffle(order)
        dealt: list[list[int]] = [[] for _ in range(count)]
        filled = [0] * count
        for index in order:
            # Groups differ in size once filters have cut them, so trajectories are counted.
            least = filled.index(min(filled))
            dealt[least].append(index)
            filled[least] += sizes[index]
        updates.extend(tuple(sorted(part)) for part in dealt)
    return tuple(updates)


class MemberLength(NamedTuple):
    """Tokens of a trajectory: ``prompt``, common to the group, and ``rest`` after it."""

    prompt: int
    rest: int

    @classmethod
    def of(cls, summary: Summary) -> Self:
        """Returns the lengths of a trajectory."""
        return cls(summary.prompt_tokens, summary.length - summary.prompt_tokens)


Groups = Sequence[Sequence[MemberLength]]


def shares(groups: Groups, world_size: int) -> Shares:
    """Returns whole groups per rank; cut groups where whole ones are too few or too unequal to fill
    the ranks evenly.
    """
    whole, cut = whole_groups(groups, world_size), cut_groups(groups, world_size)
    return cut if fullest(groups, cut) <= WORTH * fullest(groups, whole) else whole


def packed(groups: Groups, share: Iterable[Place]) -> int:
    """Returns the tokens that a rank computes for ``share``: one prompt per group, and the rest of
    each trajectory.
    """
    share = tuple(share)
    prompts: dict[int, int] = {}
    for group, member in share:
        prompts.setdefault(group, groups[group][member].prompt)
    return sum(prompts.values()) + sum(groups[group][member].rest for group, member in share)


def fullest(groups: Groups, found: Shares) -> int:
    """Returns the packed tokens of the fullest rank, which all others wait for."""
    return max(packed(groups, share) for share in found)


def whole_groups(groups: Groups, world_size: int) -> Shares:
    """Longest group first, each to the rank with the fewest tokens."""
    parts = [
        [(group, member) for member in range(len(members))] for group, members in enumerate(groups)
    ]
    lengths = [packed(groups, part) for part in parts]
    # The rank's number breaks ties, and makes the result the same everywhere.
    ranks = [(0, rank) for rank in range(world_size)]
    dealt: list[list[Place]] = [[] for _ in ranks]
    # The longest come first (LPT), so that short groups fill up what long ones left uneven.
    for index in sorted(range(len(parts)), key=lambda i: (-lengths[i], i)):
        tokens, rank = ranks[0]
        heapq.heapreplace(ranks, (tokens + lengths[index], rank))
        dealt[rank] += parts[index]
    return tuple(tuple(sorted(share)) for share in dealt)


def cut_groups(groups: Groups, world_size: int) -> Shares:
    """Cuts the row of all trajectories into one piece per rank, so that the longest piece is as
    short as possible.
    """
    row = [
        (group, member) for group, members in enumerate(groups) for member in range(len(members))
    ]
    low, high = 0, sum(sum(length) for members in groups for length in members)
    # Whether pieces of a length fit is monotonous, so the shortest such length is found by halving.
    while low < high:
        middle = (low + high) // 2
        fits = len(_pieces(groups, row, middle)) <= world_size
        low, high = (low, middle) if fits else (middle + 1, high)
    pieces = _pieces(groups, row, high)
    return tuple(tuple(piece) for piece in (*pieces, *[[]] * (world_size - len(pieces))))


def _pieces(groups: Groups, row: Sequence[Place], most: int) -> list[list[Place]]:
    """The row in pieces of at most so many packed tokens; a longer trajectory is a piece of its
    own.
    """
    pieces: list[list[Place]] = []
    # It begins above what any piece may have, so that the first trajectory begins one.
    tokens, before = most + 1, -1
    for group, member in row:
        prompt, rest = groups[group][member]
        more = rest if group == before else prompt + rest
        if tokens + more > most:
            pieces.append([])
            # A new piece is another rank, which computes the prompt again.
            tokens, more = 0, prompt + rest
        pieces[-1].append((group, member))
        tokens, before = tokens + more, group
    return pieces
