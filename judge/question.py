"""What a question's wording means for comparing answers: a code, a count, a year, an option, a percentage."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from judge.plain import plain


def _any(*patterns: str) -> re.Pattern[str]:
    """Any of these words and phrases, separated by commas, as whole words in any case."""
    return re.compile(rf"\b(?:{'|'.join(', '.join(patterns).split(', '))})\b", re.IGNORECASE)


_CODES = _any(
    r"versions?, zip, postal, post ?code, codes?, phone, telephone, fax, serial, plate, licen[cs]e, ids?, isbn, pages?, chapter",
    r"section, verse, scores?, scored, result, clock, o'?clock, (?:what|which) time, opening hours, dates?, day, month, signature",
    r"indicator, room, route, flight, gate, platform, extension, channel, model, address, (?:what|which) numbers?, digits?",
    r"printed, written, jersey, odds, account, passwords?, pin, label, sign, screen, display(?:ed)?, ip, identifier, number on",
)
_HOW_MANY = _any("how many")
_COUNTS = _any("how many, number of, count(?:s|ed|ing)?")
_YEARS = _any("years?, when, decades?, dates?")
_TIMES = _any("time, clock, o'?clock, hour hand")
_WORDING = _any(
    r"(?:what|which) (?:words?|letters?|text|names?|title|symbols?|characters?), written, spell\w*, reads?, says?, inscri\w+",
    r"captions?, printed, label\w*",
)
_CASE = _any(
    r"letters?, case, capital\w*, upper\w*, lower\w*, passwords?, exactly, plate, captcha, licen[cs]e, serial, variables?",
    r"symbols?, units?, codes?, formulas?, formulae, compounds?, elements?, genotypes?, alleles?, genes?",
)
_MARKS = _any("symbols?, punctuation, characters?, operators?, operation, marks?")
_VALUES = _any(
    "how (?:much|far|long|tall|high|wide|heavy|deep|large|big|old|fast), average, mean, median, percentage, value, total, sum",
    "difference, calculate, compute, solve, evaluate, area, volume, length, height, width, distance, price, cost, amount",
    "probability, slope, share",
)
_SCALES = _any("hundreds?, thousands?, millions?, billions?, trillions?, bn, mn, k")
_CHANGES = _any(
    r"decreas\w*, drop\w*, falls?, fell, declin\w*, lower, less, fewer, differ\w*, loss\w*, lost, los[et]\w*, chang\w*, reduc\w*",
    "shrinks?, shrank, below, debt, deficit",
)
_OF_NUMBER = re.compile(r"\bof\s+\$?[0-9]", re.IGNORECASE)
_PERCENT = re.compile(
    r"^\W*(?:what|which|how many)(?:'s| is| was| are| were)?(?: the)?(?: \w+)? (?:percent|per cent|percentage)\b"
    r"|\bin (?:percent\b|%)",
    re.IGNORECASE,
)
_POLAR = re.compile(
    r"(?:^\W*|[.!]\s+)(?:is|are|was|were|am|do|does|did|can|could|has|have|had|will|would|should|shall|may|might|must)\b"
    r"|\byes\b.{0,12}\bno\b|\btrue\b.{0,12}\bfalse\b",
    re.IGNORECASE,
)
_FIRST, _SECOND = (re.compile(rf"(?:^|[\s(\[]){number}\s?[).:\]]\s*\S") for number in (1, 2))
_MARKER = re.compile(r"(?:^|(?<=[\s(\[,;]))([A-Ja-j])[).:\]](?![A-Za-z]?\.)")
_OPTION = re.compile(
    r"(?:(?:option|choice) )?(?:\(\s?([A-Za-z])\s?\)|\[\s?([A-Za-z])\s?\]|([A-Za-z])(?=\s?[.):]|$))\s?[.):]?\s?(.*)",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True)
class Question:
    """``exact`` (formulas): letters keep their case, and numbers are meant as numbers.

    Every property is a hint that makes rules more careful (or says that a number is one): none can make them decide more loosely
    than the same texts under a question that says nothing.
    """

    text: str = ""
    exact: bool = False

    def _has(self, pattern: re.Pattern[str]) -> bool:
        return pattern.search(self.text) is not None

    @cached_property
    def codes(self) -> bool:
        """May ask for a code, version, score, date or time, where 1.10 is not 1.1."""
        return self._has(_CODES) and not self._has(_HOW_MANY)

    @cached_property
    def counts(self) -> bool:
        return self._has(_COUNTS)

    @cached_property
    def years(self) -> bool:
        return not self.text.strip() or self._has(_YEARS)

    @cached_property
    def times(self) -> bool:
        return self._has(_TIMES)

    @cached_property
    def wording(self) -> bool:
        """May ask for the very word, where SEVEN is not 7 and TRUE not yes."""
        return self._has(_WORDING)

    @cached_property
    def case(self) -> bool:
        return self._has(_CASE)

    @cached_property
    def marks(self) -> bool:
        """May ask for a punctuation mark."""
        return self._has(_MARKS)

    @cached_property
    def values(self) -> bool:
        """Asks for a number that was measured or computed: zeros at its end are not part of it."""
        return (self.exact or self._has(_VALUES)) and not self.codes

    @cached_property
    def scales(self) -> bool:
        """Speaks of thousands or millions: in which of them the answer is may be said here."""
        return self._has(_SCALES)

    @cached_property
    def changes(self) -> bool:
        """Speaks of a difference, whose sign may be in the wording."""
        return self._has(_CHANGES)

    @cached_property
    def percent(self) -> bool:
        """Asks for a percentage, so that the sign may be left out."""
        return self._has(_PERCENT) and not self._has(_OF_NUMBER)

    @cached_property
    def polar(self) -> bool:
        """Asks for yes or no. An empty question might."""
        return not self.text.strip() or self._has(_POLAR)

    @cached_property
    def numbered(self) -> bool:
        """Offers options 1, 2, ..., so that a number may name one."""
        first = _FIRST.search(self.text)
        return first is not None and _SECOND.search(self.text, first.end()) is not None

    @cached_property
    def options(self) -> dict[str, str]:
        """The lettered options' texts by letter (upper case), plain and without case; empty unless there are at least A and B.

        Empty too when an option's text is itself a letter, which could mean either. Texts that do not tell options apart are "".
        """
        found: list[re.Match[str]] = []
        for marker in _MARKER.finditer(self.text):
            same_case = not found or marker.group(1).isupper() == found[0].group(1).isupper()
            if same_case and marker.group(1).upper() == chr(ord("A") + len(found)):
                found.append(marker)
        if len(found) < 2:
            return {}
        ends = [marker.start() for marker in found[1:]] + [len(self.text)]
        cut = [self.text[m.end() : end].strip().split("\n")[0] for m, end in zip(found, ends, strict=True)]
        texts = [plain(text.strip(" ([,;")).casefold() for text in cut]
        if any(len(text) == 1 and text.isalpha() for text in texts):
            return {}
        distinct = len(set(texts)) == len(texts) and all(texts)
        return {m.group(1).upper(): text if distinct else "" for m, text in zip(found, texts, strict=True)}


def option(text: str) -> tuple[str, str] | None:
    """The letter as written and the text of ``B``, ``(B)``, ``B. red``, ``option B``; None for anything else. Of a plain text."""
    found = _OPTION.fullmatch(text)
    if found is None:
        return None
    letter = next(part for part in found.groups()[:3] if part)
    return letter, plain(found.group(4))
