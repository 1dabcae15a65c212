"""Numbers as people write them: one strict grammar, compared exactly.

What it does not understand completely is no quantity.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from rayloop.judge.rules.plain import MAGNITUDES, WHOLE, WORDS
from rayloop.judge.rules.question import Question

Relation = Literal["same", "different", "unclear"]
Form = Literal["digits", "word", "fraction", "power", "exponent"]

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(
    r"(?P<currency>[$€£¥]?) ?(?P<sign>[-+]?)(?P<currency2>[$€£¥]?)"
    rf"(?:(?P<top>[0-9]+)/(?P<bottom>[0-9]+)|(?P<number>{_DIGITS})"
    r"(?: ?[×x*·] ?10\^\{(?P<power>-?[0-9]{1,3})\}|[eE](?P<exponent>[-+]?[0-9]{1,3})(?![0-9]))?)"
    r"(?P<rest>[^\d]*(?:\^\{-?[0-9]\}[^\d]*){0,4})"
)
_UNIT = re.compile(r"(?:[^\W\d_]|[°%$€£¥])(?:[^\W\d_]|[°%$€£¥/·. ]|\^\{-?[0-9]\})*")
_WORD = re.compile(
    rf"({'|'.join(sorted(WORDS, key=len, reverse=True)).replace('-', '[- ]')})(?![\w'-])",
    re.IGNORECASE,
)
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
_SCALES: dict[str, tuple[str, Fraction]] = {
    unit: (dimension, Fraction(scale))
    for dimension, units in {
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
    }.items()
    for unit, scale in units.items()
}
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
_CURRENCIES = {"$", "€", "£", "¥"}
_MONEY_OR_SHARE = {*_CURRENCIES, "%"}
_MEASURED = {*_MONEY_OR_SHARE, "°", *_SCALES} - {"s", "min", "h"}
_NEAR = Fraction(1, 100)
"""A number that is missed by less may have been rounded or read off: no rule calls it wrong."""
_THOUSANDS = (10**3, 10**6, 10**9, 10**12)
_COUNTED_IN = (2, 12, 10**2, *_THOUSANDS, 10**5, 10**7)
_LONGEST = 100
_DECIMAL_OR_THOUSANDS = re.compile(r"[-+]?[1-9][0-9]{0,2}\.[0-9]{3}")


@dataclass(frozen=True, slots=True)
class Quantity:
    """``value`` in ``unit`` ("" for none), exactly as written.

    ``step`` is the unit of its last written digit.
    """

    value: Fraction
    unit: str
    form: Form
    step: Fraction
    digits: str
    """The text of the number alone."""

    @property
    def integer(self) -> bool:
        """Whether it is written as a whole number, to the last digit."""
        return self.step == 1 and self.form == "digits"

    @property
    def is_year(self) -> bool:
        """Whether it has four digits without unit and separator: a tolerance in per cent would mix
        up the years.
        """
        return (
            not self.unit and self.integer and len(self.digits) == 4 and 1000 <= self.value <= 2999
        )

    @property
    def is_code(self) -> bool:
        """Whether it has more than six digits in a row: the name of something, not a count."""
        return self.integer and len(self.digits.lstrip("+-")) > 6 and "," not in self.digits

    @property
    def is_ambiguous(self) -> bool:
        """Whether it may be read in two ways: 1.500 is fifteen hundred in half of the world."""
        return _DECIMAL_OR_THOUSANDS.fullmatch(self.digits) is not None


@lru_cache(maxsize=4096)
def quantity(text: str) -> Quantity | None:
    """The whole plain text (judge/rules/plain.py) as one quantity; None for any other text.

    Commas separate thousands. A number with zeros in front is a code, and no quantity.
    """
    if len(text) > _LONGEST:
        return None
    if text.casefold() in WHOLE:
        return Quantity(Fraction(WHOLE[text.casefold()]), "", "word", Fraction(1), text)
    word = _WORD.match(text)
    if word:
        text = f"{WORDS[word.group().casefold().replace(' ', '-')]}{text[word.end() :]}"

    found = _NUMBER.fullmatch(text)
    if (
        found is None
        or re.match(r"0[0-9,]", found["top"] or found["number"])
        or re.match(r"0", found["bottom"] or "")
    ):
        return None
    if found["number"] == "0" and re.match("[xXbBoO]", found["rest"]):
        return None  # hexadecimal
    if found["rest"] == "s" and found["number"] and found["number"].endswith("0"):
        return None  # a decade, or seconds

    rest = found["rest"].strip()
    magnitude = 0
    if (first := rest.partition(" ")[0]).casefold() in MAGNITUDES and not found["top"]:
        magnitude, rest = MAGNITUDES[first.casefold()], rest[len(first) :].strip()

    unit = _unit(rest)
    currency = found["currency"] or found["currency2"]
    if (
        unit is None
        or (found["currency"] and found["currency2"])
        or (currency and unit not in ("", currency))
    ):
        return None
    return _quantity(found, magnitude, currency or unit, "word" if word else "digits")


def first_number(text: str) -> float | None:
    """The first number anywhere in a text, in any script's decimal digits; commas separate
    thousands.
    """
    found = re.search(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d*\.?\d+)", text)
    return float(found.group().replace(",", "")) if found else None


def compare(reference: str, answer: str, question: Question, tolerance: float = 0.0) -> Relation:
    """Two plain texts that are one quantity each.

    Same only when they are equal however the question is meant. ``tolerance`` (relative, of the
    reference) is for numbers read off a chart: never for counts, years and codes.
    """
    wanted, got = quantity(reference), quantity(answer)
    if wanted is None or got is None or _other_meaning(wanted, got, question):
        return "unclear"
    # Angles a full turn apart have the same direction, and the question may mean just that.
    if (
        wanted.unit == got.unit
        and (wanted.value - got.value) % 360 == 0 != wanted.value - got.value
        and question.angles
    ):
        return "unclear"
    if (
        wanted.value * got.value < 0 and not question.blank
    ):  # "by how much did it fall" says the sign itself
        first, second = (
            replace(each, value=abs(each.value), digits=each.digits.lstrip("+-"))
            for each in (wanted, got)
        )
        return (
            "different"
            if _relation(first, second, question, tolerance) == "different"
            else "unclear"
        )
    return _relation(wanted, got, question, tolerance)


def _relation(wanted: Quantity, got: Quantity, question: Question, tolerance: float) -> Relation:
    if wanted.unit != got.unit:
        return _convert(wanted, got, question)
    if wanted.value == got.value:
        return "same" if _same_writing(wanted, got, question, tolerance) else "unclear"
    if "fraction" in (wanted.form, got.form) and not question.exact:
        return "unclear"
    # A float such as 0.05 is not exactly a twentieth: the margin keeps the border inside.
    if tolerance and abs(got.value - wanted.value) <= Fraction(tolerance) * abs(
        wanted.value
    ) * Fraction(1_000_001, 1_000_000):
        if wanted.is_year and question.asks_year:
            return "different"
        read_off = wanted.form == "digits" and (
            wanted.unit in _MONEY_OR_SHARE or "." in wanted.digits
        )
        return "same" if read_off and question.measured and not wanted.is_code else "unclear"
    return "unclear" if _may_agree(wanted, got, question, tolerance) else "different"


def _quantity(found: re.Match[str], magnitude: int, unit: str, form: Form) -> Quantity:
    sign = -1 if found["sign"] == "-" else 1
    if found["top"]:
        written = f"{found['top']}/{found['bottom']}"
        return Quantity(sign * Fraction(written), unit, "fraction", Fraction(0), written)
    scale = Fraction(10) ** (magnitude + int(found["power"] or found["exponent"] or 0))
    step = scale / 10 ** len(found["number"].partition(".")[2])
    if found["power"] or found["exponent"]:
        form = "power" if found["power"] else "exponent"
    digits = found["sign"] + found["number"]
    return Quantity(
        sign * Fraction(found["number"].replace(",", "")) * scale, unit, form, step, digits
    )


def _unit(text: str) -> str | None:
    """The unit's one spelling: singular, American, ``^{2}`` for squares, case kept in symbols; None
    for what is no unit.
    """
    if not text:
        return ""
    words = text.casefold().split()
    if (
        not _UNIT.fullmatch(text)
        or re.search("[¼-¾⅐-↏①-⓿]", text)
        or len(words) > 3
        or _NO_UNIT & set(words)
    ):
        return None
    text = " ".join(_word(word) for word in text.replace("°", "° ").replace("/", " / ").split())
    text = text.replace(" per ", "/").replace(" / ", "/").replace("° C", "°C").replace("° F", "°F")
    if squared := re.fullmatch(r"(square|sq\.?|cubic) (\S+)", text):
        power = 3 if squared.group(1) == "cubic" else 2
        return f"{_SPELLINGS.get(squared.group(2), squared.group(2))}^{{{power}}}"
    parts = [_SPELLINGS.get(part, part) for part in text.split("/")]
    return _SPELLINGS.get("/".join(parts), "/".join(parts))


def _word(word: str) -> str:
    """A unit that is written out in small letters, singular and American; symbols as they are."""
    if not word.isalpha() or len(word) < 5 or not (word.islower() or word.istitle()):
        return word
    word = word.lower().replace("metre", "meter").replace("litre", "liter")
    return word.removesuffix("s") if not word.endswith("ss") else word


def _other_meaning(wanted: Quantity, got: Quantity, question: Question) -> bool:
    """Whether the question may make one of the numbers something else: an option's number, a word,
    a time, a notation.
    """
    if question.numbered or (question.wording and "word" in (wanted.form, got.form)):
        return True
    if "fraction" in (wanted.form, got.form) and (question.codes or wanted.unit or got.unit):
        return True
    return (
        question.codes
        and wanted.value != got.value
        and not (wanted.integer and got.integer and not question.times)
    )


def _same_writing(wanted: Quantity, got: Quantity, question: Question, tolerance: float) -> bool:
    """Whether equal numbers are equal answers: 3.0 and 3 are, 1.10 and 1.1 may be versions, 5/6 and
    10/12 dates, 1E3 a code.
    """
    if wanted.form == got.form == "digits" and wanted.digits == got.digits:
        return True
    if (
        question.codes
        or question.wording
        or (question.forms and (wanted.form != got.form or wanted.step != got.step))
    ):
        return False
    if not question.exact and not tolerance and (wanted.is_ambiguous or got.is_ambiguous):
        return False
    plain = wanted.form == got.form == "digits" and not wanted.unit
    if plain and (wanted.is_code or got.is_code) and max(wanted.step, got.step) <= 1:
        return wanted.digits.replace(",", "") == got.digits.replace(",", "")
    a_value = question.number or (bool(tolerance) and not question.picks and not question.times)
    meant = a_value or wanted.unit in _MEASURED or "," in wanted.digits + got.digits
    if "fraction" in (wanted.form, got.form):
        return (
            question.exact
            and wanted.form != got.form
            and not question.picks
            and not question.holds(got.digits)
        )
    if (wanted.form == "exponent") != (got.form == "exponent") and not meant:
        return False
    return (
        meant or wanted.step == got.step or (wanted.value.denominator == 1 and not question.picks)
    )


def _convert(wanted: Quantity, got: Quantity, question: Question) -> Relation:
    """Other units: equal after conversion, or far from it.

    A unit that only one has is the question's matter.
    """
    currency = (wanted.unit or got.unit) if "" in (wanted.unit, got.unit) else ""
    if currency in _CURRENCIES:
        meant = (
            question.asks_money
            and question.currencies <= {currency}
            and not (wanted.is_ambiguous or got.is_ambiguous)
        )
        return "same" if meant and wanted.value == got.value and not question.codes else "unclear"
    if {wanted.unit, got.unit} == {"%", ""}:
        same = (
            question.names_percent
            and not question.names_points
            and wanted.value == got.value
            and abs(wanted.value) > 1
        )
        return "same" if same else "unclear"
    if wanted.unit not in _SCALES or got.unit not in _SCALES or question.codes:
        return "unclear"
    (dimension, scale), (other, other_scale) = _SCALES[wanted.unit], _SCALES[got.unit]
    left, right = wanted.value * scale, got.value * other_scale
    if dimension != other or "fraction" in (wanted.form, got.form):
        return "unclear"
    if (wanted.is_ambiguous or got.is_ambiguous) and not question.exact:
        return "unclear"
    if left == right:
        return (
            "unclear"
            if question.units or question.wording or question.holds(got.digits)
            else "same"
        )
    # Each may be rounded to its last digit, so a smaller difference proves nothing.
    coarse = max(wanted.step * scale, got.step * other_scale)
    return "unclear" if _close(left, right) or abs(left - right) <= coarse else "different"


def _may_agree(wanted: Quantity, got: Quantity, question: Question, tolerance: float) -> bool:
    """Whether different numbers may be the same answer: rounded, or in another notation, scale or
    numbering.
    """
    exact, forms = wanted.integer and got.integer, {wanted.form, got.form}
    difference, step = abs(wanted.value - got.value), max(wanted.step, got.step)
    rounded = not exact and (_close(wanted.value, got.value) or difference <= step / 2)
    other_notation = len(forms) == 2 and not forms <= {"digits", "word", "fraction"}
    other_commas = (
        forms == {"digits"} and step <= 1 and _readings(wanted.digits) & _readings(got.digits)
    )
    one_scaled = not wanted.unit and (wanted.step > 1) != (got.step > 1)
    share = min(abs(wanted.value), abs(got.value)) <= 1 and not exact and not wanted.unit
    lengths = sorted(len(number.digits) for number in (wanted, got))
    short_year = (
        exact and lengths == [2, 4] and difference % 100 == 0 and (wanted.is_year or got.is_year)
    )
    return bool(
        rounded
        or other_notation
        or other_commas
        or (one_scaled and wanted.digits.replace(",", "") == got.digits.replace(",", ""))
        or (share and _shifted(wanted.value, got.value, (100,)))
        or (short_year and (question.blank or question.names_year))
        or (question.times and difference == 12)
        or question.labels(wanted.digits, got.digits)
        or question.labels(got.digits, wanted.digits)
        or (question.roughly and max(wanted.value, got.value) <= 2 * min(wanted.value, got.value))
        or (
            tolerance
            and min(wanted.step, got.step) <= 1
            and _shifted(wanted.value, got.value, _THOUSANDS, Fraction(tolerance))
        )
        or (question.scales and _shifted(wanted.value, got.value))
    )


def _readings(digits: str) -> set[Fraction]:
    """The number with each way to read points and commas."""
    texts = {digits.replace(",", "")}
    if digits.count(",") == 1 and "." not in digits:
        texts.add(digits.replace(",", "."))
    if _DECIMAL_OR_THOUSANDS.fullmatch(digits):
        texts.add(digits.replace(".", ""))
    return {Fraction(text) for text in texts}


def _close(left: Fraction, right: Fraction, near: Fraction = _NEAR) -> bool:
    return abs(left - right) <= near * abs(left)


def _shifted(
    left: Fraction, right: Fraction, scales: Sequence[int] = _COUNTED_IN, near: Fraction = _NEAR
) -> bool:
    """One is the other in pairs, dozens, hundreds (or per cent), thousands, ... within a per cent."""
    return any(
        _close(left, right * scale, near) or _close(left * scale, right, near) for scale in scales
    )
