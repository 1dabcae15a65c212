"""The program that compares mathematical texts for ``judge/mathematics.py``, in a separate process.
It imports nothing of rayloop.

Each line of its input is a JSON list: reference, answer, and whether equal values must be confirmed.
It answers each with a line: ``true``, ``false``, or ``null`` for a pair that it cannot decide. math-verify alone
(0.8) reads the part of a text that it understands and rounds values to six decimals: it takes
``1/2006!`` for ``1/2004!`` and ``4\\sqrt(2)`` for 4.
"""

import json
import resource
import sys
from typing import Any

import sympy
from math_verify import parse, verify
from math_verify.parser import LatexExtractionConfig

DIGITS = 60
"""Decimal digits that values are computed to."""
RELATIVE = sympy.Rational(1, 10**6)
"""How far a value may lie from a decimal, as a share of the larger of both: math-verify's own six
digits, for small values too.
"""
EXACT = sympy.Rational(1, 10 ** (DIGITS - 15))
"""The same for values without a decimal: what is left of their difference is an error of the
computation.
"""


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
    """What math-verify says."""
    # The parent kills this process after its own deadline, so those of math-verify are off.
    texts = (parse(text, parsing_timeout=None) for text in (reference, answer))
    return bool(verify(*texts, timeout_seconds=None))


def confirmed(reference: str, answer: str) -> bool | None:
    """What math-verify says of texts that it reads as a whole.

    Equal values are computed again, to ``DIGITS`` digits.
    """
    gold, said = read(reference), read(answer)
    if gold is None or said is None:
        return None
    if not verify(gold, said, timeout_seconds=None):
        return False
    return equal(gold[0], said[0])


def read(text: str) -> list[Any] | None:
    """The expression in dollars or a box, and its text; None where math-verify understands a part
    of it only.
    """
    found = parse(
        text,
        extraction_config=[LatexExtractionConfig()],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )
    return found if found and isinstance(found[0], sympy.Basic | sympy.MatrixBase) else None


def equal(gold: Any, said: Any) -> bool | None:
    """Whether two expressions are equal; None when that cannot be shown."""
    gold, said = value_of(gold), value_of(said)
    if getattr(gold, "is_number", False) and getattr(said, "is_number", False):
        return equal_numbers(gold, said)
    if isinstance(gold, sympy.FiniteSet) and isinstance(said, sympy.FiniteSet):
        return equal_sets(list(gold.args), list(said.args))
    if gold == said:
        return True
    if (
        gold.func == said.func
        and len(gold.args) == len(said.args)
        and not isinstance(gold, sympy.Expr)
    ):
        return all_equal(zip(gold.args, said.args, strict=True))
    if isinstance(gold, sympy.Expr) and isinstance(said, sympy.Expr):
        difference = sympy.simplify(exactly(gold) - exactly(said))
        return True if difference == 0 else None
    return None


def value_of(expression: Any) -> Any:
    """The right side of ``x = 2``; of ``2 < x`` the form ``x > 2``; else the expression itself."""
    if isinstance(expression, sympy.Eq) and isinstance(expression.lhs, sympy.Symbol):
        return expression.rhs
    return (
        expression.canonical
        if isinstance(expression, sympy.core.relational.Relational)
        else expression
    )


def exactly(expression: Any) -> Any:
    """The expression with each decimal as the fraction that it is written as."""
    return expression.replace(
        lambda part: isinstance(part, sympy.Float), lambda part: sympy.Rational(str(part))
    )


def equal_numbers(gold: Any, said: Any) -> bool:
    """Decimals may be rounded; other numbers are equal or not."""
    tolerance = RELATIVE if gold.has(sympy.Float) or said.has(sympy.Float) else EXACT
    first, second = exactly(gold), exactly(said)
    if first == second:
        return True
    difference = sympy.Abs(sympy.N(first - second, DIGITS))
    larger = sympy.Max(sympy.Abs(sympy.N(first, DIGITS)), sympy.Abs(sympy.N(second, DIGITS)))
    return bool(difference <= tolerance * larger)


def equal_sets(gold: list[Any], said: list[Any]) -> bool | None:
    """Each element has one that is equal in the other set."""
    left = list(said)
    for element in gold:
        partner = next((one for one in left if equal(element, one)), None)
        if partner is None:
            return None
        left.remove(partner)
    return True if not left else None


def all_equal(pairs: Any) -> bool | None:
    """True when all are, False when one is not, None when one cannot be shown."""
    decisions = [equal(gold, said) for gold, said in pairs]
    if False in decisions:
        return False
    return None if None in decisions else True


if __name__ == "__main__":
    main()
