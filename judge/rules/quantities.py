"""Numbers as people write them: one strict grammar, read exactly.

A text that the grammar does not cover completely is not a quantity.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from rayloop.judge.rules.plain import MAGNITUDES, WHOLE, WORDS
from rayloop.judge.rules.units import unit_symbol

Form = Literal["digits", "word", "fraction", "power", "exponent"]

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(
    r"(?P<currency>[$€£¥]?) ?(?P<sign>[-+]?)(?P<currency2>[$€£¥]?)"
    rf"(?:(?P<top>[0-9]+)/(?P<bottom>[0-9]+)|(?P<number>{_DIGITS})"
    r"(?: ?[×x*·] ?10\^\{(?P<power>-?[0-9]{1,3})\}|[eE](?P<exponent>[-+]?[0-9]{1,3})(?![0-9]))?)"
    r"(?P<rest>[^\d]*(?:\^\{-?[0-9]\}[^\d]*){0,4})"
)
_WORD = re.compile(
    rf"({'|'.join(sorted(WORDS, key=len, reverse=True)).replace('-', '[- ]')})(?![\w'-])",
    re.IGNORECASE,
)
_LEADING_ZERO = re.compile(r"0[0-9,]")
_HEXADECIMAL_MARK = re.compile("[xXbBoO]")
_FIRST_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d*\.?\d+)")
_DECIMAL_OR_THOUSANDS = re.compile(r"[-+]?[1-9][0-9]{0,2}\.[0-9]{3}")
_MAX_CHARACTERS = 100


@dataclass(frozen=True)
class Quantity:
    """``value`` in ``unit`` ("" for none), exactly as written.

    ``step`` is the unit of its last written digit.
    """

    value: Fraction
    unit: str
    form: Form
    step: Fraction
    digits: str
    """The text of the number without its unit."""

    @property
    def integer(self) -> bool:
        """Whether it is written as a whole number, to the last digit."""
        return self.step == 1 and self.form == "digits"

    @property
    def is_year(self) -> bool:
        """Whether it has four digits without unit and separator.

        A tolerance in per cent would mix up the years.
        """
        is_bare_integer = not self.unit and self.integer
        return is_bare_integer and len(self.digits) == 4 and 1000 <= self.value <= 2999

    @property
    def is_code(self) -> bool:
        """Whether it has more than six digits in a row: the name of something, not a count."""
        return self.integer and len(self.digits.lstrip("+-")) > 6 and "," not in self.digits

    @property
    def is_ambiguous(self) -> bool:
        """Whether it may be read in two ways: 1.500 is fifteen hundred in half of the world."""
        return _DECIMAL_OR_THOUSANDS.fullmatch(self.digits) is not None

    @property
    def digits_without_commas(self) -> str:
        """The text of the number without separators of thousands."""
        return self.digits.replace(",", "")

    @property
    def readings(self) -> set[Fraction]:
        """The values of its digits with each way to read points and commas."""
        texts = {self.digits_without_commas}
        if self.digits.count(",") == 1 and "." not in self.digits:
            texts.add(self.digits.replace(",", "."))
        if self.is_ambiguous:
            texts.add(self.digits.replace(".", ""))
        return {Fraction(text) for text in texts}


@lru_cache(maxsize=4096)
def quantity(text: str) -> Quantity | None:
    """The whole plain text (judge/rules/plain.py) as one quantity; None for any other text.

    Commas separate thousands. A number with zeros in front is a code, and not a quantity.
    """
    if len(text) > _MAX_CHARACTERS:
        return None
    whole_number = WHOLE.get(text.casefold())
    if whole_number is not None:
        return Quantity(Fraction(whole_number), "", "word", Fraction(1), text)
    word = _WORD.match(text)
    if word:
        word_value = WORDS[word.group().casefold().replace(" ", "-")]
        text = f"{word_value}{text[word.end() :]}"

    number = _NUMBER.fullmatch(text)
    if number is None or _is_code_or_decade(number):
        return None

    rest = number["rest"].strip()
    magnitude = 0
    first_word = rest.partition(" ")[0]
    if first_word.casefold() in MAGNITUDES and not number["top"]:
        magnitude = MAGNITUDES[first_word.casefold()]
        rest = rest[len(first_word) :].strip()

    unit = unit_symbol(rest)
    currency = number["currency"] or number["currency2"]
    has_two_currencies = number["currency"] and number["currency2"]
    if unit is None or has_two_currencies or (currency and unit not in ("", currency)):
        return None
    return _quantity(number, magnitude, currency or unit, "word" if word else "digits")


def _is_code_or_decade(number: re.Match[str]) -> bool:
    """Whether the digits have zeros in front, are hexadecimal, or name a decade (or seconds)."""
    if _LEADING_ZERO.match(number["top"] or number["number"]):
        return True
    if number["bottom"] and number["bottom"].startswith("0"):
        return True
    if number["number"] == "0" and _HEXADECIMAL_MARK.match(number["rest"]):
        return True
    return bool(number["rest"] == "s" and number["number"] and number["number"].endswith("0"))


def _quantity(number: re.Match[str], magnitude: int, unit: str, form: Form) -> Quantity:
    sign = -1 if number["sign"] == "-" else 1
    if number["top"]:
        fraction = f"{number['top']}/{number['bottom']}"
        return Quantity(sign * Fraction(fraction), unit, "fraction", Fraction(0), fraction)

    if number["power"]:
        form = "power"
    elif number["exponent"]:
        form = "exponent"
    scale = Fraction(10) ** (magnitude + int(number["power"] or number["exponent"] or 0))
    decimals = number["number"].partition(".")[2]
    step = scale / 10 ** len(decimals)
    value = sign * Fraction(number["number"].replace(",", "")) * scale
    return Quantity(value, unit, form, step, number["sign"] + number["number"])


def first_number(text: str) -> float | None:
    """The first number anywhere in a text, in any script's decimal digits.

    Commas separate thousands.
    """
    number = _FIRST_NUMBER.search(text)
    return float(number.group().replace(",", "")) if number else None
