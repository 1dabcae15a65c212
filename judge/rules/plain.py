"""The answer in a policy's text, and the plain text of an answer.

A plain text is without the parts that never change an answer: mark-up, lead-in, blanks, final
punctuation. Everything else stays: superscripts (5² is not 52), digits of other scripts, brackets,
order, the case of short words and units.
"""

import re
import unicodedata
from functools import lru_cache
from typing import Literal

_ONES = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def _number_words() -> dict[str, int]:
    words = {word: value for value, word in enumerate(_ONES)}
    for tens, tens_word in enumerate(_TENS, 2):
        words[tens_word] = 10 * tens
        for unit, unit_word in enumerate(_ONES[1:10], 1):
            words[f"{tens_word}-{unit_word}"] = 10 * tens + unit
    return words


WORDS = _number_words()
"""Words for the numbers from 0 to 99, with their values."""
MAGNITUDES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
"""Powers of ten."""
WHOLE = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6}
"""Words that are a number without another one before them, such as "a dozen"."""
NUMERALS = frozenset({*WORDS, *MAGNITUDES, *WHOLE})
"""Every word for a number."""
CHARACTERS = str.maketrans(
    {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
    | dict.fromkeys(map(ord, "‐‑‒–−﹣"), "-")
    | dict.fromkeys(map(ord, "‘’‛′"), "'")
    | dict.fromkeys(map(ord, "“”„‟″"), '"')
    | {"º": "°", "µ": "μ"}
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_STYLED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|operatorname)\s*\{([^{}]*)\}")
_COMMANDS = {
    "times": "×",
    "cdot": "·",
    "pi": "π",
    "infty": "∞",
    "leq": "≤",
    "le": "≤",
    "geq": "≥",
    "ge": "≥",
    "neq": "≠",
    "ne": "≠",
    "pm": "±",
    "left": "",
    "right": "",
    "emptyset": "∅",
    "varnothing": "∅",
    "circ": "°",
}
_COMMAND = re.compile(rf"\\({'|'.join(sorted(_COMMANDS, key=len, reverse=True))})(?![A-Za-z])")
_FRACTION = re.compile(
    r"(?<![\w)}\]])\\[dt]?frac\s*"
    r"(?:\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}|([0-9])([0-9]))"
    r"(?![\w^(\[{\\])"
)
_TIGHT = re.compile(r" ?([=<>≤≥≠+*/×÷·^|]) ?")
_PAIRS = (
    ("$$", "$$"),
    ("$", "$"),
    (r"\(", r"\)"),
    (r"\[", r"\]"),
    ("**", "**"),
    ("*", "*"),
    ("`", "`"),
    ('"', '"'),
    ("'", "'"),
)
_BOX = re.compile(r"\\boxed\s*\{")
_LEAD = re.compile(
    r"(?:(?:so|therefore|thus|hence)[, ]+)?(?:the )?(?:final |correct )?answer(?: is:?|:) ?(?=\S)",
    re.IGNORECASE,
)
_ARTICLE = re.compile(
    r"(?:(The|the)|([Aa]n?))"
    r" (?!(?:few|little|lot|bit|couple|or|and|is|half|third|quarter|fourth|fifth|tenth)\b)"
    r"([^\W\d_]{2,}[^\W\d_',.\- ]*)"
)
_PLAIN_WORD = re.compile(r"[^\W\d_]{2,}(?:[-'][^\W\d_]+)*[,.]?")
_WORD = re.compile(r"[^\W\d_]+")
_EXPONENT = re.compile(r"\^(-?[0-9]+|[A-Za-z°])")
_BLANK_INSIDE_BRACKET = re.compile(r"(?<=[(\[{]) | (?=[)\]}])")
_EMPTY_BRACKETS = re.compile(r"\{ *\}|\[ *\]|\( *\)")
_EXCLAMATION = re.compile(r"(?:no|.*[^\W\d_]{3})!{1,3}", re.IGNORECASE)
_MAY_BE_FACTORIAL = re.compile(r"[\\0-9]")
_LATEX_BLANK = re.compile(r"\\[,;: ]")
_LATEX_ESCAPE = re.compile(r"\\([%$#&{}])")
_SMALL = {
    "no",
    "on",
    "up",
    "in",
    "at",
    "by",
    "to",
    "of",
    "is",
    "as",
    "or",
    "an",
    "my",
    "st",
    "mr",
    "dr",
    "de",
    "la",
    "el",
}
_SYMBOLS = re.compile(r"[\\^_=<>≤≥≠{}|~*+]")
_MAX_LAYERS = 8
"""Layers of mark-up that are taken off; a text with more keeps the rest."""
_MAX_NESTED_STYLES = 3
_FINAL_MARKS = ".。;,"


@lru_cache(maxsize=256)
def plain(text: str, *, exact: bool = False, articles: bool = False) -> str:
    """The text in its one spelling, in time that is linear in its length.

    Empty only for a blank text. ``exact`` (formulas) keeps every ``!``; ``articles`` keeps the
    article at the beginning, which may belong to a name.
    """
    text = " ".join(unicodedata.normalize("NFC", text).translate(CHARACTERS).split())
    text = _SUPERSCRIPT.sub(lambda m: f"^{{{m.group().translate(_SUPERSCRIPTS)}}}", text)
    text = _without_latex(text) if "\\" in text else text
    text = _EXPONENT.sub(r"^{\1}", text)
    text = text.replace("^{°}", "°")
    for _ in range(_MAX_LAYERS):
        outer = text
        if _LEAD.match(text):
            text = _LEAD.sub("", text, count=1)
        text = _unpunctuated(_unwrapped(text), exact)
        if text == outer:
            break
    text = _TIGHT.sub(r"\1", text).replace(" - ", "-")
    text = _BLANK_INSIDE_BRACKET.sub("", text)
    article = None if articles else _ARTICLE.match(text)
    if article and _drops_article(text, article):
        text = text[article.start(3) :]
    return text


def same_text(first: str, second: str, *, strict: bool = False) -> bool:
    """Whether two plain texts are equal letter by letter, or differ in harmless case.

    Case is harmless in words of four letters and more, and in the first letter of words of three.
    In a text with digits only the first letter of a longer word may differ; in a text with symbols
    none. ``strict`` (formulas): only the first letter, from three letters on.
    """
    if first == second:
        return True
    if first.lower() != second.lower() or _SYMBOLS.search(first) or _SYMBOLS.search(second):
        return False
    first_words = _WORD.findall(first)
    second_words = _WORD.findall(second)
    if len(first_words) != len(second_words):
        return False
    digits = any(character.isdigit() for character in first)
    return all(
        first_word == second_word or _harmless(first_word, second_word, digits, strict)
        for first_word, second_word in zip(first_words, second_words, strict=True)
    )


def is_blank(text: str) -> bool:
    """Whether nothing can be seen: only blanks, control characters and fillers.

    A character for private use may be a logo.
    """
    return not any(
        _is_shown(unicodedata.category(character)) and not _is_filler(character)
        for character in text
    )


def says_nothing(text: str) -> bool:
    """Whether the text has no letter, digit or symbol: ``:``, ``...``, ``#``.

    ∞, →, + and empty brackets are answers.
    """
    text = text.strip().strip("#*`_'\"").strip()
    if _EMPTY_BRACKETS.fullmatch(text):
        return False
    categories = (
        unicodedata.category(character)
        for character in text
        if character not in "`^$" and not _is_filler(character)
    )
    return not any(category[0] in "LNSC" and _is_shown(category) for category in categories)


def _is_shown(category: str) -> bool:
    return category[0] != "Z" and category not in ("Cc", "Cf", "Cs")


def _is_filler(character: str) -> bool:
    """Whether it is a letter or mark without a shape, or the empty Braille cell.

    Such letters and marks are Unicode's default-ignorable ones.
    """
    code = ord(character)
    if code in (0x115F, 0x1160, 0x3164, 0xFFA0, 0x2800, 0x034F, 0x17B4, 0x17B5):
        return True
    return 0x180B <= code <= 0x180F or 0xFE00 <= code <= 0xFE0F or 0xE0100 <= code <= 0xE01EF


def _without_latex(text: str) -> str:
    for _ in range(_MAX_NESTED_STYLES):
        text = _STYLED.sub(r"\1", text)
    text = text.replace(r"\!", "")
    text = _LATEX_BLANK.sub(" ", text).replace("{,}", ",")
    text = _COMMAND.sub(lambda command: _COMMANDS[command.group(1)], text)
    text = _FRACTION.sub(_slash_fraction, text)
    text = _LATEX_ESCAPE.sub(r"\1", text)
    return " ".join(text.replace("^{°}", "°").replace("^°", "°").split())


def _slash_fraction(fraction: re.Match[str]) -> str:
    numerator, denominator, short_numerator, short_denominator = fraction.groups()
    return f"{numerator or short_numerator}/{denominator or short_denominator}"


def _unwrapped(text: str) -> str:
    """The text without one layer of signs around all of it."""
    for left, right in _PAIRS:
        inner = text[len(left) : -len(right)]
        is_wrapped = text.startswith(left) and text.endswith(right) and inner.strip()
        has_both_signs = len(text) > len(left) + len(right)
        if is_wrapped and has_both_signs and left not in inner and right not in inner:
            return inner.strip()
    box = _BOX.match(text)
    if box is None or not text.endswith("}"):
        return text
    content = text[box.end() : -1]
    return content.strip() if content.strip() and not _closes_brace(content) else text


def _closes_brace(text: str) -> bool:
    """Whether the text closes a brace that it does not open."""
    depth = 0
    for character in text:
        if character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
        if depth < 0:
            return True
    return False


def _unpunctuated(text: str, exact: bool) -> str:
    """The text without its final mark. An ellipsis stays, and so does a possible factorial."""
    if len(text) > 1 and text[-1] in _FINAL_MARKS and text[-2] not in _FINAL_MARKS:
        return text[:-1].rstrip() or text
    if exact or not text.endswith("!") or _MAY_BE_FACTORIAL.search(text):
        return text
    if _EXCLAMATION.fullmatch(text) is None:
        return text
    unmarked = text.rstrip("!")
    last_word = re.split(r"[\s-]", unmarked.lower())[-1]
    return text if last_word in NUMERALS else unmarked


def _drops_article(text: str, article: re.Match[str]) -> bool:
    """Whether the article is left out of the plain text.

    ``the`` is left out before any word but a number; ``a``, which may be a letter, only before
    plain words.
    """
    definite, indefinite, _ = article.groups()
    words = text[article.start(3) :].split()
    if definite:
        return words[0].lower().partition("-")[0] not in NUMERALS
    all_plain = all(_PLAIN_WORD.fullmatch(word) or word == "a" for word in words)
    return all_plain and (indefinite.islower() or words[0].islower())


def _harmless(first: str, second: str, digits: bool, strict: bool) -> bool:
    """Whether the difference in case between two words changes no meaning (``same_text``)."""
    length = min(len(first), len(second))
    words = (first, second)
    usual = all(word.islower() or word.istitle() for word in words)
    if digits:
        return usual and length >= 4
    if strict:
        return usual and length >= 3
    if length <= 2:
        return usual and first.lower() in _SMALL
    if length == 3:
        return usual
    usual_or_upper = (word.islower() or word.istitle() or word.isupper() for word in words)
    return all(usual_or_upper) if length < 6 else any(usual_or_upper)


How = Literal["tagged_box", "tag", "box", "last_line", "whole"]

_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_GROUP = re.compile(r"\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""A brace, or a character that a backslash makes text."""


def extract(text: str, how: How) -> str | None:
    """The last answer in this form, stripped; None without one.

    ``tagged_box``: a box in an answer block, or the whole block.
    """
    match how:
        case "whole":
            return text.strip()
        case "last_line":
            lines = text.strip().splitlines()
            return lines[-1].strip() if lines else None
        case "box":
            return boxed(text)
        case "tag" | "tagged_box":
            blocks = _TAG.findall(text)
            if not blocks:
                return None
            inside: str = blocks[-1].strip()
            box = boxed(inside) if how == "tagged_box" else None
            return inside if box is None else box


def boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}`` with balanced braces; None without one.

    ``\{`` and ``\}`` do not count as braces. Braces around all of the content only group, and are
    left out. The time is linear in the text's length.
    """
    box_starts = {box.end() for box in _BOX.finditer(text)}
    if not box_starts:
        return None
    ends = _brace_ends(text)
    closed_starts = box_starts & ends.keys()
    if not closed_starts:
        return None
    start = max(closed_starts)
    end = ends[start]
    while True:
        group = _GROUP.match(text, start, end)
        if group is None:
            break
        group_end = ends[group.end()]
        if text[group_end + 1 : end].strip():
            break
        start = group.end()
        end = group_end
    return text[start:end].strip()


def _brace_ends(text: str) -> dict[int, int]:
    """Where each pair of braces ends, by the position after its opening brace."""
    open_starts: list[int] = []
    ends: dict[int, int] = {}
    for brace in _BRACE.finditer(text):
        if brace.group() == "{":
            open_starts.append(brace.end())
        elif brace.group() == "}" and open_starts:
            ends[open_starts.pop()] = brace.start()
    return ends
