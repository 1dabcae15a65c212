"""The program that compares mathematical texts for ``judge/mathematics.py`` in a separate process.

It imports nothing from rayloop. Each line of its input is a JSON list: reference, answer, and
whether equal values must be confirmed. It answers each with a line: ``true``, ``false``, or
``null`` for a pair that it cannot decide. math-verify alone (0.8) reads the part of a text that it
understands and rounds values to six decimals: it takes ``1/2006!`` for ``1/2004!`` and
``4\\sqrt(2)`` for 4.
"""

import json
import resource
import sys
from collections.abc import Sequence
from typing import Any

import sympy
from math_verify import parse, verify
from math_verify.parser import LatexExtractionConfig

DECIMAL_DIGITS = 60
"""Decimal digits that values are computed to."""
RELATIVE = sympy.Rational(1, 10**6)
"""The distance that a value may have from a decimal, as a share of the larger of both.

These are math-verify's own six digits, for small values too.
"""
EXACT = sympy.Rational(1, 10 ** (DECIMAL_DIGITS - 15))
"""The same for values without a decimal, whose difference may only be an error of computation."""


def main() -> None:
    """Answer lines until the input ends. The argument is the limit of memory in bytes."""
    limit = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # A pipe is written in blocks: without the flush the parent would wait for this line.
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        reference, answer, confirm = json.loads(line)
        try:
            decision = confirmed(reference, answer) if confirm else accepted(reference, answer)
        except Exception:
            decision = None if confirm else False
        print(json.dumps(decision), flush=True)


def accepted(reference: str, answer: str) -> bool:
    """Whether math-verify accepts the answer."""
    # The parent kills this process after its own deadline, so math-verify's own deadlines are off.
    texts = (parse(text, parsing_timeout=None) for text in (reference, answer))
    return bool(verify(*texts, timeout_seconds=None))


def confirmed(reference: str, answer: str) -> bool | None:
    """Whether math-verify accepts the answer; None for a text that it does not read completely.

    Equal values are computed again, to ``DECIMAL_DIGITS`` digits.
    """
    gold = read(reference)
    candidate = read(answer)
    if gold is None or candidate is None:
        return None
    if not verify(gold, candidate, timeout_seconds=None):
        return False
    return equal(gold[0], candidate[0])


def read(text: str) -> list[Any] | None:
    """The expression in dollars or a box, and its text.

    None for a text that math-verify understands only in part.
    """
    parsed = parse(
        text,
        extraction_config=[LatexExtractionConfig()],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )
    is_expression = parsed and isinstance(parsed[0], sympy.Basic | sympy.MatrixBase)
    return parsed if is_expression else None


def equal(gold: Any, candidate: Any) -> bool | None:
    """Whether two expressions are equal; None when that cannot be shown."""
    gold = value_of(gold)
    candidate = value_of(candidate)
    if getattr(gold, "is_number", False) and getattr(candidate, "is_number", False):
        return equal_numbers(gold, candidate)
    if isinstance(gold, sympy.FiniteSet) and isinstance(candidate, sympy.FiniteSet):
        return equal_sets(list(gold.args), list(candidate.args))
    if gold == candidate:
        return True
    same_form = gold.func == candidate.func and len(gold.args) == len(candidate.args)
    if same_form and not isinstance(gold, sympy.Expr):
        return all_equal(gold.args, candidate.args)
    if isinstance(gold, sympy.Expr) and isinstance(candidate, sympy.Expr):
        difference = sympy.simplify(exactly(gold) - exactly(candidate))
        return True if difference == 0 else None
    return None


def value_of(expression: Any) -> Any:
    """The right side of ``x = 2``; ``x > 2`` for ``2 < x``; otherwise the expression itself."""
    if isinstance(expression, sympy.Eq) and isinstance(expression.lhs, sympy.Symbol):
        return expression.rhs
    if isinstance(expression, sympy.core.relational.Relational):
        return expression.canonical
    return expression


def exactly(expression: Any) -> Any:
    """The expression with each decimal as the fraction that its digits are."""
    return expression.replace(
        lambda part: isinstance(part, sympy.Float), lambda part: sympy.Rational(str(part))
    )


def equal_numbers(gold: Any, candidate: Any) -> bool:
    """Whether two numbers are equal. Decimals may be rounded."""
    has_decimal = gold.has(sympy.Float) or candidate.has(sympy.Float)
    tolerance = RELATIVE if has_decimal else EXACT
    gold_value = exactly(gold)
    value = exactly(candidate)
    if gold_value == value:
        return True
    difference = sympy.Abs(sympy.N(gold_value - value, DECIMAL_DIGITS))
    sizes = [sympy.Abs(sympy.N(number, DECIMAL_DIGITS)) for number in (gold_value, value)]
    return bool(difference <= tolerance * sympy.Max(*sizes))


def equal_sets(gold: list[Any], candidate: list[Any]) -> bool | None:
    """True when each element has an equal one in the other set; otherwise None."""
    unmatched = list(candidate)
    for element in gold:
        partner = next((other for other in unmatched if equal(element, other)), None)
        if partner is None:
            return None
        unmatched.remove(partner)
    return True if not unmatched else None


def all_equal(gold: Sequence[Any], candidate: Sequence[Any]) -> bool | None:
    """True when all are equal, False when one is not, None when one cannot be shown."""
    decisions = [equal(*pair) for pair in zip(gold, candidate, strict=True)]
    if False in decisions:
        return False
    return None if None in decisions else True


if __name__ == "__main__":
    main()
