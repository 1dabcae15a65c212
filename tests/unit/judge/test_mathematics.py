"""Equivalence by math-verify in a process that can be killed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from rayloop.core.failures import ConfigError
from rayloop.judge import mathematics
from rayloop.judge.mathematics import MathVerifier


@pytest.fixture(scope="module")
def verifier() -> Iterator[MathVerifier]:
    pytest.importorskip("math_verify")
    found = MathVerifier(20.0)
    yield found
    found.close()


@pytest.mark.parametrize(
    ("reference", "answer", "same"),
    [
        ("1/2", "0.5", True),
        (r"\frac{1}{2}", "$1/2$", True),
        ("x^2+2x+1", "(x+1)^2", True),
        (r"2\sqrt{2}", r"\sqrt{8}", True),
        ("3", "4", False),
        ("3", "", None),
        ("3", "((((", None),
        ("3", "x" * 1000, False),
    ],
)
def test_it_is_about_meaning(
    verifier: MathVerifier, reference: str, answer: str, same: bool | None
) -> None:
    assert verifier.same(reference, answer) is same


@pytest.mark.parametrize(
    ("reference", "answer", "same"),
    [
        ("1/2004!", "1/2006!", False),
        ("e^{-50}", "e^{-51}", False),
        ("0.0000001", "0.0000002", False),
        ("(1/2004!, 1)", "(1/2006!, 1)", False),
        ("12345678901234567890.5", "12345678901234567891.5", False),
        ("0.333333", "1/3", True),
        ("0.05", "5\\%", True),
        (r"\{1, 2\}", r"\{2, 1\}", True),
        ("[0, 1/2]", "[0, 0.5]", True),
        ("x > 2", "2 < x", True),
        (r"\sin^2 x + \cos^2 x", "1", True),
        ("1, 2, ..., n", "1, 3, 5, ..., 2n-1", None),
        ("4", r"4\sqrt(2)", None),
        ("2", "2^{x", None),
    ],
)
def test_what_math_verify_rounds_or_reads_in_part_is_no_equality(
    verifier: MathVerifier, reference: str, answer: str, same: bool | None
) -> None:
    assert verifier.same(reference, answer) is same


def test_a_published_reward_may_take_what_math_verify_accepts() -> None:
    pytest.importorskip("math_verify")
    published = MathVerifier(20.0, confirm=False)
    try:
        assert published.same("1/2004!", "1/2006!") is True
        assert published.same("3", "((((") is False
    finally:
        published.close()


def test_a_pair_that_takes_too_long_costs_the_process_and_no_more(verifier: MathVerifier) -> None:
    assert verifier.same("2", "1+1") is True
    child = verifier._child
    assert child is not None
    verifier._timeout, whole = 0.0, verifier._timeout
    try:
        assert verifier.same("x^2+2x+1", "(x+1)^2+0") is None
    finally:
        verifier._timeout = whole
    assert child.poll() is not None
    assert verifier.same("2", "1+1") is True


def test_a_process_that_died_is_replaced(verifier: MathVerifier) -> None:
    assert verifier.same("2", "1+1") is True
    assert verifier._child is not None
    os.kill(verifier._child.pid, 9)
    verifier._child.wait()
    assert verifier.same("2", "3-1") is None
    assert verifier.same("2", "3-1") is True


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mathematics, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="rayloop\\[math\\]"):
        MathVerifier(1.0)
