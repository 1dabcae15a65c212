"""Numbers as people write them: digits, words, fractions, percentages, magnitudes, currencies and units."""

from __future__ import annotations

import re
from dataclasses import dataclass

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_NUMBER = re.compile(
    rf"^(?P<currency>[$€£¥])?\s*(?P<sign>[-+−])?\s*(?P<currency2>[$€£¥])?\s*"
    rf"(?:\\d?frac\{{(?P<top>\d+)\}}\{{(?P<bottom>\d+)\}}|(?P<number>{_DIGITS})"
    r"(?:\s*/\s*(?P<over>\d+(?:\.\d+)?)|(?:\s*(?:x|×|\\times|\*)\s*10\^?\{?|e)(?P<power>[-+]?\d{1,3})\}?)?)"
    r"\s*(?P<rest>\\?[^\d]*(?:(?<=m)2|\^\{?2\}?)?)$",
    re.IGNORECASE,
)
_ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
WORDS = {
    **{word: float(i) for i, word in enumerate(_ONES)},
    **{ten: 10.0 * i for i, ten in enumerate(_TENS, 2)},
    **{f"{ten}-{one}": 10.0 * i + j for i, ten in enumerate(_TENS, 2) for j, one in enumerate(_ONES[1:10], 1)},
    "hundred": 100.0, "dozen": 12.0, "half": 0.5,
}  # fmt: skip
_WORD = re.compile(rf"(?:{'|'.join(sorted(WORDS, key=len, reverse=True)).replace('-', '[- ]')})\b")
_NO_UNIT = {"and", "or", "of", "to", "but", "not", "is", "a"}
_MAGNITUDES = {
    "hundred": 1e2, "k": 1e3, "thousand": 1e3, "million": 1e6, "mn": 1e6, "mio": 1e6, "billion": 1e9, "bn": 1e9, "trillion": 1e12,
}  # fmt: skip
_DIMENSIONS: dict[str, dict[str, float]] = {
    "length": {
        "mm": 1e-3, "cm": 1e-2, "m": 1, "km": 1e3, "inch": 0.0254, "in": 0.0254, "ft": 0.3048, "yd": 0.9144, "mi": 1609.344,
    },
    "mass": {"mg": 1e-6, "g": 1e-3, "kg": 1, "t": 1e3, "lb": 0.45359237, "oz": 0.028349523125},
    "time": {"ms": 1e-3, "s": 1, "min": 60, "h": 3600, "day": 86400, "week": 604800},
    "volume": {"ml": 1e-3, "cl": 1e-2, "dl": 0.1, "l": 1},
    "area": {"mm^2": 1e-6, "cm^2": 1e-4, "m^2": 1, "ha": 1e4, "km^2": 1e6},
    "speed": {"m/s": 1, "km/h": 1 / 3.6, "mph": 0.44704},
    "angle": {"deg": 1},
    "money": {},
}  # fmt: skip
_UNITS = {unit: (dimension, scale) for dimension, units in _DIMENSIONS.items() for unit, scale in units.items()}
_SPELLINGS = {
    "millimeter": "mm", "centimeter": "cm", "meter": "m", "kilometer": "km", "inche": "inch", "foot": "ft", "feet": "ft",
    "yard": "yd", "mile": "mi", "milligram": "mg", "gram": "g", "kilogram": "kg", "ton": "t", "tonne": "t", "pound": "lb",
    "lbs": "lb", "ounce": "oz", "millisecond": "ms", "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h",
    "milliliter": "ml", "centiliter": "cl", "deciliter": "dl", "liter": "l", "degree": "deg", "°": "deg", "'": "ft",
    "percent": "%", "pct": "%", "per cent": "%", "percentage": "%", "kmh": "km/h", "kph": "km/h", "dollar": "$", "usd": "$",
    "us$": "$", "euro": "€", "eur": "€", "gbp": "£",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Quantity:
    """``amount`` as written, in ``unit`` ("" for none); ``value`` is in the dimension's base unit and ``unit`` then names that."""

    amount: float
    unit: str = ""
    dimension: str = ""
    value: float = 0.0

    @property
    def is_year(self) -> bool:
        """Four digits without a unit: a tolerance in per cent would mix up the years."""
        return not self.unit and self.amount.is_integer() and 1000 <= self.amount <= 2999


def quantity(text: str) -> Quantity | None:
    """The whole text as one quantity, or None. Commas separate thousands."""
    text = text.strip().casefold().replace("−", "-").replace("\\%", "%")
    if word := _WORD.match(text):
        text = f"{WORDS[word.group().replace(' ', '-')]:g}{text[word.end() :]}"
    found = _NUMBER.match(text)
    amount = _amount(found) if found else None
    if found is None or amount is None:
        return None
    words = found["rest"].strip().rstrip(".").split()
    if words and words[0] in _MAGNITUDES:
        amount *= _MAGNITUDES[words.pop(0)]
    unit, currency = _unit(" ".join(words)), found["currency"] or found["currency2"]
    if (currency and unit not in ("", currency)) or len(words) > 3 or _NO_UNIT & set(words):
        return None
    return _in_base(amount, currency or unit)


def first_number(text: str) -> float | None:
    """The first number anywhere in a text."""
    found = re.search(rf"[-+]?(?:{_DIGITS})", text)
    return float(found.group().replace(",", "")) if found else None


def _amount(found: re.Match[str]) -> float | None:
    """The number that matched; None when it divides by zero."""
    top, bottom = (found["top"], found["bottom"]) if found["top"] else (found["number"], found["over"] or "1")
    if float(bottom) == 0:
        return None
    amount = float(top.replace(",", "")) / float(bottom) * 10.0 ** int(found["power"] or 0)
    return -amount if found["sign"] == "-" else amount


def _unit(text: str) -> str:
    """The unit's one spelling: singular, ``^2`` for squares, American."""
    text = re.sub(r"\\text\{(.*?)\}|\\mathrm\{(.*?)\}", lambda m: m.group(1) or m.group(2) or "", text)
    text = re.sub(r"[\s\\{}]+", " ", text.replace("litre", "liter").replace("metre", "meter")).strip()
    text = re.sub(r"(?:²|\^ ?2|(?<=m)2)$", "^2", text).replace(" per ", "/")
    if squared := re.fullmatch(r"(?:square|sq\.?) (.+)", text):
        return f"{_unit(squared.group(1))}^2"
    if over := re.fullmatch(r"(.+)/(.+)", text):
        return f"{_unit(over.group(1).strip())}/{_unit(over.group(2).strip())}"
    for spelling in (text, text.removesuffix("s")):
        if spelling in _UNITS:
            return spelling
        if spelling in _SPELLINGS:
            return _SPELLINGS[spelling]
    return text.removesuffix("s")


def _in_base(amount: float, unit: str) -> Quantity:
    if unit in ("$", "€", "£", "¥"):
        return Quantity(amount, unit, "money", amount)
    dimension, scale = _UNITS.get(unit, ("", 1.0))
    return Quantity(amount, dimension or unit, dimension, amount * scale)
