"""Deterministic rules for short answers: exact, option letter, yes or no, number with unit and tolerance, list or set.

A rule decides only what it understands completely; ``decide`` returns None for the rest, which is a model's work. The rule
backend, the step before a model is asked and the recipes' verifiers use the same rules.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from judge.quantities import Quantity, quantity

Relation = Literal["same", "different", "unclear"]

_WRAPPERS = re.compile(r"^\\(?:boxed|text|textbf|mathrm|mathbf|mathit)\s*\{(.*)\}$", re.DOTALL)
_PAIRS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), ("**", "**"), ("`", "`"), ('"', '"'), ("'", "'"), ("“", "”"), ("‘", "’"))
_LEAD = re.compile(r"^(?:(?:so|therefore|thus|hence)[, ]+)?(?:the )?(?:final |correct )?answer(?: is|:| is:)\s*", re.IGNORECASE)
_ARTICLE = re.compile(r"^(?:the|a|an)\s+(?=\S)")
_OPTION = re.compile(
    r"^(?:(?:option|choice)\s+)?(?:\(\s*([A-Za-z])\s*\)|\[\s*([A-Za-z])\s*\]|([A-Za-z])(?=\s*[.):]|$))\s*[.):]?\s*(.*)$",
    re.IGNORECASE | re.DOTALL,
)
_NEAR = 0.01
"""A fraction that is missed by less may have been rounded: no rule calls it wrong."""
_YES = {"yes", "true", "correct", "right", "y", "yeah", "yep"}
_NO = {"no", "false", "incorrect", "wrong", "n", "nope"}
_OPENERS = re.compile(
    r"(?:(?:ok(?:ay)?|sure|certainly|alright|well)[,.! ]*)?"
    r"(?:thought process|solution|final answer|answer|the (?:final )?answer is|reasoning|explanation|analysis|step \d+|response"
    r"|judg(?:e)?ment|verdict|output|result|think(?:ing)?|解|解答|答案|かいせつ|respuesta|antwort"
    r"|let(?:'s|s| us| me) (?:solve|think|analy[sz]e|work|break|start|begin|examine|consider)\b[^.:!?0-9]{0,80}"
    r"|to (?:solve|answer) (?:this|the) (?:question|problem|equation)\b[^.:!?0-9]{0,60})"
    r"[\s:：,.!…]*",
    re.IGNORECASE,
)
_IN_ORDER = re.compile(
    r"\b(?:order|sequence|rank(?:ed|ing)?|sort(?:ed)?|from \w+ to \w+|in turn|first to last|chronological\w*)\b", re.IGNORECASE
)
"""Questions of which the order of the answer's items is a part."""


@dataclass(frozen=True, slots=True)
class Decision:
    """``correct`` None: no rule decides. ``rule`` names the one that did, ``reason`` says so in words."""

    correct: bool | None
    rule: str = ""
    reason: str = ""


UNDECIDED = Decision(None)


def decide(
    reference: str, answer: str, *, question: str = "", tolerance: float = 1e-4, max_length: int = 1000
) -> Decision:
    """Is ``answer`` right, given the right answer? ``tolerance`` is relative; ``max_length`` counts characters.

    The question only tells whether the order of a list counts.

    Answers that say nothing (empty, punctuation, the opening of a solution) and overlong ones are wrong.
    """
    if len(answer) > max_length:
        return Decision(False, "too_long", f"longer than {max_length} characters")
    wanted, got = plain(reference), plain(answer)
    if wanted and wanted == got:
        return Decision(True, "exact", "the same text")
    if is_empty(answer):
        return Decision(False, "empty", "no answer, or only the opening of one")
    for rule in (_options, _yes_no):
        if (decision := rule(reference, answer)) is not UNDECIDED:
            return decision
    relation = compare_quantities(wanted, got, tolerance)
    if relation != "unclear":
        same = relation == "same"
        return Decision(same, "number", "the same quantity" if same else "another quantity")
    if same_list(wanted, got, tolerance, ordered=_IN_ORDER.search(question) is not None):
        return Decision(True, "set", "the same items")
    return UNDECIDED


def plain(text: str) -> str:
    """Without case, mark-up, surrounding quotes, article, lead-in ("the answer is") and final punctuation; NFKC."""
    text = " ".join(unicodedata.normalize("NFKC", text).split())
    before = None
    while text != before:
        before = text
        text = _LEAD.sub("", text).strip()
        for left, right in _PAIRS:
            inner = text[len(left) : -len(right)]
            if text.startswith(left) and text.endswith(right) and len(text) > len(left) + len(right) and left not in inner:
                text = inner.strip()
        if wrapped := _WRAPPERS.match(text):
            text = wrapped.group(1).strip()
        text = text.rstrip(".。!;,").strip() or text
    return _ARTICLE.sub("", text.casefold())


def is_empty(answer: str) -> bool:
    """Says nothing: no letter or digit, or only the way a solution begins ("Let's solve this step by step", "Solution:")."""
    text = unicodedata.normalize("NFKC", answer).replace("’", "'").strip(" \t\r\n*#`\"'_")
    return not any(c.isalnum() for c in text) or _OPENERS.fullmatch(text) is not None


def option(text: str) -> tuple[str, str] | None:
    """The letter (upper case) and the text of ``B``, ``(B)``, ``B. red``, ``option B``; None for anything else."""
    text = _LEAD.sub("", " ".join(text.split()))
    found = _OPTION.match(text.strip("*$ "))
    if found is None:
        return None
    letter = next(part for part in found.groups()[:3] if part)
    return letter.upper(), plain(found.group(4))


def _options(reference: str, answer: str) -> Decision:
    wanted, got = option(reference), option(answer)
    if wanted is None:
        return UNDECIDED
    if got is None:
        same = bool(wanted[1]) and wanted[1] == plain(answer)
        return Decision(True, "option", "the text of the right option") if same else UNDECIDED
    if wanted[0] != got[0]:
        return Decision(False, "option", f"option {got[0]}, not {wanted[0]}") if wanted[1] != got[1] or not got[1] else UNDECIDED
    if wanted[1] and got[1] and wanted[1] != got[1]:
        return UNDECIDED
    return Decision(True, "option", f"option {got[0]}") if not got[1] or got[1] == wanted[1] else UNDECIDED


def _yes_no(reference: str, answer: str) -> Decision:
    wanted, got = plain(reference), plain(answer)
    if {wanted, got} <= _YES or {wanted, got} <= _NO:
        return Decision(True, "yes_no", "both say the same")
    if (wanted in _YES and got in _NO) or (wanted in _NO and got in _YES):
        return Decision(False, "yes_no", "the opposite")
    return UNDECIDED


def compare_quantities(reference: str, answer: str, tolerance: float) -> Relation:
    """Two texts that are one quantity each.

    A unit that only the answer has, unknown units and near misses are unclear; a known unit may be left out.
    """
    wanted, got = quantity(reference), quantity(answer)
    if wanted is None or got is None:
        return "unclear"
    if wanted.unit != got.unit and "%" in (wanted.unit, got.unit):
        return _compare_percent(wanted, got, tolerance)
    if wanted.unit != got.unit:
        if wanted.dimension and got.dimension and wanted.dimension != got.dimension:
            return "different"
        if got.unit or not wanted.dimension or not close(wanted.amount, got.amount, tolerance, exact=wanted.is_year):
            return "unclear"
        return "same"
    if close(wanted.value, got.value, tolerance, exact=wanted.is_year):
        return "same"
    rounded = not wanted.amount.is_integer() and close(wanted.value, got.value, _NEAR)
    return "unclear" if rounded else "different"


def _compare_percent(wanted: Quantity, got: Quantity, tolerance: float) -> Relation:
    """A percentage and a bare number: 50 % is 0.5, and 50 when the number is above 1."""
    if wanted.unit not in ("", "%") or got.unit not in ("", "%"):
        return "unclear"
    percent, bare = (wanted.amount, got.amount) if wanted.unit == "%" else (got.amount, wanted.amount)
    if close(percent / 100, bare, tolerance) or (abs(bare) > 1 and close(percent, bare, tolerance)):
        return "same"
    return "different"


def close(reference: float, answer: float, tolerance: float, *, exact: bool = False) -> bool:
    """``|answer - reference| <= tolerance |reference|``; a reference of 0, and ``exact``, allow rounding errors only."""
    return math.isclose(reference, answer, rel_tol=1e-9, abs_tol=1e-9) or (
        not exact and abs(answer - reference) <= tolerance * abs(reference) * (1 + 1e-9)
    )


def items(text: str) -> tuple[list[str], bool] | None:
    """The parts of a list and whether their order counts: in brackets, or joined by arrows. None for no list."""
    ordered = bool(re.match(r"^[\[(].*[\])]$", text)) or bool(re.search(r"->|→|⇒|>|\bthen\b", text))
    inner = re.sub(r"^[\[({](.*)[\])}]$", r"\1", text)
    parts = re.split(r"\s*(?:->|→|⇒|>|;|\n|,\s*(?:and\s|then\s)?|\band\b|&|\bthen\b)\s*", inner)
    if len(parts) < 2 or not all(parts) or re.fullmatch(r"[-+]?[\d,]+(?:\.\d+)?", text):
        return None
    return parts, ordered


def same_list(reference: str, answer: str, tolerance: float, *, ordered: bool = False) -> bool:
    """Both are lists of the same items; in the same order if ``ordered`` or where the reference's notation says so."""
    wanted, got = items(reference), items(answer)
    if wanted is None or got is None or len(wanted[0]) != len(got[0]):
        return False
    if wanted[1] or ordered:
        return all(_same_item(w, g, tolerance) for w, g in zip(wanted[0], got[0], strict=True))
    left = list(got[0])
    for item in wanted[0]:
        match = next((g for g in left if _same_item(item, g, tolerance)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _same_item(reference: str, answer: str, tolerance: float) -> bool:
    return plain(reference) == plain(answer) or compare_quantities(plain(reference), plain(answer), tolerance) == "same"


VSI_THRESHOLDS = tuple(i / 100 for i in range(50, 100, 5))


def mean_relative_accuracy(reference: float, answer: float, thresholds: Sequence[float] = VSI_THRESHOLDS) -> float:
    """The share of thresholds t with ``|answer - reference| / |reference| < 1 - t`` (VSI-Bench); a reference of 0 must be met."""
    if reference == 0:
        return float(answer == 0)
    error = abs(answer - reference) / abs(reference)
    return sum(error < 1 - t for t in thresholds) / len(thresholds)
