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
        ("3", "", False),
        ("3", "((((", False),
        ("3", "x" * 1000, False),
    ],
)
def test_it_is_about_meaning(verifier: MathVerifier, reference: str, answer: str, same: bool) -> None:
    assert verifier.same(reference, answer) is same


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
