"""Deterministic rules for short answers: the same text, option, yes or no, number, list.

A rule decides only pairs that are the same answer, or different ones, however the question is
meant. The rest is left to a model.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from rayloop.judge.rules.comparison import compare
from rayloop.judge.rules.plain import is_blank, says_nothing
from rayloop.judge.rules.quantities import quantity
from rayloop.judge.rules.question import Question, option

_YES = frozenset({"yes", "true"})
_NO = frozenset({"no", "false"})
_OPPOSITES = (frozenset({"yes", "no"}), frozenset({"true", "false"}))
_WHO = "(?:it|he|she|they|there|this|that|these|those|you|we|i)"
_VERB = "(?:is|are|was|were|am|do|does|did|could|has|have|had|would)"
_IN_A_SENTENCE = re.compile(
    rf"(yes), {_WHO} (?:{_VERB}|can|will)|(no), {_WHO} (?:{_VERB}(?: not|n't)|cannot|can't|will"
    r" not|won't)",
    re.IGNORECASE,
)
"""Yes or no, repeated as a sentence: "yes, it is". "Yes, it is not" contradicts itself."""
_NOTHING = re.compile(
    r"\W*(?:none|nothing|empty.*|blank|null|zero|0|n/?a|nil|no .*|silence|∅|\\emptyset)?\W*",
    re.IGNORECASE,
)
_DASH = re.compile(r"\s*(?:[-–—−/]+|_+|\.{2,}|…)\s*")
_JUNK = re.compile(r"[.:,。：，…*_`#]|\.{2,}|\*+|_+|`+|#+|-{3,}")
_MARK = re.compile(
    r"\b(?:mark|symbol|sign|colon|comma|dash|hyphen|dot|period|point|stop|ellips[ie]s|omission"
    r"|hash|hashtag|pound|sharp|number|asterisk|star|bullet|underscore|underline|line|backtick"
    r"|accent|separator|punctuation)(?:e?s)?\b",
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
_DECIMAL_COMMA = re.compile(r"[-+]?[0-9]+,[0-9]+")
_BRACKETED = re.compile(r"[\[({].*[\])}]")
_BRACKET = re.compile(r"[\[\](){}]")
_THOUSANDS = re.compile(r"(?<![0-9])[0-9]{1,3},[0-9]{3}(?![0-9])")
_COMMA_BETWEEN_DIGITS = re.compile(r"[0-9],[0-9]")
_COMMA_WITHOUT_BLANK = re.compile(r",(?! )")
_WORD_STEM = re.compile(r"[^\W\d_]{4,}")
_AND = frozenset({"and", ",and", "&"})
_SEPARATOR = re.compile(r"( ?; ?|,? and | & |, ?)")
_MAX_ITEMS = 64
_MAX_CHARACTERS = 8192
"""Characters of a question or reference that are searched.

With a longer one only equal texts and empty answers are decided.
"""


RULES_VERSION = 3
"""Part of the judge's fingerprint. Raise it with every change of a decision."""


@dataclass(frozen=True)
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
    if len(reference) > _MAX_CHARACTERS:
        return UNDECIDED

    hints = _question(question[-_MAX_CHARACTERS:], exact)
    plain_reference = hints.plain(reference)
    plain_answer = hints.plain(answer)
    if hints.same_text(plain_reference, plain_answer):
        return Decision(True, "exact", "the same text")
    if len(question) > _MAX_CHARACTERS:
        return _empty(reference, answer, hints)

    for decision in (
        _options(plain_reference, plain_answer, hints),
        _yes_no(plain_reference, plain_answer, hints),
        _empty(reference, answer, hints),
    ):
        if decision is not UNDECIDED:
            return decision

    relation = compare(plain_reference, plain_answer, hints, tolerance)
    if relation == "same":
        return Decision(True, "number", "the same quantity")
    if relation == "different":
        return Decision(False, "number", "another quantity")
    if _same_list(plain_reference, plain_answer, hints):
        return Decision(True, "list", "the same items in the same order")
    return UNDECIDED


@lru_cache(maxsize=256)
def _question(text: str, exact: bool) -> Question:
    """The question, whose hints are searched once for all answers of a group."""
    return Question(text, exact)


def _empty(reference: str, answer: str, question: Question) -> Decision:
    """Wrong for an answer without content, where something definite is asked for.

    Such an answer has no letter, digit or sign, or has only the beginning of a solution ("Let's
    solve this", "Solution:"). A mark, or a single word, is wrong only where a number, an option,
    yes or no is the right answer; elsewhere it may be the answer.
    """
    plain_reference = question.plain(reference)
    is_definite = (
        _letter(plain_reference) is not None
        or plain_reference.casefold() in _YES | _NO
        or quantity(plain_reference) is not None
        or _option_letter(plain_reference, question) is not None
    )
    if says_nothing(answer):
        is_junk = is_definite or _JUNK.fullmatch(answer.strip()) is not None
        may_be_meant = _may_be_mark(reference, answer, question)
        return _EMPTY if is_junk and not may_be_meant else UNDECIDED

    text = answer.replace("’", "'").strip(" \t\r\n*#`\"'_")
    if _OPENERS.fullmatch(text) is None:
        return UNDECIDED
    if not _word_stems(reference).isdisjoint(_word_stems(answer)):
        return UNDECIDED
    step = _STEP.fullmatch(text)
    if step and (step.group(1) in reference or option(reference)):
        return UNDECIDED
    names_step = step is not None and (text[-1] not in ":：" or "step" in question.text.lower())
    may_be_meant = names_step or _BARE_OPENER.fullmatch(text) is not None
    return _EMPTY if is_definite or not may_be_meant else UNDECIDED


def _may_be_mark(reference: str, answer: str, question: Question) -> bool:
    """Whether an answer without letters and digits may be the mark that is asked for."""
    dash_for_nothing = _DASH.fullmatch(answer) is not None and _NOTHING.fullmatch(reference)
    return bool(
        dash_for_nothing
        or question.marks
        or says_nothing(reference)
        or question.offers(answer)
        or _MARK.search(reference)
    )


def _word_stems(text: str) -> set[str]:
    """The first four letters of each word, which "analyses" and "analysis" share."""
    return {word[:4] for word in _WORD_STEM.findall(text.lower())}


def _options(reference: str, answer: str, question: Question) -> Decision:
    """Decides when both name an option of the question, or are only an option's letter."""
    if question.ambiguous:
        return UNDECIDED
    if question.options:
        right_letter = _option_letter(reference, question)
        letter = _option_letter(answer, question)
    else:
        right_letter = _letter(reference)
        letter = _letter(answer)
    if not right_letter or not letter:
        return UNDECIDED
    if letter == right_letter:
        return Decision(True, "option", f"option {letter}")
    return Decision(False, "option", f"option {letter}, not {right_letter}")


def _letter(text: str) -> str | None:
    """The letter of an option, A to H, if the text has nothing else."""
    parts = option(text)
    if parts is None:
        return None
    letter, words = parts
    return letter if not words and letter in _LETTERS else None


def _option_letter(text: str, question: Question) -> str | None:
    """The letter of the one option that a text names by its letter, its words, or both.

    None when the two contradict each other.
    """
    parts = option(text)
    if parts:
        letter = parts[0].upper()
        words = question.plain(parts[1])
        if letter not in question.options:
            return None
        fits = not words or question.same_text(words, question.options[letter])
        return letter if fits else None

    letters = [
        letter
        for letter, words in question.options.items()
        if words and question.same_text(words, text)
    ]
    if len(letters) == 1:
        return letters[0]
    exact_letters = [letter for letter in letters if question.options[letter] == text]
    return exact_letters[0] if exact_letters else None


def _yes_no(reference: str, answer: str, question: Question) -> Decision:
    """Decides between yes and no, and between true and false.

    Across the two pairs, only agreement counts: "false" may be the answer to a statement.
    """
    right_word = _yes_or_no(reference, question)
    word = _yes_or_no(answer, question)
    if not {right_word, word} <= _YES | _NO or question.options or question.negated:
        return UNDECIDED
    if {right_word, word} in _OPPOSITES:
        return Decision(False, "yes_no", "the opposite")
    same_side = (right_word in _YES) == (word in _YES)
    asks_side = (question.blank or question.asks_yes_or_no) and not question.wording
    if same_side and asks_side:
        return Decision(True, "yes_no", "both say the same")
    return UNDECIDED


def _yes_or_no(text: str, question: Question) -> str:
    """A text in small letters; "yes" or "no" for a sentence that says just that.

    A sentence counts only when the question asks for yes or no.
    """
    sentence = _IN_A_SENTENCE.fullmatch(text) if question.asks_yes_or_no else None
    if sentence is None:
        return text.casefold()
    return (sentence.group(1) or sentence.group(2)).casefold()


def items(text: str) -> tuple[str, list[str]] | None:
    """A plain text's list: its notation and its parts.

    None if the text is not a list, if it is a number, or if its one comma may be a decimal point.
    The notation says which brackets there are, whether two items have only ``and`` between them,
    whether a comma may be a decimal point, and which separators the two levels have.
    """
    brackets = text[0] + text[-1] if _BRACKETED.fullmatch(text) else ""
    inner = text[1:-1] if brackets else text
    may_be_number = not brackets and _DECIMAL_COMMA.fullmatch(inner)
    if may_be_number or quantity(inner) is not None:
        return None

    tight = ", " not in inner and ";" not in inner
    if not tight:
        # Where a comma and a blank separate items, a comma alone belongs to an item, such as 1,000.
        inner = _COMMA_WITHOUT_BLANK.sub("\0", inner)
    pieces = _SEPARATOR.split(inner, maxsplit=_MAX_ITEMS)
    parts = [part.replace("\0", ",") for part in pieces[::2]]
    separators = ["".join(mark.split()) for mark in pieces[1::2]]
    if not 2 <= len(parts) <= _MAX_ITEMS:
        return None
    if not all(parts) or any(_BRACKET.search(part) for part in parts):
        return None

    ambiguous_comma = _THOUSANDS if brackets else _COMMA_BETWEEN_DIGITS
    may_be_decimal = tight and ambiguous_comma.search(inner)
    levels = _levels(separators, bool(brackets))
    return brackets + ("tight" if may_be_decimal else "") + levels, parts


def _levels(separators: list[str], brackets: bool) -> str:
    """The separators where they mean more than the end of an item.

    "" for "a, b", "a; b" and "a, b and c".
    """
    if len(separators) == 1 and separators[0] in _AND:
        return "and"
    ends_with_and = separators[-1] in _AND
    first = separators[:-1] if ends_with_and else separators
    rows = ";" in first and (brackets or ends_with_and)
    has_levels = rows or len(set(first)) > 1 or first[0] in _AND
    return " ".join(separators) if has_levels else ""


def _same_list(reference: str, answer: str, question: Question) -> bool:
    """Both are lists in the same notation, of the same items in the same order.

    Whether another order is right depends on the question.
    """
    reference_list = items(reference)
    answer_list = items(answer)
    if question.wording or reference_list is None or answer_list is None:
        return False
    notation, reference_items = reference_list
    answer_notation, answer_items = answer_list
    if notation != answer_notation or len(reference_items) != len(answer_items):
        return False
    if any(item.casefold() in _YES | _NO for item in reference_items):
        return False
    pairs = zip(reference_items, answer_items, strict=True)
    return all(_same_item(right_item, item, question) for right_item, item in pairs)


def _same_item(reference: str, answer: str, question: Question) -> bool:
    plain_reference = question.plain(reference)
    plain_answer = question.plain(answer)
    if question.same_text(plain_reference, plain_answer):
        return True
    return compare(plain_reference, plain_answer, question) == "same"


VSI_THRESHOLDS = tuple(0.5 + 0.05 * i for i in range(10))
"""0.5 to 0.95, rounded as the originals round.

1 - 0.85 is a little above 0.15, and an error of exactly 15 % would be below it.
"""


def mean_relative_accuracy(
    reference: float, answer: float, thresholds: Sequence[float] = VSI_THRESHOLDS
) -> float:
    """The share of thresholds t with ``|answer - reference| / |reference| < 1 - t`` (VSI-Bench).

    A reference of 0 must be met exactly.
    """
    if reference == 0:
        return float(answer == 0)
    error = abs(answer - reference) / abs(reference)
    return sum(error < 1 - t for t in thresholds) / len(thresholds)
