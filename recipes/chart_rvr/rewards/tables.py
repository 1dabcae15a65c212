"""A policy's table against the true one.

Columns are found by their headers, rows are aligned in their order, each cell is compared in its
place.
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
_MAX_VALUE_CHARACTERS = 200
"""Characters of an answer that is read as a number, mark-up or a list.

Longer ones are compared as they are.
"""
_CACHE_ENTRIES = 65_536


@dataclass(frozen=True)
class Number:
    """A number exactly as it is written: ``value`` in ``unit`` ("" for none).

    ``bare``: digits alone, as a year is written.
    """

    value: Fraction
    unit: str = ""
    bare: bool = False


def number(text: str) -> Number | None:
    """The whole text as one number: 12, -0.5, 1,000, 10 %, $5, 1.2 million, 7 kg.

    None for anything else.
    """
    return _number(text) if len(text) <= _MAX_VALUE_CHARACTERS else None


@lru_cache(_CACHE_ENTRIES)
def _number(text: str) -> Number | None:
    if _PLAIN.fullmatch(text) and text.isascii():
        whole, _, decimals = text.partition(".")
        value = Fraction(int(f"{whole}{decimals}"), 10 ** len(decimals))
        return Number(value, bare=whole.isdigit() and not decimals)
    amount = quantity(readable(text))
    if amount is None:
        return None
    return Number(amount.value, amount.unit, amount.integer and "," not in amount.digits)


def readable(text: str) -> str:
    """One spelling of a text: mark-up, blanks, final punctuation and case do not count."""
    if len(text) > _MAX_VALUE_CHARACTERS:
        return " ".join(text.split()).casefold()
    return _readable(text)


@lru_cache(_CACHE_ENTRIES)
def _readable(text: str) -> str:
    return plain(text).casefold()


def same_answer(said: str, true: str, tolerance: Fraction, years: tuple[int, int]) -> bool:
    """Relaxed accuracy.

    A number is right within ``tolerance`` (a share), a year exactly, a list item by item, and
    anything else by its text.
    """
    if said == true:
        return True
    true_number = number(true)
    if true_number is not None:
        said_number = number(said)
        is_year = true_number.bare and years[0] <= true_number.value <= years[1]
        share = Fraction(0) if is_year else tolerance
        return said_number is not None and same_number(said_number, true_number, share)
    if len(true) <= _MAX_VALUE_CHARACTERS and true.startswith("[") and true.endswith("]"):
        said_items = _items(said)
        true_items = _items(true)
        if len(said_items) != len(true_items):
            return False
        pairs = zip(said_items, true_items, strict=True)
        return all(same_answer(item, true_item, tolerance, years) for item, true_item in pairs)
    return readable(said) == readable(true)


def same_cell(said: str, true: str) -> bool:
    """The same number, however it is written, or the same text."""
    if said == true or said.casefold() == true.casefold():
        return True
    true_number = number(true)
    said_number = number(said)
    if true_number is None and said_number is None:
        return readable(said) == readable(true)
    if true_number is None or said_number is None:
        return False
    return same_number(said_number, true_number, Fraction(0))


def same_number(said: Number, true: Number, tolerance: Fraction) -> bool:
    """A missing unit equals the other number's unit.

    A percentage may also equal a bare number as a share: 50 % is 0.5.
    """
    if said.unit and true.unit and said.unit != true.unit:
        return False
    if _is_near(said.value, true.value, tolerance):
        return True
    # The units differ, so one is "%" and the other number is bare.
    if said.unit == "%" and not true.unit:
        return _is_near(said.value / 100, true.value, tolerance)
    if true.unit == "%" and not said.unit:
        return _is_near(said.value, true.value / 100, tolerance)
    return False


def _is_near(value: Fraction, true: Fraction, tolerance: Fraction) -> bool:
    return abs(value - true) <= tolerance * abs(true)


def _items(text: str) -> list[str]:
    inside = text.strip().removeprefix("[").removesuffix("]")
    return [item.strip() for item in inside.split(",")]


MOST_CELLS = 250_000
"""Cells that are compared for an alignment.

The rows of a table far larger than the true one are compared by their places.
"""


def shares(said: Table, true: Table) -> tuple[float, float]:
    """Shares of the true headers and of the true cells in the policy's table, 0..1.

    One beyond the true number takes back the pay of a right one.
    """
    places = _places(said.columns, true.columns)
    headers = _share(len(places), len(said.columns), len(true.columns))
    right = _aligned(said.rows, true.rows, places)
    cells = _share(right, sum(map(len, said.rows)), sum(map(len, true.rows)))
    return headers, cells


def _share(right: int, said: int, true: int) -> float:
    """The paid share of ``true`` entries; 1 when both tables have none."""
    if not true:
        return float(not said)
    surplus = max(0, said - true)
    return max(0, right - surplus) / true


def _places(said: Sequence[str], true: Sequence[str]) -> Mapping[int, int]:
    """True column -> the policy's column with the same header, each used once.

    Case and blanks do not count.
    """
    unused = [_header(name) for name in said]
    places = {}
    for i, name in enumerate(true):
        header = _header(name)
        if header in unused:
            places[i] = unused.index(header)
            unused[places[i]] = ""
    return places


def _header(name: str) -> str:
    """A header for comparison. It is never empty, so that "" can mark one that is used."""
    return " ".join(name.casefold().split()) or " "


def _aligned(
    said: Sequence[Sequence[str]], true: Sequence[Sequence[str]], places: Mapping[int, int]
) -> int:
    """Most right cells over all ways to match rows without crossing.

    A row of either table may have no match.
    """
    if not places or not said or not true:
        return 0

    # Equal rows at both ends are matched at once: the rest costs the product of its lengths.
    full = len(places)
    start = 0
    said_end = len(said)
    true_end = len(true)
    while start < min(said_end, true_end) and _right(said[start], true[start], places) == full:
        start += 1
    right = full * start
    while start < min(said_end, true_end):
        if _right(said[said_end - 1], true[true_end - 1], places) != full:
            break
        said_end -= 1
        true_end -= 1
        right += full
    said = said[start:said_end]
    true = true[start:true_end]
    if len(said) * len(true) * full > MOST_CELLS:
        pairs = zip(said, true, strict=False)
        return right + sum(_right(row, true_row, places) for row, true_row in pairs)
    # best[j]: the most right cells of the policy's rows so far and the first j true rows.
    best = [0] * (len(true) + 1)
    for row in said:
        former = best
        best = [0]
        for j, true_row in enumerate(true):
            matched = former[j] + _right(row, true_row, places)
            best.append(max(former[j + 1], best[j], matched))
    return right + best[-1]


def _right(said: Sequence[str], true: Sequence[str], places: Mapping[int, int]) -> int:
    """The number of right cells in a row; ``places``: true column -> the policy's column."""
    count = 0
    for true_column, column in places.items():
        in_both = true_column < len(true) and column < len(said)
        if in_both and same_cell(said[column], true[true_column]):
            count += 1
    return count
