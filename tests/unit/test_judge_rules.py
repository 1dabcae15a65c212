"""Rules for short answers: what they decide, and what they leave to a model."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from judge.answers import boxed, extract
from judge.grader import decide as decide_item
from judge.labelled import calibration
from judge.quantities import first_number, quantity
from judge.rubric import load_rubrics
from judge.rules import decide, is_empty, mean_relative_accuracy, plain

RIGHT, WRONG, OPEN = True, False, None
CASES = [
    ("blue", "Blue.", RIGHT),
    ("blue", "**blue**", RIGHT),
    ("Paris", "The answer is Paris.", RIGHT),
    ("blue", "red", OPEN),
    ("B", "(b)", RIGHT),
    ("B", "Answer: B", RIGHT),
    ("B", "option B.", RIGHT),
    ("B", "C", WRONG),
    ("B", "C. red", WRONG),
    ("B. red", "red", RIGHT),
    ("B. red", "B", RIGHT),
    ("B. red", "B. blue", OPEN),
    ("B", "B. blue", OPEN),
    ("A", "A dog", OPEN),
    ("A", "A or B", OPEN),
    ("A", "A, C", OPEN),
    ("yes", "Yeah", RIGHT),
    ("true", "Yes", RIGHT),
    ("yes", "no", WRONG),
    ("no", "Nothing", OPEN),
    ("1,000", "1000", RIGHT),
    ("1000", "1,000.0", RIGHT),
    ("three", "3", RIGHT),
    ("21", "twenty-one", RIGHT),
    ("12", "a dozen", RIGHT),
    ("5 million", "5,000,000", RIGHT),
    ("1/2", r"\frac{1}{2}", RIGHT),
    ("3e8 m/s", "3 x 10^8 m/s", RIGHT),
    ("-5", "5", WRONG),
    ("2010", "2015", WRONG),
    ("0", "0.0", RIGHT),
    ("0", "0.001", WRONG),
    ("3.14159", "3.14", OPEN),
    ("7", "7/0", OPEN),
    ("7", "7 (because 3+4)", OPEN),
    ("5", "5 or 6", OPEN),
    ("1.5", "one and a half", OPEN),
    ("one and a half", "1", OPEN),
    ("9\\pi", "9", OPEN),
    ("50%", "0.5", RIGHT),
    ("50", "50%", RIGHT),
    ("0.5", "0.5%", WRONG),
    ("$5", "5 dollars", RIGHT),
    ("$5", "5 €", OPEN),
    ("5 cm", "50 mm", RIGHT),
    ("5 cm", "5", RIGHT),
    ("5", "5 km", OPEN),
    ("5 cm", "5 m", WRONG),
    ("5 kg", "5 m", WRONG),
    ("1 hour", "60 minutes", RIGHT),
    ("24 square metres", "24 m²", RIGHT),
    ("60 km/h", "60 kilometers per hour", RIGHT),
    ("red, blue", "blue and red", RIGHT),
    ("red, blue", "red", OPEN),
    ("red, red", "red, blue", OPEN),
    ("(3, 4)", "(3,4)", RIGHT),
    ("(3, 4)", "(4, 3)", OPEN),
    ("A -> B", "B -> A", OPEN),
    ("4", ":", WRONG),
    ("4", "Let's solve this step by step", WRONG),
    ("4", "Let’s solve this problem step by step:", WRONG),
    ("4", "Let's solve: 4", OPEN),
    ("Solution", "solution", RIGHT),
    ("4", "Solution:", WRONG),
    ("left", "First you go left", OPEN),
    ("x", "x" * 1001, WRONG),
]


@pytest.mark.parametrize(("reference", "answer", "right"), CASES)
def test_rules_decide(reference: str, answer: str, right: bool | None) -> None:
    decision = decide(reference, answer)
    assert decision.correct is right, decision
    assert bool(decision.rule) == (right is not None)


def test_tolerance_is_relative_and_spares_years() -> None:
    assert decide("100", "104", tolerance=0.05).correct is True
    assert decide("-100", "-104", tolerance=0.05).correct is True
    assert decide("100", "106", tolerance=0.05).correct is False
    assert decide("-100", "104", tolerance=0.05).correct is False
    assert decide("2010", "2011", tolerance=0.05).correct is False
    assert decide("2,010", "2,011 units", tolerance=0.05).correct is None


def test_order_counts_where_the_question_says_so() -> None:
    assert decide("chair, bed", "bed, chair", question="Which objects are there?").correct is True
    assert decide("chair, bed", "bed, chair", question="In which order do they appear?").correct is None
    assert decide("chair, bed", "chair and bed", question="In which order do they appear?").correct is True


def test_no_rule_contradicts_a_label() -> None:
    rubric = load_rubrics()["equivalence"]
    decided = [(one, decide_item(rubric, one.item)) for one in calibration()]
    wrong = [
        (one.id, d) for one, d in decided if d.correct is not None and d.correct is not (one.verdict == "correct")
    ]
    assert not wrong
    assert all(d.correct is False for one, d in decided if one.kind in ("empty", "opener"))


@given(st.text(max_size=60), st.text(max_size=60))
def test_any_texts_get_a_decision(reference: str, answer: str) -> None:
    decision = decide(reference, answer)
    assert decision.correct in (True, False, None)
    assert decide(reference, answer) == decision


@given(st.text(max_size=60))
def test_plain_text_stays_plain(text: str) -> None:
    assert decide(text, text).correct is not False or is_empty(text) or not plain(text)


@given(st.floats(-1e9, 1e9, allow_nan=False))
def test_a_number_equals_itself_however_written(number: float) -> None:
    text = f"{number:.6f}"
    found = quantity(text)
    assert found is not None
    assert math.isclose(found.amount, float(text))
    assert decide(text, f"{float(text):,.6f}").correct is True


def test_mean_relative_accuracy() -> None:
    assert mean_relative_accuracy(10, 10) == 1
    assert mean_relative_accuracy(10, 9.7) == 1
    assert mean_relative_accuracy(10, 5) == 0
    assert mean_relative_accuracy(10, 7.9) == 0.6
    assert mean_relative_accuracy(0, 0) == 1
    assert mean_relative_accuracy(0, 1) == 0
    assert mean_relative_accuracy(-10, -9.7) == 1


def test_first_number() -> None:
    assert first_number("I count 3 chairs, answer 10") == 3
    assert first_number("about 1,250.5 m") == 1250.5
    assert first_number("none") is None


@pytest.mark.parametrize(
    ("text", "how", "answer"),
    [
        ("<answer>\n\\boxed{blue}\n</answer>", "tagged_box", "blue"),
        ("<answer>blue</answer>", "tagged_box", "blue"),
        ("<answer>a</answer> then <answer> b </answer>", "tag", "b"),
        ("<answer>a <answer>b</answer>", "tag", "b"),
        ("\\boxed{blue}", "tagged_box", None),
        ("no tags", "tag", None),
        ("so \\boxed{\\frac{1}{2}}.", "box", "\\frac{1}{2}"),
        ("\\boxed{a} and \\boxed{b", "box", "a"),
        ("\\boxed{b", "box", None),
        ("first\nlast ", "last_line", "last"),
        ("  ", "last_line", None),
        (" all of it ", "whole", "all of it"),
    ],
)
def test_extract(text: str, how: str, answer: str | None) -> None:
    assert extract(text, how) == answer  # type: ignore[arg-type]


def test_boxes_nest() -> None:
    assert boxed("\\boxed{\\boxed{blue}}") == "blue"
    assert boxed("\\boxed{a{b}c}") == "a{b}c"
