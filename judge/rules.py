"""Deterministic rules for short answers: the same text, option, yes or no, number, list. Few, and careful.

A rule decides only what is the same, or another answer, however the question is meant; ``decide`` returns UNDECIDED for the rest,
which is a model's work. The rule backend, the step before a model is asked and the recipes' verifiers use the same rules.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from judge.plain import is_blank, plain, same_text, says_nothing
from judge.quantities import compare, quantity
from judge.question import Question, option

_YES, _NO = frozenset({"yes", "true"}), frozenset({"no", "false"})
_NOTHING = re.compile(r"\W*(?:none|nothing|empty.*|blank|null|zero|0|n/?a|nil|no .*|∅|\\emptyset)?\W*", re.IGNORECASE)
_DASH = re.compile(r"\s*[-–—−/]+\s*")
_MARK = re.compile(
    r"\b(?:mark|symbol|sign|colon|comma|dash|hyphen|slash|dot|period|point|stop|percent|ampersand|asterisk|star|hash|pound|at|minus|bar)\b",
    re.IGNORECASE,
)
_OPENERS = re.compile(
    r"(?:(?:ok(?:ay)?|sure|certainly|alright|well)[,.! ]*)?"
    r"(?:thought process|solution|final answer|answer|the (?:final )?answer is|reasoning|explanation|analysis|step \d+|response"
    r"|judg(?:e)?ment|verdict|output|result|think(?:ing)?|解|解答|答案|かいせつ|respuesta|antwort"
    r"|let(?:'s|s| us| me) (?:solve|think|analy[sz]e|work|break|start|begin|examine|consider)\b[^.:!?0-9]{0,80}"
    r"|to (?:solve|answer) (?:this|the) (?:question|problem|equation)\b[^.:!?0-9]{0,60})"
    r"[\s:：,.!…]*",
    re.IGNORECASE,
)
_SEPARATOR = re.compile(r" ?; ?|,? and | ?& ?|, ?")
_MAX_ITEMS = 64
_LONGEST_QUESTION = 8192
"""Of a longer one, which takes long to search, only the text itself and blank answers are decided."""


@dataclass(frozen=True, slots=True)
class Decision:
    """``correct`` None: no rule decides. ``rule`` names the one that did, ``reason`` says so in words."""

    correct: bool | None
    rule: str = ""
    reason: str = ""


UNDECIDED = Decision(None)


def decide(
    reference: str, answer: str, *, question: str = "", tolerance: float = 0.0, max_length: int = 1000, exact: bool = False
) -> Decision:
    """Is ``answer`` right, given the right answer? Never raises. ``max_length``: so many characters are too many.

    ``tolerance`` is relative, for numbers read off a chart; 0 compares exactly. ``exact``: of formulas, where case counts.
    The question can only make a rule more careful, or say what a letter, a number or a sign means.

    Answers that say nothing (blank, punctuation, the opening of a solution) are wrong, and so are overlong ones that are not the
    reference itself.
    """
    if is_blank(answer):
        return Decision(False, "empty", "no answer")
    if reference.strip() == answer.strip():
        return Decision(True, "exact", "the same text")
    if len(answer) >= max_length:
        return Decision(False, "too_long", f"{max_length} characters or more")
    asked, wanted, got = Question(question, exact), plain(reference), plain(answer)
    if same_text(wanted, got, strict=exact or asked.case):
        return Decision(True, "exact", "the same text")
    if is_empty(answer):
        meant = _may_mean(reference, answer, asked)
        return UNDECIDED if meant else Decision(False, "empty", "no answer, or only the opening of one")
    if len(question) > _LONGEST_QUESTION:
        return UNDECIDED
    for rule in (_options, _yes_no):
        if (decision := rule(wanted, got, asked)) is not UNDECIDED:
            return decision
    relation = compare(wanted, got, asked, tolerance)
    if relation != "unclear":
        same = relation == "same"
        return Decision(same, "number", "the same quantity" if same else "another quantity")
    if same_list(wanted, got, asked):
        return Decision(True, "list", "the same items in the same order")
    return UNDECIDED


def is_empty(answer: str) -> bool:
    """Says nothing: no letter, digit or sign, or only the way a solution begins ("Let's solve this step by step", "Solution:")."""
    text = answer.replace("’", "'").strip(" \t\r\n*#`\"'_")
    return says_nothing(answer) or _OPENERS.fullmatch(text) is not None


def _may_mean(reference: str, answer: str, asked: Question) -> bool:
    """Whether what looks empty may be meant: a dash for nothing, a mark that is asked for, the reference's own words."""
    if says_nothing(answer):
        dash = _DASH.fullmatch(answer) is not None and _NOTHING.fullmatch(reference) is not None
        return dash or asked.marks or says_nothing(reference) or _MARK.search(reference) is not None
    words = set(re.findall(r"[^\W\d_]{4,}", answer.casefold()))
    return not words.isdisjoint(re.findall(r"[^\W\d_]{4,}", reference.casefold()))


def _options(wanted: str, got: str, asked: Question) -> Decision:
    """Both name an option of the question, or both are no more than an option's letter."""
    if not asked.options:
        first, second = option(wanted), option(got)
        if not first or not second or first[1] or second[1] or not {first[0], second[0]} <= set("ABCDEFGH"):
            return UNDECIDED
        return _option(first[0], second[0])
    chosen, named = _chosen(wanted, asked), _chosen(got, asked)
    return _option(chosen, named) if chosen and named else UNDECIDED


def _option(wanted: str, got: str) -> Decision:
    return Decision(wanted == got, "option", f"option {got}" if wanted == got else f"option {got}, not {wanted}")


def _chosen(text: str, asked: Question) -> str | None:
    """The letter of the one option that a text names by its letter, its words, or both; None when they contradict."""
    if found := option(text):
        letter, words = found[0].upper(), found[1].casefold()
        return letter if letter in asked.options and words in ("", asked.options[letter]) else None
    return next((letter for letter, words in asked.options.items() if words and words == text.casefold()), None)


def _yes_no(wanted: str, got: str, asked: Question) -> Decision:
    """Yes and no, true and false. Where another word than these is asked for only the opposite is wrong."""
    left, right = wanted.casefold(), got.casefold()
    if not {left, right} <= _YES | _NO or asked.options or asked.wording:
        return UNDECIDED
    if (left in _YES) != (right in _YES):
        return Decision(False, "yes_no", "the opposite")
    return Decision(True, "yes_no", "both say the same") if asked.polar else UNDECIDED


def items(text: str) -> tuple[str, list[str]] | None:
    """A plain text's list: its notation (brackets, and whether ``and`` alone joins the items) and its parts.

    None for no list, a number, and a comma that may be a decimal's.
    """
    brackets = text[0] + text[-1] if re.fullmatch(r"[\[({].*[\])}]", text) else ""
    inner = text[1:-1] if brackets else text
    if quantity(inner) is not None or (not brackets and re.fullmatch(r"[-+]?[0-9]+,[0-9]+", inner)):
        return None
    if ", " in inner or ";" in inner:
        inner = re.sub(r",(?! )", "\0", inner)
    parts = [part.replace("\0", ",") for part in _SEPARATOR.split(inner, maxsplit=_MAX_ITEMS)]
    if not 2 <= len(parts) <= _MAX_ITEMS or not all(parts) or any(re.search(r"[\[\](){}]", part) for part in parts):
        return None
    return brackets + ("and" if len(parts) == 2 and re.search(r" and |&", inner) else ""), parts


def same_list(wanted: str, got: str, asked: Question) -> bool:
    """Both are lists in the same notation, of the same items in the same order. Another order is the question's matter."""
    left, right = items(wanted), items(got)
    if left is None or right is None or left[0] != right[0] or len(left[1]) != len(right[1]):
        return False
    if any(part.casefold() in _YES | _NO for part in left[1]):
        return False
    return all(_same_item(w, g, asked) for w, g in zip(left[1], right[1], strict=True))


def _same_item(wanted: str, got: str, asked: Question) -> bool:
    first, second = plain(wanted), plain(got)
    return same_text(first, second, strict=asked.exact or asked.case) or compare(first, second, asked) == "same"


VSI_THRESHOLDS = tuple(0.5 + 0.05 * i for i in range(10))
"""0.5 to 0.95, rounded as the originals round: 1 - 0.85 is a little above 0.15, and an error of exactly 15 % would be below it."""


def mean_relative_accuracy(reference: float, answer: float, thresholds: Sequence[float] = VSI_THRESHOLDS) -> float:
    """The share of thresholds t with ``|answer - reference| / |reference| < 1 - t`` (VSI-Bench); a reference of 0 must be met."""
    if reference == 0:
        return float(answer == 0)
    error = abs(answer - reference) / abs(reference)
    return sum(error < 1 - t for t in thresholds) / len(thresholds)
