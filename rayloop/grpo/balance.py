"""Cuts a step's groups into optimizer updates, and spreads the trajectories of each over the ranks.

Pure; no torch. A rank computes the common prompt of its trajectories once: groups stay whole, and
packed lengths are balanced.
"""

import heapq
import random
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple, Self

from rayloop.core.types import Summary, Trajectory, derive
from rayloop.grpo.settings import UpdateSettings

Place = tuple[int, int]
"""A trajectory: index of the group, and of the member in the group."""
Shares = tuple[tuple[Place, ...], ...]
"""The trajectories of each rank, ascending; empty where there are too few."""

WORTHWHILE_SHARE = 0.98
"""Groups are cut when that lowers the fullest rank's tokens to at most this share.

A cut is not free: it computes a prompt twice.
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
    """Tokens of a trajectory: ``prompt``, common to the group, and ``rest`` after it.

    What the segments of a trajectory have in common counts once, as it is computed.
    """

    prompt: int
    rest: int

    @classmethod
    def of(cls, summary: Summary) -> Self:
        """Returns the lengths of a trajectory."""
        prompt = summary.prompt_tokens
        return cls(prompt, summary.length - summary.repeated_tokens - prompt)


def repeated_tokens(trajectory: Trajectory, image_token: int | None) -> int:
    """Returns the tokens with which segments of a trajectory begin as the segment before does.

    They are computed once. ``image_token``: as ``Renderer.image_token``.
    """
    repeated = 0
    previous: list[int | str] = []
    for segment in trajectory.segments:
        tokens = chain.from_iterable(turn.token_ids for turn in segment.turns)
        # Image tokens are the same for all images, and their checksums are not.
        images = chain.from_iterable([image.sha256] * image.tokens for image in segment.images)
        content = [next(images, token) if token == image_token else token for token in tokens]
        for before, now in zip(previous, content, strict=False):
            if before != now:
                break
            repeated += 1
        previous = content
    return repeated


Groups = Sequence[Sequence[MemberLength]]


def shares(groups: Groups, world_size: int) -> Shares:
    """Returns whole groups per rank, or cut ones where these fill the ranks more evenly.

    Whole groups may be too few or too unequal.
    """
    whole_shares = whole_groups(groups, world_size)
    cut_shares = cut_groups(groups, world_size)
    worth_cutting = fullest(groups, cut_shares) <= WORTHWHILE_SHARE * fullest(groups, whole_shares)
    return cut_shares if worth_cutting else whole_shares


def packed(groups: Groups, share: Iterable[Place]) -> int:
    """Returns the tokens that a rank computes for ``share``.

    These are one prompt per group, and the rest of each trajectory.
    """
    prompts: dict[int, int] = {}
    rests = 0
    for group, member in share:
        length = groups[group][member]
        prompts.setdefault(group, length.prompt)
        rests += length.rest
    return sum(prompts.values()) + rests


def fullest(groups: Groups, rank_shares: Shares) -> int:
    """Returns the packed tokens of the fullest rank, for which all others wait."""
    return max(packed(groups, share) for share in rank_shares)


def whole_groups(groups: Groups, world_size: int) -> Shares:
    """Longest group first, each to the rank with the fewest tokens."""
    parts = [_places(group, members) for group, members in enumerate(groups)]
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
    """Cuts the row of all trajectories into one piece per rank.

    The longest piece is as short as possible.
    """
    row: list[Place] = []
    for group, members in enumerate(groups):
        row += _places(group, members)
    low = 0
    high = sum(sum(length) for length in chain(*groups))
    # Whether pieces of a length fit is monotonous, so bisection gives the shortest such length.
    while low < high:
        middle = (low + high) // 2
        if len(_pieces(groups, row, middle)) <= world_size:
            high = middle
        else:
            low = middle + 1
    pieces = _pieces(groups, row, high)
    ranks_without = world_size - len(pieces)
    return (*map(tuple, pieces), *[()] * ranks_without)


def _places(group: int, members: Sequence[MemberLength]) -> list[Place]:
    return [(group, member) for member in range(len(members))]


def _pieces(groups: Groups, row: Sequence[Place], most: int) -> list[list[Place]]:
    """The row in pieces of at most ``most`` packed tokens; a longer trajectory is one piece."""
    pieces: list[list[Place]] = []
    # The count starts above the limit, so that the first trajectory begins a piece.
    tokens = most + 1
    previous_group = -1
    for group, member in row:
        prompt, rest = groups[group][member]
        added = rest if group == previous_group else prompt + rest
        if tokens + added > most:
            pieces.append([])
            # A new piece is another rank, which computes the prompt again.
            tokens = 0
            added = prompt + rest
        pieces[-1].append((group, member))
        tokens += added
        previous_group = group
    return pieces
