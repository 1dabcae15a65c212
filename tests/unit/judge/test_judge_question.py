"""Hints in a question's wording are found quickly, and as one pattern without shortcuts finds them."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rayloop.judge.rules.question import Question

PIECES = (
    "1",
    "2",
    "20",
    ".",
    ",",
    " ",
    ")",
    ":",
    "is",
    "(",
    "A",
    "①",
    "-",
    "x",
    "1.5",
    "-5",
    "\u00a0",
    "\n",
    ";",
    "]",
    "=",
    "³",
)
TEXTS = st.lists(st.sampled_from(PIECES), max_size=9).map("".join)
NUMBERS = st.sampled_from(("1", "2", "20", "1.5", "-5", "+2", ".5", "1,000"))


def test_a_hint_is_found_in_any_case() -> None:
    assert Question("CONVERT 3 UNITS").units
    assert Question("How many? In PERCENT").names_percent
    assert Question("10 \u212a").scales, "the Kelvin sign is a k in any case"


@given(TEXTS, NUMBERS, NUMBERS)
@example("Option 2 is 20", "2", "20")
@example("2 -5", "2", "-5")
@example("② 20", "2", "20")
def test_numbers_that_stand_for_each_other(text: str, first: str, second: str) -> None:
    pair = (
        rf"(?<![\w.,]){re.escape(first)} ?(?:[).:\]=–-]|is\b)? ?{re.escape(second)}(?!\w|[.,][0-9])"
    )
    plain = re.sub("[①-⑳]", lambda found: f"{ord(found[0]) - 0x245F})", text)
    assert Question(text).labels(first, second) is (re.search(pair, plain) is not None)


@given(TEXTS, NUMBERS)
@example("take 1.5 of 20", "+20")
def test_a_number_that_stands_in_the_question(text: str, number: str) -> None:
    alone = rf"(?<![0-9.]){re.escape(number.lstrip('+-'))}(?![0-9])"
    assert Question(text).holds(number) is (re.search(alone, text) is not None)


@given(TEXTS, st.sampled_from((";", ":", " = ", "-", "]", ".")))
@example("(A) : (B) ;", ";")
def test_a_mark_that_is_offered(text: str, mark: str) -> None:
    option = rf"[).:\]]\s*{re.escape(mark.strip())}(?!\S)"
    assert Question(text).offers(mark) is (re.search(option, text) is not None)


def test_what_never_stands_in_the_question_makes_no_pattern(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a pattern was made, which costs more than all the rest of a reward")

    monkeypatch.setattr(re, "search", never)
    asked = Question("What is the value of bar 17?")
    assert not asked.labels("17", "18")
    assert not asked.holds("18")
    assert not asked.offers(";")
