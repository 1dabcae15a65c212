"""A policy's table against the true one: columns found by their headers, rows aligned in their
order, each cell in its place.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from rayloop.judge.rules.plain import plain
from rayloop.judge.rules.quantities import quantity
from rayloop.recipes.chart_rvr.rewards.reading import Table

_PLAIN = re.compile(r"[-+]?(?:\d{1,15}(?:\.\d{1,15})?|\.\d{1,15})")
_LONGEST = 200
"""Characters of an answer that are looked at for a number, mark-up or a list: longer ones are
compared as they are.
"""
_REMEMBERED = 65_536


@dataclass(frozen=True, slots=True)
class Number:
    """Exactly as written: ``value`` in ``unit`` ("" for none).

    ``bare``: digits alone, as a year is written.
    """

    value: Fraction
    unit: str = ""
    bare: bool = False


def number(text: str) -> Number | None:
    """The whole text as one number: 12, -0.5, 1,000, 10 %, $5, 1.2 million, 7 kg.

    None for anything else.
    """
    return _number(text) if len(text) <= _LONGEST else None


@lru_cache(_REMEMBERED)
def _number(text: str) -> Number | None:
    if _PLAIN.fullmatch(text) and text.isascii():
        whole, _, digits = text.partition(".")
        return Number(
            Fraction(int(f"{whole}{digits}"), 10 ** len(digits)),
            bare=whole.isdigit() and not digits,
        )
    found = quantity(readable(text))
    return (
        None
        if found is None
        else Number(found.value, found.unit, found.integer and "," not in found.digits)
    )


def readable(text: str) -> str:
    """One spelling of a text: mark-up, blanks, final punctuation and case do not count."""
    return _readable(text) if len(text) <= _LONGEST else " ".join(text.split()).casefold()


@lru_cache(_REMEMBERED)
def _readable(text: str) -> str:
    return plain(text).casefold()


def same_answer(said: str, true: str, tolerance: Fraction, years: tuple[int, int]) -> bool:
    """Relaxed accuracy: a number within ``tolerance`` (a share), a year exactly, a list item by
    item, others by their text.
    """
    if said == true:
        return True
    wanted = number(true)
    if wanted is not None:
        exact = wanted.bare and years[0] <= wanted.value <= years[1]
        got = number(said)
        return got is not None and same_number(got, wanted, Fraction(0) if exact else tolerance)
    if len(true) <= _LONGEST and true.startswith("[") and true.endswith("]"):
        mine, theirs = _items(said), _items(true)
        return len(mine) == len(theirs) and all(
            same_answer(a, b, tolerance, years) for a, b in zip(mine, theirs, strict=True)
        )
    return readable(said) == readable(true)


def same_cell(said: str, true: str) -> bool:
    """The same number, however it is written, or the same text."""
    if said == true or said.casefold() == true.casefold():
        return True
    wanted, got = number(true), number(said)
    if wanted is None or got is None:
        return wanted is None and got is None and readable(said) == readable(true)
    return same_number(got, wanted, Fraction(0))


def same_number(said: Number, true: Number, tolerance: Fraction) -> bool:
    """A missing unit equals the other number's unit.

    ``%`` beside a bare number may also be a share: 50 % is 0.5.
    """
    if said.unit and true.unit and said.unit != true.unit:
        return False
    values = [(said.value, true.value)]
    if "%" in (said.unit, true.unit) and said.unit != true.unit:
        values.append(
            (said.value / 100, true.value) if said.unit else (said.value, true.value / 100)
        )
    return any(abs(got - wanted) <= tolerance * abs(wanted) for got, wanted in values)


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.strip().removeprefix("[").removesuffix("]").split(",")]


MOST = 250_000
"""Cells that are compared for an alignment; beyond (a table far larger than the true one) rows are
compared by their places.
"""


def shares(said: Table, true: Table) -> tuple[float, float]:
    """Shares of the true headers and cells that are there, 0..1.

    One beyond the true number takes back what a right one is paid.
    """
    places = _places(said.columns, true.columns)
    headers = _share(len(places), len(said.columns), len(true.columns))
    right = _aligned(said.rows, true.rows, places)
    return headers, _share(right, sum(map(len, said.rows)), sum(map(len, true.rows)))


def _share(right: int, said: int, true: int) -> float:
    return float(not said) if not true else max(0, right - max(0, said - true)) / true


def _places(said: Sequence[str], true: Sequence[str]) -> Mapping[int, int]:
    """True column -> the policy's column of the same header, each used once; case and blanks do not
    count.
    """
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


def _aligned(
    said: Sequence[Sequence[str]], true: Sequence[Sequence[str]], places: Mapping[int, int]
) -> int:
    """Most right cells over all ways to match rows without crossing; a row may be missing or too
    many.
    """
    if not places or not said or not true:
        return 0

    # Equal rows at both ends are matched at once: the rest costs the product of its lengths.
    full = len(places)
    start, said_end, true_end = 0, len(said), len(true)
    while start < min(said_end, true_end) and _right(said[start], true[start], places) == full:
        start += 1
    right = full * start
    while (
        min(said_end, true_end) > start
        and _right(said[said_end - 1], true[true_end - 1], places) == full
    ):
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
    return sum(
        i < len(true) and k < len(said) and same_cell(said[k], true[i]) for i, k in places.items()
    )
