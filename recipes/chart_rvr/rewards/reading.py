"""The input of the rewards (a completion's parts, the row's truth, the count of tokens), and the
base class of a variant.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from rayloop.core.types import Task

_STEP = re.compile(r"<step-(\d{1,4})>\s*:?")
_PIECE = re.compile(r"[^\W\d_]+|\d|[^\w\s]+|_+|\n+")
_ASCII = re.compile(r"[A-Za-z]+|[^ \t\r\n\f\v_A-Za-z0-9]+|[0-9]|_+|\n+")
"""The same for texts of ASCII alone, in a third of the time."""
_FENCE = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL)

Count = Callable[[str], int]
"""Tokens of a text."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What the tags hold, stripped; None without the opening tag.

    ``steps`` is the thought after the table (or type).
    """

    type: str | None
    table: str | None
    steps: str
    answer: str | None
    closed: bool
    """Whether the answer's closing tag is there."""


def parts(text: str) -> Parts:
    """Of several answers the last counts; type and table are looked for in the thought only.

    Linear in the text.
    """
    thought, _ = block(text, "think")
    answer, closed = block(text, "answer")
    if thought is None:
        return Parts(None, None, "", answer, closed)
    (kind, _), (table, _) = block(thought, "type"), block(thought, "table")
    steps = thought.rpartition("</table>" if table is not None else "</type>")[2].strip()
    return Parts(kind, table, steps, answer, closed)


def block(text: str, tag: str) -> tuple[str | None, bool]:
    """What the last opening tag holds, to its closing one (True) or to the end of the text (False);
    None without it.
    """
    start = text.rfind(f"<{tag}>")
    if start < 0:
        return None, False
    start += len(tag) + 2
    end = text.find(f"</{tag}>", start)
    return (text[start:] if end < 0 else text[start:end]).strip(), end >= 0


def well_formed(text: str) -> bool:
    """Each tag once and in order, blanks alone outside of ``think`` and ``answer``, nothing empty,
    steps after the table.
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
    at = [text.find(mark) for mark in marks]
    if at != sorted(at):
        return False
    ends = [start + len(mark) for start, mark in zip(at, marks, strict=True)]
    between = [text[a:b].strip() for a, b in zip([0, *ends], [*at, len(text)], strict=True)]
    before, opening, kind, gap, table, steps, after, answer, rest = between
    return not (before or opening or gap or after or rest) and all((kind, table, steps, answer))


def steps_of(text: str) -> list[str]:
    """The texts of the numbered steps, empty ones and repeated numbers left out."""
    _, *pieces = _STEP.split(text)
    found: dict[str, str] = {}
    for number, said in zip(pieces[::2], pieces[1::2], strict=True):
        if said.strip():
            found.setdefault(number.lstrip("0"), said.strip())
    return list(found.values())


def pieces(text: str) -> int:
    """About the number of tokens: words, single digits, runs of signs and of line breaks, as Qwen's
    tokenizer splits first.
    """
    return len((_ASCII if text.isascii() else _PIECE).findall(text))


def parsed_table(text: str | None) -> Any:
    """The JSON of a table's text, with or without a code fence, numbers as they are written.

    None when it is no JSON.
    """
    if text is None:
        return None
    fenced = _FENCE.search(text) if "```" in text else None
    try:
        return json.loads(
            fenced[1] if fenced else text, parse_int=str, parse_float=str, parse_constant=str
        )
    except (ValueError, RecursionError):
        return None


@dataclass(frozen=True, slots=True)
class Table:
    """Headers, and rows of cells. Rows of a policy's table may be of any length."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def as_table(data: Any) -> Table | None:
    """A mapping with a list of headers and a list of lists of cells, each a text or a number; None
    for anything else.
    """
    if not isinstance(data, dict):
        return None
    columns, rows = data.get("columns"), data.get("rows")
    if (
        not isinstance(columns, list)
        or not isinstance(rows, list)
        or not all(isinstance(row, list) for row in rows)
    ):
        return None
    if not all(map(_is_cell, columns)) or not all(_is_cell(cell) for row in rows for cell in row):
        return None
    return Table([_cell(name) for name in columns], [[_cell(cell) for cell in row] for row in rows])


def _is_cell(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def as_number(text: str) -> float | None:
    """The text as ``float`` reads it; None when it is no number."""
    try:
        return float(text)
    except ValueError:
        return None


def _cell(value: Any) -> str:
    return "" if value is None else str(value).strip()


SEVEN = ("format", "accuracy", "length", "tags", "type", "table", "process")
"""The components that are paid, in the order in which the original lists its functions."""
_THEIRS = (
    "format",
    "accuracy",
    "length_think",
    "num_token",
    "chart_type",
    "table_style",
    "process_style",
)
PUBLISHED = {f"{theirs}_reward": ours for theirs, ours in zip(_THEIRS, SEVEN, strict=True)}
"""The original's name of each -> ours."""

Pair = tuple[str, str]
"""A text of the policy, and the true text to compare with."""


@dataclass(frozen=True, slots=True)
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
            task.ground_truth,
            extra.get("chart_type"),
            extra.get("table"),
            extra.get("reasoning"),
            tokens,
            f"task {task.id}",
        )


@dataclass(frozen=True, slots=True)
class Paid:
    """Components of one sample before the process reward is added; ``flags`` name what went wrong."""

    components: Mapping[str, float]
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Process:
    """The texts that the process reward embeds: ``pairs``, none when there is nothing to compare;
    ``flags`` give the reason.
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
        """The process reward from ``process``'s pairs, of which there is at least one, and their
        cosines.
        """
        return cosines[0]
