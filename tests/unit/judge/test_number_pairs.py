"""Rules for pairs of numbers: each decides its own example."""

from __future__ import annotations

import pytest

from rayloop.judge.rules.comparison import compare
from rayloop.judge.rules.number_pairs import (
    DIFFERENT_VALUE_RULES,
    EQUAL_VALUE_RULES,
    NumberPair,
    PairRule,
    RuleExample,
)
from rayloop.judge.rules.quantities import quantity
from rayloop.judge.rules.question import Question


def pair_of(example: RuleExample) -> NumberPair:
    reference = quantity(example.reference)
    answer = quantity(example.answer)
    assert reference is not None
    assert answer is not None
    question = Question(example.question, example.exact)
    return NumberPair(reference, answer, question, example.tolerance)


def relation_of(example: RuleExample) -> str:
    question = Question(example.question, example.exact)
    return compare(example.reference, example.answer, question, example.tolerance)


@pytest.mark.parametrize("rule", EQUAL_VALUE_RULES, ids=lambda rule: rule.name)
def test_a_rule_for_equal_values_is_the_first_that_applies_to_its_example(rule: PairRule) -> None:
    pair = pair_of(rule.example)
    assert pair.reference.value == pair.answer.value
    first = next(other for other in EQUAL_VALUE_RULES if other.applies(pair))
    assert first.name == rule.name
    assert relation_of(rule.example) == rule.outcome


@pytest.mark.parametrize("rule", DIFFERENT_VALUE_RULES, ids=lambda rule: rule.name)
def test_a_rule_for_different_values_alone_applies_to_its_example(rule: PairRule) -> None:
    pair = pair_of(rule.example)
    assert pair.reference.value != pair.answer.value
    assert [other.name for other in DIFFERENT_VALUE_RULES if other.applies(pair)] == [rule.name]
    assert relation_of(rule.example) == rule.outcome


def test_equal_values_without_a_rule_are_unclear() -> None:
    assert relation_of(RuleExample("1.10", "1.1")) == "unclear"


def test_different_values_without_a_rule_are_different() -> None:
    assert relation_of(RuleExample("7", "8")) == "different"
