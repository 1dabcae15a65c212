"""Rules for a reference and an answer that are numbers in the same unit.

Equal numbers may be different answers, and different numbers may be the same answer: each rule
names one way in which that happens, and has a pair of texts as its example.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from rayloop.judge.rules.quantities import Form, Quantity
from rayloop.judge.rules.question import Question
from rayloop.judge.rules.units import MEASURED

Relation = Literal["same", "different", "unclear"]

_NEAR = Fraction(1, 100)
"""Numbers this near may be one that was rounded or read off, unless both are whole."""
_PER_CENT = (100,)
_POWERS_OF_THOUSAND = (10**3, 10**6, 10**9, 10**12)
_COUNTED_IN = (2, 12, 10**2, *_POWERS_OF_THOUSAND, 10**5, 10**7)
"""Pairs, dozens, hundreds (or per cent), thousands, ..., lakhs and crores."""
_CLOCK_HOURS = 12
_YEARS_PER_CENTURY = 100


@dataclass(frozen=True)
class NumberPair:
    """A reference and an answer that are one quantity each, and the question they belong to."""

    reference: Quantity
    answer: Quantity
    question: Question
    tolerance: float = 0.0
    """Relative, of the reference, for numbers read off a chart; 0 compares exactly."""

    @property
    def forms(self) -> set[Form]:
        """The forms in which the two are written."""
        return {self.reference.form, self.answer.form}

    @property
    def in_digits(self) -> bool:
        """Whether both are written in digits alone."""
        return self.forms == {"digits"}

    @property
    def integers(self) -> bool:
        """Whether both are written as whole numbers."""
        return self.reference.integer and self.answer.integer

    @property
    def is_ambiguous(self) -> bool:
        """Whether one of them may be read in two ways."""
        return self.reference.is_ambiguous or self.answer.is_ambiguous

    @property
    def difference(self) -> Fraction:
        """The distance between the two values."""
        return abs(self.reference.value - self.answer.value)

    @property
    def step(self) -> Fraction:
        """The coarser of the two last digits."""
        return max(self.reference.step, self.answer.step)

    @property
    def same_digits(self) -> bool:
        """Whether both have the same digits, apart from separators of thousands."""
        return self.reference.digits_without_commas == self.answer.digits_without_commas

    def scaled(self, scales: Sequence[int] = _COUNTED_IN, near: Fraction = _NEAR) -> bool:
        """Whether one value is the other in one of the scales, within the share ``near``."""
        first = self.reference.value
        second = self.answer.value
        return any(
            close(first, second * scale, near) or close(first * scale, second, near)
            for scale in scales
        )


def close(left: Fraction, right: Fraction, near: Fraction = _NEAR) -> bool:
    """Whether two values differ by at most the share ``near`` of the first."""
    return abs(left - right) <= near * abs(left)


@dataclass(frozen=True)
class RuleExample:
    """A reference and an answer on which a rule decides, and what the judge knows besides."""

    reference: str
    answer: str
    question: str = ""
    tolerance: float = 0.0
    exact: bool = False


@dataclass(frozen=True)
class PairRule:
    """One named reason why a pair of numbers has the relation ``outcome``."""

    name: str
    outcome: Relation
    applies: Callable[[NumberPair], bool]
    example: RuleExample


def relation_of_equal_values(pair: NumberPair) -> Relation:
    """Whether equal numbers are equal answers: 3.0 and 3 are, 1.10 and 1.1 may be versions."""
    return _first_outcome(EQUAL_VALUE_RULES, pair, otherwise="unclear")


def relation_of_different_values(pair: NumberPair) -> Relation:
    """Whether different numbers are different answers, or may be the same: rounded, or scaled."""
    return _first_outcome(DIFFERENT_VALUE_RULES, pair, otherwise="different")


def _first_outcome(rules: Sequence[PairRule], pair: NumberPair, otherwise: Relation) -> Relation:
    for rule in rules:
        if rule.applies(pair):
            return rule.outcome
    return otherwise


# Equal values


def _is_same_text(pair: NumberPair) -> bool:
    return pair.in_digits and pair.reference.digits == pair.answer.digits


def _may_be_code_or_name(pair: NumberPair) -> bool:
    return pair.question.codes or pair.question.wording


def _may_have_required_form(pair: NumberPair) -> bool:
    """The question may ask for the form in which one of them is written."""
    same_form = pair.reference.form == pair.answer.form
    same_step = pair.reference.step == pair.answer.step
    return pair.question.forms and not (same_form and same_step)


def _may_be_read_in_two_ways(pair: NumberPair) -> bool:
    return not pair.question.exact and not pair.tolerance and pair.is_ambiguous


def _has_long_code(pair: NumberPair) -> bool:
    may_be_code = pair.in_digits and not pair.reference.unit and pair.step <= 1
    return may_be_code and (pair.reference.is_code or pair.answer.is_code)


def _is_long_code_with_commas(pair: NumberPair) -> bool:
    return _has_long_code(pair) and pair.same_digits


def _has_fraction(pair: NumberPair) -> bool:
    return "fraction" in pair.forms


def _is_value_of_fraction(pair: NumberPair) -> bool:
    """A formula's value as a fraction and as a decimal, which the question does not give itself."""
    question = pair.question
    other_form = pair.reference.form != pair.answer.form
    may_be_choice = question.picks or question.holds(pair.answer.digits)
    return _has_fraction(pair) and question.exact and other_form and not may_be_choice


def _is_measured(pair: NumberPair) -> bool:
    """Both are values of something, so that the zeros at their end do not count."""
    question = pair.question
    read_off = bool(pair.tolerance) and not question.picks and not question.times
    has_commas = "," in pair.reference.digits or "," in pair.answer.digits
    return question.number or read_off or pair.reference.unit in MEASURED or has_commas


def _has_one_exponent(pair: NumberPair) -> bool:
    """1E3 may be a code, unless a value is meant."""
    one_exponent = (pair.reference.form == "exponent") != (pair.answer.form == "exponent")
    return one_exponent and not _is_measured(pair)


def _has_same_step(pair: NumberPair) -> bool:
    return pair.reference.step == pair.answer.step


def _is_whole_value(pair: NumberPair) -> bool:
    return pair.reference.value.denominator == 1 and not pair.question.picks


EQUAL_VALUE_RULES = (
    PairRule(
        "same text", "same", _is_same_text, RuleExample("1.10", "1.10", "Which version is it?")
    ),
    PairRule(
        "code or name",
        "unclear",
        _may_be_code_or_name,
        RuleExample("1.10", "1.1", "Which version is it?"),
    ),
    PairRule(
        "required form",
        "unclear",
        _may_have_required_form,
        RuleExample("0.50", "0.5", "Round the value to two decimals."),
    ),
    PairRule("two readings", "unclear", _may_be_read_in_two_ways, RuleExample("1.500", "1.5")),
    PairRule(
        "long number with commas",
        "same",
        _is_long_code_with_commas,
        RuleExample("1234567", "1,234,567"),
    ),
    PairRule("long code", "unclear", _has_long_code, RuleExample("1234567", "+1234567")),
    PairRule(
        "value of a fraction",
        "same",
        _is_value_of_fraction,
        RuleExample("1/2", "0.5", "Compute the probability.", exact=True),
    ),
    PairRule("fraction or date", "unclear", _has_fraction, RuleExample("5/6", "10/12", exact=True)),
    PairRule("exponent or code", "unclear", _has_one_exponent, RuleExample("1E3", "1000")),
    PairRule("measured value", "same", _is_measured, RuleExample("$1.50", "$1.5")),
    PairRule("same last digit", "same", _has_same_step, RuleExample("7", "seven")),
    PairRule("whole number", "same", _is_whole_value, RuleExample("3.0", "3")),
)
"""In order: the first rule that applies decides. Without one, the zeros at the end may count."""


# Different values


def _may_be_rounded(pair: NumberPair) -> bool:
    is_near = close(pair.reference.value, pair.answer.value) or pair.difference <= pair.step / 2
    return not pair.integers and is_near


def _has_other_notation(pair: NumberPair) -> bool:
    return len(pair.forms) == 2 and not pair.forms <= {"digits", "word", "fraction"}


def _has_other_separators(pair: NumberPair) -> bool:
    """A point or comma may be a decimal's or one of thousands."""
    if not pair.in_digits or pair.step > 1:
        return False
    return not pair.reference.readings.isdisjoint(pair.answer.readings)


def _is_magnitude_omitted(pair: NumberPair) -> bool:
    one_scaled = (pair.reference.step > 1) != (pair.answer.step > 1)
    return one_scaled and not pair.reference.unit and pair.same_digits


def _may_be_per_cent(pair: NumberPair) -> bool:
    smaller = min(abs(pair.reference.value), abs(pair.answer.value))
    may_be_share = smaller <= 1 and not pair.integers and not pair.reference.unit
    return may_be_share and pair.scaled(_PER_CENT)


def _may_be_short_year(pair: NumberPair) -> bool:
    may_ask_year = pair.question.blank or pair.question.names_year
    has_year = pair.reference.is_year or pair.answer.is_year
    if not may_ask_year or not has_year or not pair.integers:
        return False
    lengths = sorted([len(pair.reference.digits), len(pair.answer.digits)])
    return lengths == [2, 4] and pair.difference % _YEARS_PER_CENTURY == 0


def _may_be_same_time(pair: NumberPair) -> bool:
    return pair.question.times and pair.difference == _CLOCK_HOURS


def _is_label_of_other(pair: NumberPair) -> bool:
    """The question makes one number the label of the other."""
    reference = pair.reference.digits
    answer = pair.answer.digits
    return pair.question.labels(reference, answer) or pair.question.labels(answer, reference)


def _may_be_estimate(pair: NumberPair) -> bool:
    smaller, larger = sorted([pair.reference.value, pair.answer.value])
    return pair.question.roughly and larger <= 2 * smaller


def _may_be_in_thousands_of_chart(pair: NumberPair) -> bool:
    if not pair.tolerance or min(pair.reference.step, pair.answer.step) > 1:
        return False
    return pair.scaled(_POWERS_OF_THOUSAND, Fraction(pair.tolerance))


def _may_be_in_scale_of_question(pair: NumberPair) -> bool:
    return pair.question.scales and pair.scaled()


DIFFERENT_VALUE_RULES = (
    PairRule("rounded", "unclear", _may_be_rounded, RuleExample("3.14", "3.1416")),
    PairRule("other notation", "unclear", _has_other_notation, RuleExample("5×10^{3}", "500")),
    PairRule("other separators", "unclear", _has_other_separators, RuleExample("1,234", "1.234")),
    PairRule("omitted magnitude", "unclear", _is_magnitude_omitted, RuleExample("5 million", "5")),
    PairRule("per cent", "unclear", _may_be_per_cent, RuleExample("0.25", "25")),
    PairRule("short year", "unclear", _may_be_short_year, RuleExample("1998", "98")),
    PairRule(
        "12-hour clock",
        "unclear",
        _may_be_same_time,
        RuleExample("15", "3", "At which hour is the departure?"),
    ),
    PairRule(
        "label of the other",
        "unclear",
        _is_label_of_other,
        RuleExample("20", "2", "Which one is right: 2 = 20 or 3 = 45?"),
    ),
    PairRule("estimate", "unclear", _may_be_estimate, RuleExample("30", "45", "Roughly how many?")),
    PairRule(
        "thousands of a chart",
        "unclear",
        _may_be_in_thousands_of_chart,
        RuleExample("52000", "52", "What is the revenue in 2010?", tolerance=0.05),
    ),
    PairRule(
        "scale of the question",
        "unclear",
        _may_be_in_scale_of_question,
        RuleExample("24", "2", "How many dozens of eggs are there?"),
    ),
)
"""In any order: one rule that applies is enough. Without one, the answers are different."""
