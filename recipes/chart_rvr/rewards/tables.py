"""A policy's table against the true one: columns found by their headers, rows aligned in their order, each cell in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rayloop.recipes.chart_rvr.rewards.reading import Table
from rayloop.recipes.chart_rvr.rewards.values import same_cell

MOST = 250_000
"""Cells that are compared for an alignment; beyond (a table far larger than the true one) rows are compared by their places."""


def shares(said: Table, true: Table) -> tuple[float, float]:
    """Shares of the true headers and of the true cells that are there, each 0..1, normalised by the true table's size.

    A header or cell beyond the true number takes back what a right one is paid, so listing more never pays.
    """
    places = _places(said.columns, true.columns)
    headers = _share(len(places), len(said.columns), len(true.columns))
    right = _aligned(said.rows, true.rows, places)
    return headers, _share(right, said.cells, true.cells)


def _share(right: int, said: int, true: int) -> float:
    if not true:
        return float(not said)
    return max(0, right - max(0, said - true)) / true


def _places(said: Sequence[str], true: Sequence[str]) -> Mapping[int, int]:
    """True column -> the policy's column of the same header, each used once; case and blanks do not count."""
    left = [_header(name) for name in said]
    places = {}
    for i, name in enumerate(true):
        if (wanted := _header(name)) in left:
            places[i] = left.index(wanted)
            left[places[i]] = ""  # used
    return places


def _header(name: str) -> str:
    """Never empty, so that "" can mark one that is used."""
    return " ".join(name.casefold().split()) or " "


def _aligned(said: Sequence[Sequence[str]], true: Sequence[Sequence[str]], places: Mapping[int, int]) -> int:
    """Most right cells over all ways to match rows without crossing; a row may be missing or too many."""
    if not places or not said or not true:
        return 0
    full = len(places)
    start, said_end, true_end = 0, len(said), len(true)
    while start < min(said_end, true_end) and _right(said[start], true[start], places) == full:
        start += 1
    right = full * start
    while min(said_end, true_end) > start and _right(said[said_end - 1], true[true_end - 1], places) == full:
        said_end, true_end, right = said_end - 1, true_end - 1, right + full
    said, true = said[start:said_end], true[start:true_end]
    if len(said) * len(true) * full > MOST:
        return right + sum(_right(a, b, places) for a, b in zip(said, true, strict=False))
    best = [0] * (len(true) + 1)
    for row in said:
        before = best
        best = [0]
        for j, wanted in enumerate(true):
            best.append(max(before[j + 1], best[j], before[j] + _right(row, wanted, places)))
    return right + best[-1]


def _right(said: Sequence[str], true: Sequence[str], places: Mapping[int, int]) -> int:
    return sum(i < len(true) and k < len(said) and same_cell(said[k], true[i]) for i, k in places.items())
