"""Deterministic rules for short answers: the same text, option, yes or no, number, list.

A rule decides only what is the same, or another answer, however the question is meant; the rest is
left to a model.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from rayloop.judge.rules.plain import is_blank, says_nothing
from rayloop.judge.rules.quantities import compare, quantity
from rayloop.judge.rules.question import Question, option

_YES, _NO = frozenset({"yes", "true"}), frozenset({"no", "false"})
_OPPOSITES = (frozenset({"yes", "no"}), frozenset({"true", "false"}))
_WHO = "(?:it|he|she|they|there|this|that|these|those|you|we|i)"
_VERB = "(?:is|are|was|were|am|do|does|did|could|has|have|had|would)"
_IN_A_SENTENCE = re.compile(
    rf"(yes), {_WHO} (?:{_VERB}|can|will)|(no), {_WHO} (?:{_VERB}(?: not|n't)|cannot|can't|will"
    r" not|won't)",
    re.IGNORECASE,
)
"""Yes or no, and the same said once more: "yes, it is". "Yes, it is not" contradicts itself."""
_NOTHING = re.compile(
    r"\W*(?:none|nothing|empty.*|blank|null|zero|0|n/?a|nil|no .*|silence|∅|\\emptyset)?\W*",
    re.IGNORECASE,
)
_DASH = re.compile(r"\s*(?:[-–—−/]+|_+|\.{2,}|…)\s*")
_JUNK = re.compile(r"[.:,。：，…*_`#]|\.{2,}|\*+|_+|`+|#+|-{3,}")
_MARK = re.compile(
    r"\b(?:mark|symbol|sign|colon|comma|dash|hyphen|dot|period|point|stop|ellips[ie]s|omission|hash|hashtag|pound|sharp|number|asterisk"
    r"|star|bullet|underscore|underline|line|backtick|accent|separator|punctuation)(?:e?s)?\b",
    re.IGNORECASE,
)
_WORD_OF_OPENER = (
    "thought process|solution|final"
    " answer|answer|reasoning|explanation|analysis|response|judge?ment|verdict|output|result"
    "|think(?:ing)?|解|解答|答案|かいせつ|respuesta|antwort"
)
_BARE_OPENER = re.compile(rf"(?:{_WORD_OF_OPENER})[\s,.!…]*", re.IGNORECASE)
_STEP = re.compile(r"step (\d+)[\s:：,.!…]*", re.IGNORECASE)
_OPENERS = re.compile(
    r"(?:(?:ok(?:ay)?|sure|certainly|alright|well)[,.! ]*)?"
    rf"(?:{_WORD_OF_OPENER}|the (?:final )?answer is|step \d+"
    r"|let(?:'s|s| us| me)"
    r" (?:solve|think|analy[sz]e|work|break|start|begin|examine|consider)\b[^.:!?0-9]{0,80}"
    r"|to (?:solve|answer) (?:this|the) (?:question|problem|equation)\b[^.:!?0-9]{0,60})"
    r"[\s:：,.!…]*",
    re.IGNORECASE,
)
_AND = frozenset({"and", ",and", "&"})
_SEPARATOR = re.compile(r"( ?; ?|,? and | & |, ?)")
_MAX_ITEMS = 64
_LONGEST = 8192
"""Characters of a question or reference that are searched; with a longer one only equal texts and
empty answers are decided.
"""


VERSION = 3
"""Part of the judge's fingerprint. Raise it with every change of a decision."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision about an answer.

    ``correct`` None: no rule decides. ``rule`` names the rule, ``reason`` explains it.
    """

    correct: bool | None
    rule: str = ""
    reason: str = ""


UNDECIDED = Decision(None)
_EMPTY = Decision(False, "empty", "no answer, or only the opening of one")
_LETTERS = frozenset("ABCDEFGH")


def decide(
    reference: str,
    answer: str,
    *,
    question: str = "",
    tolerance: float = 0.0,
    max_length: int = 1000,
    exact: bool = False,
) -> Decision:
    """Whether ``answer`` is right, given the right answer ``reference``.

    Never raises. ``tolerance`` is relative, for numbers read off a chart; 0 compares exactly.
    ``exact``: formulas, where case counts. The question can only make a rule more careful, or say
    what a letter, a number or a sign means. An answer that says nothing (blank, punctuation, the
    beginning of a solution) is wrong, and so is one of ``max_length`` characters or more that is
    not the reference itself.
    """
    if is_blank(answer):
        return Decision(False, "empty", "no answer")
    if reference.strip() == answer.strip():
        return Decision(True, "exact", "the same text")
    if len(answer) >= max_length:
        return Decision(False, "too_long", f"{max_length} characters or more")
    if len(reference) > _LONGEST:
        return UNDECIDED
    asked = _question(question[-_LONGEST:], exact)
    wanted, got = asked.plain(reference), asked.plain(answer)
    if asked.same_text(wanted, got):
        return Decision(True, "exact", "the same text")
    if len(question) > _LONGEST:
        return _nothing(reference, answer, asked)
    for decision in (
        _options(wanted, got, asked),
        _yes_no(wanted, got, asked),
        _nothing(reference, answer, asked),
    ):
        if decision is not UNDECIDED:
            return decision
    relation = compare(wanted, got, asked, tolerance)
    if relation != "unclear":
        same = relation == "same"
        return Decision(same, "number", "the same quantity" if same else "another quantity")
    return (
        Decision(True, "list", "the same items in the same order")
        if same_list(wanted, got, asked)
        else UNDECIDED
    )


@lru_cache(maxsize=256)
def _question(text: str, exact: bool) -> Question:
    """The question, whose hints are looked for once for all answers of a group."""
    return Question(text, exact)


def _nothing(reference: str, answer: str, asked: Question) -> Decision:
    """An answer without a letter, digit or sign, or with the beginning of a solution alone ("Let's
    solve this", "Solution:"). A mark, or a single word, is wrong only where a number, an option,
    yes or no is wanted; elsewhere it may be what is meant.
    """
    wanted = asked.plain(reference)
    definite = (
        _letter(wanted) is not None
        or wanted.casefold() in _YES | _NO
        or quantity(wanted) is not None
        or _chosen(wanted, asked) is not None
    )
    if says_nothing(answer):
        a_dash = _DASH.fullmatch(answer) is not None and _NOTHING.fullmatch(reference) is not None
        meant = (
            a_dash
            or asked.marks
            or says_nothing(reference)
            or asked.offers(answer)
            or _MARK.search(reference) is not None
        )
        return _EMPTY if not meant and (definite or _JUNK.fullmatch(answer.strip())) else UNDECIDED
    text = answer.replace("’", "'").strip(" \t\r\n*#`\"'_")
    if _OPENERS.fullmatch(text) is None or not _starts(reference).isdisjoint(_starts(answer)):
        return UNDECIDED
    step = _STEP.fullmatch(text)
    if step and (step.group(1) in reference or option(reference)):
        return UNDECIDED
    a_step = step is not None and (text[-1] not in ":：" or "step" in asked.text.lower())
    may_be_meant = a_step or _BARE_OPENER.fullmatch(text) is not None
    return _EMPTY if definite or not may_be_meant else UNDECIDED


def _starts(text: str) -> set[str]:
    """The first four letters of each word, which "analyses" and "analysis" share."""
    return {word[:4] for word in re.findall(r"[^\W\d_]{4,}", text.lower())}


def _options(wanted: str, got: str, asked: Question) -> Decision:
    """Both name an option of the question, or both are no more than an option's letter."""
    if asked.ambiguous:
        return UNDECIDED
    chosen, named = (
        _chosen(text, asked) if asked.options else _letter(text) for text in (wanted, got)
    )
    if not chosen or not named:
        return UNDECIDED
    return Decision(
        chosen == named,
        "option",
        f"option {named}" if chosen == named else f"option {named}, not {chosen}",
    )


def _letter(text: str) -> str | None:
    """The letter of an option, A to H, that is all of a text."""
    found = option(text)
    return found[0] if found and not found[1] and found[0] in _LETTERS else None


def _chosen(text: str, asked: Question) -> str | None:
    """The letter of the one option that a text names by its letter, its words, or both; None when
    they contradict.
    """
    if found := option(text):
        letter, words = found[0].upper(), asked.plain(found[1])
        fits = letter in asked.options and (
            not words or asked.same_text(words, asked.options[letter])
        )
        return letter if fits else None
    same = [
        letter for letter, words in asked.options.items() if words and asked.same_text(words, text)
    ]
    return next(
        (letter for letter in same if len(same) == 1 or asked.options[letter] == text), None
    )


def _yes_no(wanted: str, got: str, asked: Question) -> Decision:
    """Yes and no, true and false.

    Across the two pairs, only agreement counts: "false" may be the answer to a statement.
    """
    left, right = (_said(text, asked) for text in (wanted, got))
    if not {left, right} <= _YES | _NO or asked.options or asked.negated:
        return UNDECIDED
    if {left, right} in _OPPOSITES:
        return Decision(False, "yes_no", "the opposite")
    agree = (
        (left in _YES) == (right in _YES)
        and (asked.blank or asked.asks_yes_or_no)
        and not asked.wording
    )
    return Decision(True, "yes_no", "both say the same") if agree else UNDECIDED


def _said(text: str, asked: Question) -> str:
    """A text in small letters; "yes" or "no" where it says just that in a sentence, to a question
    that asks for it.
    """
    found = _IN_A_SENTENCE.fullmatch(text) if asked.asks_yes_or_no else None
    return (text if found is None else found.group(1) or found.group(2)).casefold()


def items(text: str) -> tuple[str, list[str]] | None:
    """A plain text's list: its notation and its parts.

    None for no list, a number, and a comma that may be a decimal's. The notation has the brackets,
    ``and`` alone between two items, commas that may be a decimal's, and separators of two levels.
    """
    brackets = text[0] + text[-1] if re.fullmatch(r"[\[({].*[\])}]", text) else ""
    inner = text[1:-1] if brackets else text
    if quantity(inner) is not None or (not brackets and re.fullmatch(r"[-+]?[0-9]+,[0-9]+", inner)):
        return None
    tight = ", " not in inner and ";" not in inner
    if not tight:
        # Where a comma and a blank separate items, a comma alone belongs to one, as in 1,000.
        inner = re.sub(r",(?! )", "\0", inner)
    split = _SEPARATOR.split(inner, maxsplit=_MAX_ITEMS)
    parts, separators = (
        [part.replace("\0", ",") for part in split[::2]],
        ["".join(mark.split()) for mark in split[1::2]],
    )
    if (
        not 2 <= len(parts) <= _MAX_ITEMS
        or not all(parts)
        or any(re.search(r"[\[\](){}]", part) for part in parts)
    ):
        return None
    in_thousands = r"(?<![0-9])[0-9]{1,3},[0-9]{3}(?![0-9])"
    perhaps_decimal = tight and re.search(in_thousands if brackets else r"[0-9],[0-9]", inner)
    return (
        brackets + ("tight" if perhaps_decimal else "") + _levels(separators, bool(brackets)),
        parts,
    )


def _levels(separators: list[str], brackets: bool) -> str:
    """The separators where they mean more than the end of an item: "" for "a, b", "a; b" and "a, b
    and c".
    """
    if len(separators) == 1 and separators[0] in _AND:
        return "and"
    first = separators[:-1] if separators[-1] in _AND else separators
    rows = ";" in first and (brackets or first is not separators)
    return " ".join(separators) if rows or len(set(first)) > 1 or first[0] in _AND else ""


def same_list(wanted: str, got: str, asked: Question) -> bool:
    """Both are lists in the same notation, of the same items in the same order.

    Another order is the question's matter.
    """
    left, right = items(wanted), items(got)
    if (
        asked.wording
        or left is None
        or right is None
        or left[0] != right[0]
        or len(left[1]) != len(right[1])
    ):
        return False
    if any(part.casefold() in _YES | _NO for part in left[1]):
        return False
    return all(_same_item(w, g, asked) for w, g in zip(left[1], right[1], strict=True))


def _same_item(wanted: str, got: str, asked: Question) -> bool:
    first, second = asked.plain(wanted), asked.plain(got)
    return asked.same_text(first, second) or compare(first, second, asked) == "same"


VSI_THRESHOLDS = tuple(0.5 + 0.05 * i for i in range(10))
"""0.5 to 0.95, rounded as the originals round: 1 - 0.85 is a little above 0.15, and an error of
exactly 15 % would be below it.
"""


def mean_relative_accuracy(
    reference: float, answer: float, thresholds: Sequence[float] = VSI_THRESHOLDS
) -> float:
    """The share of thresholds t with ``|answer - reference| / |reference| < 1 - t`` (VSI-Bench); a
    reference of 0 must be met.
    """
    if reference == 0:
        return float(answer == 0)
    error = abs(answer - reference) / abs(reference)
    return sum(error < 1 - t for t in thresholds) / len(thresholds)
