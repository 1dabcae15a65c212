"""The parts of a turn: what was thought, a summary, and where the calls stand."""

import functools
import re
from collections.abc import Sequence

from pydantic import Field

from rayloop.config.settings import SettingsModel
from rayloop.envs.grammar.bodies import Stop
from rayloop.envs.grammar.family import LanguageFile

Span = tuple[int, int]
"""Where a part of a text begins and ends, in characters."""
ENDS_OF_CALLS = ("}", "</function>")
"""How a call ends whose closing mark an engine left out as a stop word."""


class Part(SettingsModel):
    """A part of a turn, between two marks."""

    open: str = ""
    """The mark before it, at the beginning of a line, or anywhere if it is a special token."""
    close: str = ""
    """The mark behind it; empty: the part ends at the next mark of another one."""


class TurnParts(LanguageFile):
    """Where a language has the parts of a turn."""

    thinking: tuple[Part, ...] = (Part(open="<think>", close="</think>"),)
    """What comes first and is never searched for calls."""
    thought: tuple[Part, ...] = ()
    """Where the thought is, the first that is not empty; else what stands before the summary."""
    summary: tuple[Part, ...] = ()
    other: tuple[str, ...] = ()
    """Marks of parts that are not read."""
    calls: tuple[Part, ...] = Field(min_length=1)
    """Where calls are: the first kind that a text has; the last such part, or all of them."""
    several: bool = False
    """Whether a turn may have more than one part with calls, or more than one object."""

    def thinking_of(self, text: str) -> tuple[str, int]:
        """Return what is thought first, and where the rest begins. Raises Stop."""
        start = len(text) - len(text.lstrip())
        for part in self.thinking:
            if not text.startswith(part.open, start):
                continue
            begin = start + len(part.open)
            end = text.find(part.close, begin)
            if end < 0:
                raise Stop(f"{part.open} is never closed with {part.close}", len(text))
            return text[begin:end].strip(), end + len(part.close)
        return "", 0

    def spans_of_calls(self, text: str, start: int) -> list[Span]:
        """Return where the calls are behind ``start``, at least one span. Raises Stop."""
        for part in self.calls:
            if not part.open:
                # Without a mark everything is a call.
                return [(start, len(text))]
            begins = [match.end() for match in _pattern((part.open,)).finditer(text, start)]
            if part.open == "{":
                # The mark is a part of the object, and further ones are inside or behind it.
                begins = [begin - 1 for begin in begins[:1]]
            if begins:
                taken = begins if self.several else begins[-1:]
                return [(begin, self._end_of_calls(text, begin, part)) for begin in taken]
        expected = " or ".join(repr(part.open) for part in self.calls)
        raise Stop(f"no line begins with {expected}", len(text))

    def thought_and_summary(self, text: str, start: int, calls: Sequence[Span]) -> tuple[str, str]:
        """Return the two texts, "" for each that is missing.

        They stand before or behind the calls, and behind ``start``.
        """
        first_call = calls[0][0]
        last_call_end = calls[-1][1]
        before = text[start:first_call]
        prose = before + "\n" + text[last_call_end:]
        thought = self._section(prose, self.thought) or self._unmarked(before)
        return thought, self._section(prose, self.summary)

    def _end_of_calls(self, text: str, begin: int, part: Part) -> int:
        if not part.close:
            marks = self._marks_of_prose()
            mark = _pattern(marks).search(text, begin) if marks else None
            return mark.start() if mark else len(text)
        find = text.find if self.several else text.rfind
        end = find(part.close, begin)
        if end >= 0:
            return end
        if text[begin:].strip().endswith(ENDS_OF_CALLS):
            return len(text)
        raise Stop(f"{part.open} is never closed with {part.close}", len(text))

    def _section(self, prose: str, parts: Sequence[Part]) -> str:
        """Return the text of the first part that is not empty."""
        for part in parts:
            mark = _pattern((part.open,)).search(prose)
            if mark is None:
                continue
            section = prose[mark.end() : self._end_of_section(prose, mark.end(), part)].strip()
            if section:
                return section
        return ""

    def _end_of_section(self, prose: str, begin: int, part: Part) -> int:
        if part.close:
            end = prose.find(part.close, begin)
            return end if end >= 0 else len(prose)
        following = _pattern(self._marks()).search(prose, begin)
        return following.start() if following else len(prose)

    def _unmarked(self, before: str) -> str:
        """Return what stands before all marks."""
        marks = self._marks()
        mark = _pattern(marks).search(before) if marks else None
        return before[: mark.start() if mark else len(before)].strip()

    def _marks_of_prose(self) -> tuple[str, ...]:
        """The marks of all parts but calls."""
        return (*(part.open for part in (*self.thought, *self.summary)), *self.other)

    def _marks(self) -> tuple[str, ...]:
        marks_of_calls = (part.open for part in self.calls if part.open)
        return (*self._marks_of_prose(), *marks_of_calls)


@functools.cache
def _pattern(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of any of the marks.

    A special token counts anywhere, another mark only at the beginning of a line, or behind the end
    of what is thought first.
    """
    tokens = [re.escape(mark) for mark in marks if mark.startswith(("<|", "</"))]
    words = [re.escape(mark) for mark in marks if not mark.startswith(("<|", "</"))]
    if words:
        line_start = r"(?:^|(?<=</think>)|(?<=</THINK>))[ \t]*"
        tokens.append(f"{line_start}(?:{'|'.join(words)})")
    return re.compile("|".join(tokens), re.MULTILINE)
