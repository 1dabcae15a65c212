"""The words for numbers."""

from __future__ import annotations

_ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
WORDS = {
    **{word: i for i, word in enumerate(_ONES)},
    **{ten: 10 * i for i, ten in enumerate(_TENS, 2)},
    **{f"{ten}-{one}": 10 * i + j for i, ten in enumerate(_TENS, 2) for j, one in enumerate(_ONES[1:10], 1)},
}
MAGNITUDES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
"""Powers of ten."""
WHOLE = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6}
"""Words that are a number without another one before them, as in "a dozen"."""
NUMERALS = frozenset({*WORDS, *MAGNITUDES, *WHOLE})
