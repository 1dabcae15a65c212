"""The input of the rewards, and the base class of a variant.

The input is a completion's parts, the row's truth and the count of tokens.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

from rayloop.core.types import Task

_STEP = re.compile(r"<step-(\d{1,4})>\s*:?")
_PIECE = re.compile(r"[^\W\d_]+|\d|[^\w\s]+|_+|\n+")
_ASCII = re.compile(r"[A-Za-z]+|[^ \t\r\n\f\v_A-Za-z0-9]+|[0-9]|_+|\n+")
"""The same for texts of ASCII alone, in a third of the time."""
_FENCE = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL)

Count = Callable[[str], int]
"""Tokens of a text."""


@dataclass(frozen=True)
class Parts:
    """The contents of the tags, stripped; None without the opening tag.

    ``steps`` is the thought after the table (or type).
    """

    type: str | None
    table: str | None
    steps: str
    answer: str | None
    closed: bool
    """Whether the text has the answer's closing tag."""


def parts(text: str) -> Parts:
    """The parts of a completion, in time linear in its length.

    The last of several answers counts; type and table are looked for in the thought only.
    """
    thought, _ = block(text, "think")
    answer, closed = block(text, "answer")
    if thought is None:
        return Parts(None, None, "", answer, closed)
    kind, _ = block(thought, "type")
    table, _ = block(thought, "table")
    last_mark = "</type>" if table is None else "</table>"
    steps = thought.rpartition(last_mark)[2].strip()
    return Parts(kind, table, steps, answer, closed)


def block(text: str, tag: str) -> tuple[str | None, bool]:
    """The content of the last opening tag, and whether a closing tag ends it.

    Without one it ends with the text. None and False without an opening tag.
    """
    opening = f"<{tag}>"
    start = text.rfind(opening)
    if start < 0:
        return None, False
    start += len(opening)
    end = text.find(f"</{tag}>", start)
    if end < 0:
        return text[start:].strip(), False
    return text[start:end].strip(), True


def well_formed(text: str) -> bool:
    """Whether the text has exactly the form that the prompt asks for.

    Each tag occurs once and in order, outside of ``think`` and ``answer`` are only blanks, nothing
    is empty, and steps follow the table.
    """
    marks = (
        "<think>",
        "<type>",
        "</type>",
        "<table>",
        "</table>",
        "</think>",
        "<answer>",
        "</answer>",
    )
    if any(text.count(mark) != 1 for mark in marks):
        return False
    starts = [text.find(mark) for mark in marks]
    if starts != sorted(starts):
        return False
    ends = [start + len(mark) for start, mark in zip(starts, marks, strict=True)]
    spans = zip([0, *ends], [*starts, len(text)], strict=True)
    contents = [text[start:end].strip() for start, end in spans]
    head, opening, kind, gap, table, steps, transition, answer, tail = contents
    only_blanks = not any((head, opening, gap, transition, tail))
    return only_blanks and all((kind, table, steps, answer))


def steps_of(text: str) -> list[str]:
    """The texts of the numbered steps, empty ones and repeated numbers left out."""
    _, *pieces = _STEP.split(text)
    steps: dict[str, str] = {}
    for number, body in zip(pieces[::2], pieces[1::2], strict=True):
        step = body.strip()
        if step:
            steps.setdefault(number.lstrip("0"), step)
    return list(steps.values())


def pieces(text: str) -> int:
    """About the number of tokens.

    Words, single digits, runs of signs and of line breaks count, as Qwen's tokenizer first splits
    them.
    """
    pattern = _ASCII if text.isascii() else _PIECE
    return len(pattern.findall(text))


def parsed_table(text: str | None) -> Any:
    """The JSON of a table's text, with or without a code fence, numbers as they are written.

    None when it is not JSON.
    """
    if text is None:
        return None
    fence = _FENCE.search(text) if "```" in text else None
    source = fence[1] if fence else text
    try:
        return json.loads(source, parse_int=str, parse_float=str, parse_constant=str)
    except (ValueError, RecursionError):
        return None


@dataclass(frozen=True)
class Table:
    """Headers, and rows of cells. Rows of a policy's table may be of any length."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def as_table(data: Any) -> Table | None:
    """The table of a mapping with a list of headers and a list of lists of cells.

    Headers and cells are texts or numbers. None for anything else.
    """
    if not isinstance(data, dict):
        return None
    columns = data.get("columns")
    rows = data.get("rows")
    if not isinstance(columns, list) or not isinstance(rows, list):
        return None
    if not all(isinstance(row, list) for row in rows):
        return None
    if not all(map(_is_cell, chain.from_iterable([columns, *rows]))):
        return None
    return Table(list(map(_cell, columns)), [list(map(_cell, row)) for row in rows])


def _is_cell(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def as_number(text: str) -> float | None:
    """The text as ``float`` reads it; None when it is not a number."""
    try:
        return float(text)
    except ValueError:
        return None


def _cell(value: Any) -> str:
    return "" if value is None else str(value).strip()


SEVEN = ("format", "accuracy", "length", "tags", "type", "table", "process")
"""The components that are paid, in the order in which the original lists its functions."""
_PUBLISHED_NAMES = (
    "format",
    "accuracy",
    "length_think",
    "num_token",
    "chart_type",
    "table_style",
    "process_style",
)
PUBLISHED = {
    f"{published}_reward": name for published, name in zip(_PUBLISHED_NAMES, SEVEN, strict=True)
}
"""The original's name of each -> our name."""

Pair = tuple[str, str]
"""A text of the policy, and the true text to compare with."""


@dataclass(frozen=True)
class ChartSample:
    """A raw completion with its number of sampled tokens, and the row's truth; None where unknown.

    ``where`` is the row.
    """

    text: str
    label: Any = None
    chart_type: Any = None
    table: Any = None
    reasoning: Any = None
    tokens: int | None = None
    where: str = ""

    @classmethod
    def of(cls, text: str, task: Task, tokens: int | None = None) -> Self:
        """The last turn's text with the truth of a row that has the data set's columns."""
        extra = task.extra
        return cls(
            text,
            label=task.ground_truth,
            chart_type=extra.get("chart_type"),
            table=extra.get("table"),
            reasoning=extra.get("reasoning"),
            tokens=tokens,
            where=f"task {task.id}",
        )


@dataclass(frozen=True)
class Paid:
    """Components of one sample without the process reward; ``flags`` name its faults."""

    components: Mapping[str, float]
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Process:
    """The ``pairs`` of texts that the process reward embeds.

    Empty when nothing can be compared; ``flags`` give the reason.
    """

    pairs: Sequence[Pair] = ()
    flags: tuple[str, ...] = ()


class Variant:
    """One definition of the rewards.

    This class pays each sample by itself, and the cosine of its reasoning.
    """

    components: tuple[str, ...] = SEVEN
    """The components of ``SEVEN`` that it defines."""
    embeds_empty = False
    """Whether the cosine of an empty text is the embedder's, instead of 0."""

    def rules(self, samples: Sequence[ChartSample]) -> list[Paid]:
        """The components that need no embedder, ``relaxed`` and ``exact``.

        Raises DataFailure for a row without a usable truth.
        """
        return [self._paid(sample) for sample in samples]

    def _paid(self, sample: ChartSample) -> Paid:
        raise NotImplementedError

    def process(self, sample: ChartSample) -> Process:
        """The pairs of texts that the process reward compares."""
        raise NotImplementedError

    def conformity(self, pairs: Sequence[Pair], cosines: Sequence[float]) -> float:
        """The process reward of the pairs of ``process``, at least one, and their cosines."""
        return cosines[0]
