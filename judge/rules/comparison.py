"""Comparison of two quantities: the same, different, or unclear without more than rules."""

from dataclasses import replace
from fractions import Fraction

from rayloop.judge.rules.number_pairs import (
    NumberPair,
    Relation,
    close,
    relation_of_different_values,
    relation_of_equal_values,
)
from rayloop.judge.rules.quantities import Quantity, quantity
from rayloop.judge.rules.question import Question
from rayloop.judge.rules.units import CURRENCIES, MONEY_OR_SHARE, SCALES

_FLOAT_MARGIN = Fraction(1_000_001, 1_000_000)
_FULL_TURN_DEGREES = 360


def compare(reference: str, answer: str, question: Question, tolerance: float = 0.0) -> Relation:
    """The relation of two plain texts that are one quantity each.

    Same only when they are equal however the question is meant. ``tolerance`` (relative, of the
    reference) is for numbers read off a chart: never for counts, years and codes.
    """
    reference_quantity = quantity(reference)
    answer_quantity = quantity(answer)
    if reference_quantity is None or answer_quantity is None:
        return "unclear"

    pair = NumberPair(reference_quantity, answer_quantity, question, tolerance)
    if _has_other_meaning(pair) or _may_be_same_direction(pair):
        return "unclear"
    if pair.reference.value * pair.answer.value < 0 and not question.blank:
        # The question may state the sign itself: "by how much did it fall".
        unsigned = replace(pair, reference=_unsigned(pair.reference), answer=_unsigned(pair.answer))
        return "different" if _relation(unsigned) == "different" else "unclear"
    return _relation(pair)


def _has_other_meaning(pair: NumberPair) -> bool:
    """Whether the question may make a number an option, a word, a time or a notation."""
    question = pair.question
    # "2" may name an option, and "seven" may be the very word that is asked for.
    if question.numbered or (question.wording and "word" in pair.forms):
        return True
    has_unit = pair.reference.unit or pair.answer.unit
    # 1/2 may be a date or a score instead of a half.
    if "fraction" in pair.forms and (question.codes or has_unit):
        return True
    # Whole numbers that differ are different codes; as times, 15 and 3 may be the same hour.
    are_counts = pair.integers and not question.times
    return question.codes and pair.difference != 0 and not are_counts


def _may_be_same_direction(pair: NumberPair) -> bool:
    """Whether the two are angles a full turn apart, which the question may not distinguish."""
    full_turns_apart = pair.difference != 0 and pair.difference % _FULL_TURN_DEGREES == 0
    return full_turns_apart and pair.reference.unit == pair.answer.unit and pair.question.angles


def _unsigned(number: Quantity) -> Quantity:
    return replace(number, value=abs(number.value), digits=number.digits.lstrip("+-"))


def _relation(pair: NumberPair) -> Relation:
    if pair.reference.unit != pair.answer.unit:
        return _relation_of_units(pair)
    if pair.reference.value == pair.answer.value:
        return relation_of_equal_values(pair)
    if "fraction" in pair.forms and not pair.question.exact:
        return "unclear"
    if _is_within_tolerance(pair):
        return _relation_within_tolerance(pair)
    return relation_of_different_values(pair)


def _is_within_tolerance(pair: NumberPair) -> bool:
    # A float such as 0.05 is not exactly a twentieth: the margin keeps the border inside.
    allowed = Fraction(pair.tolerance) * abs(pair.reference.value) * _FLOAT_MARGIN
    return pair.tolerance != 0 and pair.difference <= allowed


def _relation_within_tolerance(pair: NumberPair) -> Relation:
    reference = pair.reference
    question = pair.question
    if reference.is_year and question.asks_year:
        return "different"
    has_value_sign = reference.unit in MONEY_OR_SHARE or "." in reference.digits
    may_be_read_off = reference.form == "digits" and has_value_sign and not reference.is_code
    return "same" if may_be_read_off and question.measured else "unclear"


def _relation_of_units(pair: NumberPair) -> Relation:
    """The relation of quantities in two units: equal after conversion, or far from it.

    A unit that only one of them has depends on the question.
    """
    units = {pair.reference.unit, pair.answer.unit}
    if "" in units and units & CURRENCIES:
        return "same" if _is_same_amount(pair) else "unclear"
    if units == {"%", ""}:
        return "same" if _is_same_percentage(pair) else "unclear"
    return _relation_after_conversion(pair)


def _is_same_amount(pair: NumberPair) -> bool:
    """Whether both are one amount of money, whose currency only one of them names."""
    question = pair.question
    currency = pair.reference.unit or pair.answer.unit
    asks_this_currency = question.asks_money and question.currencies <= {currency}
    may_be_other_number = pair.is_ambiguous or question.codes
    return asks_this_currency and pair.difference == 0 and not may_be_other_number


def _is_same_percentage(pair: NumberPair) -> bool:
    """Whether both are one percentage, whose sign only one of them has."""
    question = pair.question
    asks_percent = question.names_percent and not question.names_points
    return asks_percent and pair.difference == 0 and abs(pair.reference.value) > 1


def _relation_after_conversion(pair: NumberPair) -> Relation:
    reference = pair.reference
    answer = pair.answer
    question = pair.question
    if reference.unit not in SCALES or answer.unit not in SCALES or question.codes:
        return "unclear"
    dimension, scale = SCALES[reference.unit]
    answer_dimension, answer_scale = SCALES[answer.unit]
    if dimension != answer_dimension or "fraction" in pair.forms:
        return "unclear"
    if pair.is_ambiguous and not question.exact:
        return "unclear"

    value = reference.value * scale
    answer_value = answer.value * answer_scale
    if value == answer_value:
        unit_counts = question.units or question.wording or question.holds(answer.digits)
        return "unclear" if unit_counts else "same"
    # Each may be rounded to its last digit, so a smaller difference proves nothing.
    coarse = max(reference.step * scale, answer.step * answer_scale)
    may_be_rounded = close(value, answer_value) or abs(value - answer_value) <= coarse
    return "unclear" if may_be_rounded else "different"
