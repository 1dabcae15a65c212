"""The answer in a policy's text, and texts without what never changes an answer: mark-up, lead-in,
blanks, final punctuation. Everything else stays: superscripts (5² is not 52), digits of other
scripts, brackets, order, the case of short words and units.
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
WORDS = {
    **{word: i for i, word in enumerate(_ONES)},
    **{ten: 10 * i for i, ten in enumerate(_TENS, 2)},
    **{
        f"{ten}-{one}": 10 * i + j
        for i, ten in enumerate(_TENS, 2)
        for j, one in enumerate(_ONES[1:10], 1)
    },
}
MAGNITUDES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
"""Powers of ten."""
WHOLE = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6}
"""Words that are a number without another one before them, as in "a dozen"."""
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
    r"(?<![\w)}\]])\\[dt]?frac\s*(?:\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}|([0-9])([0-9]))(?![\w^(\[{\\])"
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
_WORD = re.compile(r"[^\W\d_]+")
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
_ROUNDS = 8
"""Layers of mark-up that are taken off; a text with more keeps the rest."""


@lru_cache(maxsize=256)
def plain(text: str, *, exact: bool = False, articles: bool = False) -> str:
    """The text in its one spelling, in time that is linear in its length.

    Empty only for a blank text. ``exact`` (formulas) keeps every ``!``; ``articles`` keeps the
    article at the beginning, which may belong to a name.
    """
    text = " ".join(unicodedata.normalize("NFC", text).translate(CHARACTERS).split())
    text = _SUPERSCRIPT.sub(lambda m: f"^{{{m.group().translate(_SUPERSCRIPTS)}}}", text)
    text = _without_latex(text) if "\\" in text else text
    text = re.sub(r"\^(-?[0-9]+|[A-Za-z°])", r"^{\1}", text)
    text = text.replace("^{°}", "°")
    for _ in range(_ROUNDS):
        before = text
        text = _unwrapped(_LEAD.sub("", text, count=1) if _LEAD.match(text) else text)
        text = _unpunctuated(text, exact)
        if text == before:
            break
    text = _TIGHT.sub(r"\1", text).replace(" - ", "-")
    text = re.sub(r"(?<=[(\[{]) | (?=[)\]}])", "", text)
    found = None if articles else _ARTICLE.match(text)
    if found and _drops_article(text, found):
        text = text[found.start(3) :]
    return text


def same_text(first: str, second: str, *, strict: bool = False) -> bool:
    """Whether two plain texts are equal letter by letter, or differ in harmless case.

    Case is harmless in words of four letters and more, and in the first letter of those of three.
    Beside digits only the first letter of a longer word; beside symbols never. ``strict``
    (formulas): only the first letter, from three letters on.
    """
    if first == second:
        return True
    if first.lower() != second.lower() or _SYMBOLS.search(first) or _SYMBOLS.search(second):
        return False
    pairs = list(zip(_WORD.findall(first), _WORD.findall(second), strict=False))
    if "".join(a for a, _ in pairs) + "".join(b for _, b in pairs) != "".join(
        _WORD.findall(first) + _WORD.findall(second)
    ):
        return False
    digits = any(c.isdigit() for c in first)
    return all(a == b or _harmless(a, b, digits, strict) for a, b in pairs)


def is_blank(text: str) -> bool:
    """Whether nothing can be seen: only blanks, control characters and fillers.

    A private sign may be a logo.
    """
    return not any(_is_shown(unicodedata.category(c)) and not _is_filler(c) for c in text)


def says_nothing(text: str) -> bool:
    """Whether there is no letter, digit or symbol, as in ``:``, ``...``, ``#``. ∞, →, + and empty
    brackets are answers.
    """
    text = text.strip().strip("#*`_'\"").strip()
    if re.fullmatch(r"\{ *\}|\[ *\]|\( *\)", text):
        return False
    kinds = (unicodedata.category(c) for c in text if c not in "`^$" and not _is_filler(c))
    return not any(kind[0] in "LNSC" and _is_shown(kind) for kind in kinds)


def _is_shown(category: str) -> bool:
    return category[0] != "Z" and category not in ("Cc", "Cf", "Cs")


def _is_filler(character: str) -> bool:
    """Whether it is a letter or mark without a shape (Unicode's default-ignorable ones), or the
    empty Braille cell.
    """
    code = ord(character)
    return code in (0x115F, 0x1160, 0x3164, 0xFFA0, 0x2800, 0x034F, 0x17B4, 0x17B5) or (
        0x180B <= code <= 0x180F or 0xFE00 <= code <= 0xFE0F or 0xE0100 <= code <= 0xE01EF
    )


def _without_latex(text: str) -> str:
    for _ in range(3):
        text = _STYLED.sub(r"\1", text)
    text = re.sub(r"\\[,;: ]", " ", text.replace(r"\!", "")).replace("{,}", ",")
    text = _COMMAND.sub(lambda m: _COMMANDS[m.group(1)], text)
    text = _FRACTION.sub(lambda m: f"{m.group(1) or m.group(3)}/{m.group(2) or m.group(4)}", text)
    text = re.sub(r"\\([%$#&{}])", r"\1", text)
    return " ".join(text.replace("^{°}", "°").replace("^°", "°").split())


def _unwrapped(text: str) -> str:
    """The text without one layer of signs around all of it."""
    for left, right in _PAIRS:
        inner = text[len(left) : -len(right)]
        whole = text.startswith(left) and text.endswith(right) and inner.strip()
        if (
            whole
            and len(text) > len(left) + len(right)
            and left not in inner
            and right not in inner
        ):
            return inner.strip()
    if (found := _BOX.match(text)) and text.endswith("}") and text[found.end() : -1].strip():
        depth = 1
        for character in text[found.end() : -1]:
            depth += {"{": 1, "}": -1}.get(character, 0)
            if depth == 0:
                return text
        return text[found.end() : -1].strip()
    return text


def _unpunctuated(text: str, exact: bool) -> str:
    """The text without its final mark. An ellipsis stays, and so does what may be a factorial."""
    if len(text) > 1 and text[-1] in ".。;," and text[-2] not in ".。;,":
        return text[:-1].rstrip() or text
    if exact or not text.endswith("!") or re.search(r"[\\0-9]", text):
        return text
    spoken = re.fullmatch(r"(?:no|.*[^\W\d_]{3})!{1,3}", text, re.IGNORECASE) is not None
    return (
        text.rstrip("!")
        if spoken and re.split(r"[\s-]", text.rstrip("!").lower())[-1] not in NUMERALS
        else text
    )


def _drops_article(text: str, found: re.Match[str]) -> bool:
    """Whether the article goes: ``the`` before any word but a number; ``a``, which may be a letter,
    only before plain words.
    """
    words = text[found.start(3) :].split()
    if found.group(1):
        return words[0].lower().partition("-")[0] not in NUMERALS
    all_plain = all(
        re.fullmatch(r"[^\W\d_]{2,}(?:[-'][^\W\d_]+)*[,.]?", word) or word == "a" for word in words
    )
    return all_plain and (found.group(2).islower() or words[0].islower())


def _harmless(first: str, second: str, digits: bool, strict: bool) -> bool:
    """Whether the difference in case between two words changes no meaning (``same_text``)."""
    length, words = min(len(first), len(second)), (first, second)
    usual = all(word.islower() or word.istitle() for word in words)
    if digits or strict:
        return usual and length >= (4 if digits else 3)
    if length <= 2:
        return usual and first.lower() in _SMALL
    if length < 6:
        return all(
            word.islower() or word.istitle() or (length > 3 and word.isupper()) for word in words
        )
    return any(word.islower() or word.istitle() or word.isupper() for word in words)


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
    r"""The content of the last ``\boxed{...}`` with balanced braces, in linear time; None without one. ``\{`` and ``\}`` do not
    count as braces. Braces around all of the content only group, and are left out."""
    starts = {match.end() for match in _BOX.finditer(text)}
    if not starts:
        return None
    opened: list[int] = []
    ends: dict[int, int] = {}
    for brace in _BRACE.finditer(text):
        if brace.group() == "{":
            opened.append(brace.end())
        elif brace.group() == "}" and opened:
            ends[opened.pop()] = brace.start()
    if not (closed := starts & ends.keys()):
        return None
    start, end = (last := max(closed)), ends[last]
    while (group := _GROUP.match(text, start, end)) and not text[
        ends[group.end()] + 1 : end
    ].strip():
        start, end = group.end(), ends[group.end()]
    return text[start:end].strip()
