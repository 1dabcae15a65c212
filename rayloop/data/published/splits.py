"""Which row goes into which split: in order, or shuffled so that every split has the same shares of each kind of row."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence

from rayloop.core.failures import ConfigError
from rayloop.data.published.column_map import NewSplit

REST = "train"
"""The split that takes what no other asks for."""


def sizes(count: int, make: Mapping[str, NewSplit]) -> dict[str, int]:
    """Rows of each split out of ``count``, ``train`` first: 1200 with Arc Vision's shares make 900 train, 60 val, 240 test."""
    taken = {name: min(int(count * new.share), new.most or count) for name, new in make.items()}
    return {REST: count - sum(taken.values()), **{name: size for name, size in taken.items() if name != REST}}


def in_order(count: int, wanted: Mapping[str, int]) -> list[str | None]:
    """The split of each row: the first ``wanted[split]`` rows, then those of the next split; None for rows left over."""
    names = [name for name, size in wanted.items() for _ in range(size)][:count]
    return [*names, *[None] * (count - len(names))]


def stratified(strata: Sequence[Hashable], groups: Sequence[Hashable], wanted: Mapping[str, int], seed: int) -> list[str | None]:
    """The split of each row, at random: each stratum in the same shares, no group in two splits; None for rows left over.

    A whole group goes to the split that lacks most, as a share of what it shall have, of the group's strata (after Sechidis et al.,
    2011, with one group at a time). So a split's size is what was wanted, up to a group's size. Raises ConfigError when more rows
    are wanted than there are.
    """
    count, total = len(strata), sum(wanted.values())
    if total > count:
        raise ConfigError(f"{total} rows are wanted for {', '.join(wanted)}, and there are {count}")
    parts: dict[str | None, int] = {name: size for name, size in wanted.items() if size}
    if count > total:
        parts[None] = count - total
    of = Counter(strata)
    lacks = {(part, stratum): size * of[stratum] / count for part, size in parts.items() for stratum in of}
    members: dict[Hashable, list[int]] = defaultdict(list)
    for row, group in enumerate(groups):
        members[group].append(row)
    order = sorted(members, key=str)
    random.Random(seed).shuffle(order)
    room, result = dict(parts), list[str | None]([None] * count)
    for group in order:
        rows = members[group]

        def lack(part: str | None, rows: Sequence[int] = rows) -> tuple[bool, float]:
            return room[part] >= len(rows), sum(lacks[part, strata[row]] for row in rows) / parts[part]

        best = max(parts, key=lack)
        room[best] -= len(rows)
        for row in rows:
            lacks[best, strata[row]] -= 1
            result[row] = best
    return result
