"""Units of measurement: their spellings, and the factors that convert between them."""

import re
from fractions import Fraction

from rayloop.judge.rules.plain import WORDS

_UNIT = re.compile(r"(?:[^\W\d_]|[°%$€£¥])(?:[^\W\d_]|[°%$€£¥/·. ]|\^\{-?[0-9]\})*")
_FRACTION_OR_CIRCLED_SIGN = re.compile("[¼-¾⅐-↏①-⓿]")
_POWER_IN_WORDS = re.compile(r"(square|sq\.?|cubic) (\S+)")
_MAX_UNIT_WORDS = 3
_MIN_WRITTEN_OUT_LETTERS = 5
_NO_UNIT = {
    "and",
    "or",
    "of",
    "to",
    "but",
    "not",
    "is",
    "a",
    "in",
    "out",
    "plus",
    "minus",
    "times",
    "half",
    "hundred",
    *WORDS,
}
"""Words that may follow a number and are not a unit."""
_FACTORS = {
    "length": {"mm": "1/1000", "cm": "1/100", "m": "1", "km": "1000"},
    "mass": {"mg": "1/1000000", "g": "1/1000", "kg": "1"},
    "time": {"s": "1", "min": "60", "h": "3600", "day": "86400"},
    "volume": {"mL": "1/1000", "L": "1"},
    "area": {
        "mm^{2}": "1/1000000",
        "cm^{2}": "1/10000",
        "m^{2}": "1",
        "ha": "10000",
        "km^{2}": "1000000",
    },
}


def _scales() -> dict[str, tuple[str, Fraction]]:
    scales = {}
    for dimension, factors in _FACTORS.items():
        for unit, factor in factors.items():
            scales[unit] = (dimension, Fraction(factor))
    return scales


SCALES = _scales()
"""Each unit's dimension, and its size in the base unit of the dimension."""
_SPELLINGS = {
    "millimeter": "mm",
    "centimeter": "cm",
    "meter": "m",
    "kilometer": "km",
    "milligram": "mg",
    "gram": "g",
    "kilogram": "kg",
    "second": "s",
    "sec": "s",
    "secs": "s",
    "minute": "min",
    "mins": "min",
    "hour": "h",
    "hr": "h",
    "hrs": "h",
    "days": "day",
    "milliliter": "mL",
    "ml": "mL",
    "liter": "L",
    "l": "L",
    "degree": "°",
    "deg": "°",
    "percent": "%",
    "pct": "%",
    "per cent": "%",
    "dollar": "$",
    "usd": "$",
    "USD": "$",
    "US$": "$",
    "euro": "€",
    "EUR": "€",
    "GBP": "£",
    "JPY": "¥",
    "yen": "¥",
    "kmh": "km/h",
    "kph": "km/h",
    "° celsius": "°C",
    "° fahrenheit": "°F",
    "celsius": "°C",
    "fahrenheit": "°F",
}
CURRENCIES = {"$", "€", "£", "¥"}
MONEY_OR_SHARE = {*CURRENCIES, "%"}
MEASURED = {*MONEY_OR_SHARE, "°", *SCALES} - {"s", "min", "h"}
"""Units of a measured value, without seconds, minutes and hours, which may be a time of day."""


def unit_symbol(text: str) -> str | None:
    """The one spelling of a unit; "" for an empty text, None for a text that is not a unit.

    The spelling is singular and American, with ``^{2}`` for squares. Symbols keep their case.
    """
    if not text:
        return ""
    if not _may_be_unit(text):
        return None

    tokens = text.replace("°", "° ").replace("/", " / ").split()
    text = " ".join(_singular(token) for token in tokens)
    text = text.replace(" per ", "/").replace(" / ", "/").replace("° C", "°C").replace("° F", "°F")

    power_in_words = _POWER_IN_WORDS.fullmatch(text)
    if power_in_words:
        adjective, base = power_in_words.groups()
        power = 3 if adjective == "cubic" else 2
        return f"{_SPELLINGS.get(base, base)}^{{{power}}}"

    symbols = "/".join(_SPELLINGS.get(part, part) for part in text.split("/"))
    return _SPELLINGS.get(symbols, symbols)


def _may_be_unit(text: str) -> bool:
    words = text.casefold().split()
    return (
        _UNIT.fullmatch(text) is not None
        and _FRACTION_OR_CIRCLED_SIGN.search(text) is None
        and len(words) <= _MAX_UNIT_WORDS
        and _NO_UNIT.isdisjoint(words)
    )


def _singular(word: str) -> str:
    """A unit that is written out in small letters, singular and American; symbols unchanged."""
    is_written_out = word.isalpha() and len(word) >= _MIN_WRITTEN_OUT_LETTERS
    if not is_written_out or not (word.islower() or word.istitle()):
        return word
    word = word.lower().replace("metre", "meter").replace("litre", "liter")
    return word if word.endswith("ss") else word.removesuffix("s")
