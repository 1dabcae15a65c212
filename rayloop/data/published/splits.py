"""The split that each row of a published data set is written to."""

import random
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from rayloop.core.failures import ConfigError
from rayloop.core.types import derive
from rayloop.data.published.options import PrepareOptions
from rayloop.data.published.source import ColumnMap, NewSplit

Row = dict[str, Any]
REST = "train"
"""The split of the rows that no other split asks for."""


def assigned_splits(
    how: ColumnMap, rows: Sequence[tuple[str, Row]], options: PrepareOptions
) -> list[str | None]:
    """The split that each (published split, row) is written to; None for a row that is left out."""
    if not options.new and (options.published or not how.make):
        return _samples_of_published(how, rows, options)
    count = len(rows)
    new = dict(options.new) or sizes(min(options.most or count, count), how.make)
    return _cut(how, [row for _, row in rows], new, options)


def _samples_of_published(
    how: ColumnMap, rows: Sequence[tuple[str, Row]], options: PrepareOptions
) -> list[str | None]:
    """Each row's own split where the row belongs to the sample of that split."""
    indices: dict[str, list[int]] = defaultdict(list)
    for index, (split, _) in enumerate(rows):
        indices[split].append(index)
    most = options.most or how.sample
    result: list[str | None] = [None] * len(rows)
    for split, places in indices.items():
        count = min(most or len(places), len(places))
        names = _cut(how, [rows[index][1] for index in places], {split: count}, options)
        for index, name in zip(places, names, strict=True):
            result[index] = name
    return result


def _cut(
    how: ColumnMap, rows: Sequence[Row], new: Mapping[str, int], options: PrepareOptions
) -> list[str | None]:
    if options.original:
        return in_order(len(rows), new)
    strata = [tuple(str(row.get(name)) for name in how.stratify) for row in rows]
    # With one split no two can share a picture, and single rows keep the shares closer.
    if how.together and len(new) != 1:
        groups = [str(row.get(how.together)) for row in rows]
    else:
        groups = [str(index) for index in range(len(rows))]
    return stratified(strata, groups, new, derive(options.seed, "splits"))


def sizes(count: int, make: Mapping[str, NewSplit]) -> dict[str, int]:
    """Rows of each split out of ``count``, ``train`` first.

    1200 with Arc Vision's shares make 900 train, 60 val, 240 test.
    """
    limits = {name: min(int(count * new.share), new.most or count) for name, new in make.items()}
    rest = count - sum(limits.values())
    return {REST: rest, **{name: size for name, size in limits.items() if name != REST}}


def in_order(count: int, wanted: Mapping[str, int]) -> list[str | None]:
    """The split of each row: the first ``wanted[split]`` rows, then the next split's.

    None stands for a row that no split takes.
    """
    result: list[str | None] = []
    for name, size in wanted.items():
        result += [name] * size
    result += [None] * (count - len(result))
    return result[:count]


def stratified(
    strata: Sequence[Hashable], groups: Sequence[Hashable], wanted: Mapping[str, int], seed: int
) -> list[str | None]:
    """The split of each row, with strata in equal shares and no group in two splits.

    None stands for a row that no split takes. A whole group goes to the split that lacks most of
    its strata (Sechidis et al., 2011). Raises ConfigError when rows are too few.
    """
    count = len(strata)
    total = sum(wanted.values())
    if total > count:
        raise ConfigError(f"{total} rows are wanted for {', '.join(wanted)}, and there are {count}")
    parts: dict[str | None, int] = {name: size for name, size in wanted.items() if size}
    if count > total:
        parts[None] = count - total
    lacks: dict[tuple[str | None, Hashable], float] = {}
    for stratum, rows_of_stratum in Counter(strata).items():
        for part, size in parts.items():
            lacks[part, stratum] = size * rows_of_stratum / count
    room = dict(parts)
    result: list[str | None] = [None] * count
    for rows in _shuffled_groups(groups, seed):

        def lack(part: str | None, rows: Sequence[int] = rows) -> tuple[bool, float]:
            missing = sum(lacks[part, strata[row]] for row in rows)
            return room[part] >= len(rows), missing / parts[part]

        best = max(parts, key=lack)
        room[best] -= len(rows)
        for row in rows:
            lacks[best, strata[row]] -= 1
            result[row] = best
    return result


def _shuffled_groups(groups: Sequence[Hashable], seed: int) -> list[list[int]]:
    """The rows of each group, the groups in an order that ``seed`` determines."""
    members: dict[Hashable, list[int]] = defaultdict(list)
    for row, group in enumerate(groups):
        members[group].append(row)
    order = sorted(members, key=str)
    random.Random(seed).shuffle(order)
    return [members[group] for group in order]
