"""The seven rewards without the original's mistakes, and as the paper defines them.

README.md lists each mistake; a perfect table of any size is worth the published 2.25. The paper's
definitions are in its sections 3.3 to 3.5; its code does not implement them.
"""

import operator
from collections.abc import Sequence
from fractions import Fraction
from itertools import zip_longest

from rayloop.core.failures import DataFailure
from rayloop.recipes.chart_rvr.rewards import reading
from rayloop.recipes.chart_rvr.rewards.original import num_token_reward
from rayloop.recipes.chart_rvr.rewards.reading import (
    ChartSample,
    Count,
    Paid,
    Pair,
    Parts,
    Process,
    Table,
    Variant,
)
from rayloop.recipes.chart_rvr.rewards.tables import readable, same_answer, shares

STEP_PAY = 0.25
MOST_STEP_PAY = 1.5
"""The most that all steps are paid."""
JSON_PAY = 0.5
"""Pay for a table that can be parsed."""
KEYS_PAY = 0.25
"""Pay for a table with exactly the two keys."""
HEADERS_PAY = 0.5
CELLS_PAY = 1.0
"""Pay for a table in which all cells are right."""


class Corrected(Variant):
    """The rewards without the original's mistakes.

    ``least``, ``most`` and ``cap`` are tokens of the reasoning after the table, counted by
    ``count``.
    """

    def __init__(
        self,
        tolerance: float,
        years: tuple[int, int],
        least: int,
        most: int,
        cap: int,
        count: Count,
    ) -> None:
        # Made of the text: the float 0.05 is not exactly a twentieth.
        self._tolerance = Fraction(str(tolerance))
        self._years = years
        self._least = least
        self._most = most
        self._cap = cap
        self._count = count

    def process(self, sample: ChartSample) -> Process:
        """The reasoning to compare.

        The flags ``no_reasoning`` (the policy's) and ``no_true_reasoning``: there is nothing to
        compare, and 0 is paid.
        """
        if not isinstance(sample.reasoning, str) or not sample.reasoning.strip():
            return Process((), ("no_true_reasoning",))
        steps = reading.parts(sample.text).steps
        if not steps:
            return Process((), ("no_reasoning",))
        return Process(((steps, sample.reasoning),))

    def _paid(self, sample: ChartSample) -> Paid:
        parts = reading.parts(sample.text)
        label = label_of(sample)
        table, flags = self._table(parts.table, sample)
        answer = parts.answer or ""
        right = answer != "" and same_answer(answer, label, self._tolerance, self._years)
        exact = parts.answer is not None and readable(parts.answer) == readable(label)
        components = {
            "format": 2.0 * reading.well_formed(sample.text),
            "accuracy": float(right and "<think>" in sample.text),
            "length": self._length(parts.steps),
            "tags": num_token_reward(sample.text),
            "type": type_reward(parts.type, sample.chart_type),
            "table": table,
            "relaxed": float(right),
            "exact": float(exact),
        }
        return Paid(components, (*flags, *answer_flags(parts)))

    def _length(self, steps: str) -> float:
        """1 between ``least`` and ``most`` tokens, and the pay for steps; 0 above ``cap``.

        0.25 is paid for each step with a text, at most 1.5.
        """
        tokens = self._count(steps)
        if tokens > self._cap:
            return 0.0
        length = float(self._least <= tokens <= self._most)
        return length + min(STEP_PAY * len(reading.steps_of(steps)), MOST_STEP_PAY)

    def _table(self, text: str | None, sample: ChartSample) -> tuple[float, tuple[str, ...]]:
        """The pay for the table, and flags."""
        data = reading.parsed_table(text)
        true = true_table(sample)
        if data is None:
            return 0.0, ("unparsable_table",)
        form = JSON_PAY
        if isinstance(data, dict) and data.keys() == {"columns", "rows"}:
            form += KEYS_PAY
        if true is None:
            return form, ("no_true_table",)
        said = reading.as_table(data)
        if said is None:
            return form, ("not_a_table",)
        headers, cells = shares(said, true)
        return form + HEADERS_PAY * headers + CELLS_PAY * cells, ()


def label_of(sample: ChartSample) -> str:
    """The true answer as a text. Raises DataFailure when the row has none."""
    label = str(sample.label).strip() if sample.label is not None else ""
    if not label:
        raise DataFailure(
            sample.where, "the row has no label: there is no true answer to compare with"
        )
    return label


def true_table(sample: ChartSample) -> Table | None:
    """The row's table, None when it has none.

    Raises DataFailure for something else than a table.
    """
    if sample.table is None:
        return None
    table = reading.as_table(sample.table)
    if table is None:
        raise DataFailure(
            sample.where,
            f"table must be {{columns: [..], rows: [[..], ..]}}, not {sample.table!r:.100}",
        )
    return table


def type_reward(said: str | None, true: object) -> float:
    """1 for the true type; case, blanks, ``-`` and ``_`` do not count."""
    wanted = _type(true) if isinstance(true, str) else ""
    return float(said is not None and wanted != "" and _type(said) == wanted)


def _type(text: str) -> str:
    words = text.casefold().replace("-", " ").replace("_", " ").split()
    return " ".join(words).rstrip(".")


def answer_flags(parts: Parts) -> tuple[str, ...]:
    """The flags of an answer that is missing or not closed."""
    if not parts.answer:
        return ("no_answer",)
    return () if parts.closed else ("unclosed_answer",)


SPECIAL = " \t\n.,;:!?%°*'\"`"
"""The characters that ``normal`` strips from a text's end.

The paper does not list its "trailing special symbols".
"""


class Paper(Variant):
    """The rewards as the paper defines them.

    ``least`` and ``most`` are its eta 1 and 2, in tokens of the whole completion; ``steps`` is its
    m. The paper prints none of them.
    """

    components: tuple[str, ...] = ("format", "accuracy", "length", "type", "table", "process")

    def __init__(self, tolerance: float, least: int, most: int, steps: int, count: Count) -> None:
        self._tolerance = tolerance
        self._least = least
        self._most = most
        self._steps = steps
        self._count = count

    def process(self, sample: ChartSample) -> Process:
        """The pairs of the first ``steps`` steps, then the pair of the remaining ones."""
        true = reading.steps_of(sample.reasoning) if isinstance(sample.reasoning, str) else []
        if not true:
            return Process((), ("no_true_reasoning",))
        said = reading.steps_of(reading.parts(sample.text).steps)
        m = self._steps
        pairs = list(zip_longest(said[:m], true[:m], fillvalue=""))
        # Steps that both lack count as equal.
        pairs += [("", "")] * (m - len(pairs))
        rest = ("\n".join(said[m:]), "\n".join(true[m:]))
        return Process((*pairs, rest))

    def conformity(self, pairs: Sequence[Pair], cosines: Sequence[float]) -> float:
        """The mean of the first m steps plus that of the rest, s = (1 + cos) / 2.

        It is 0 for a missing step, and 1 where both lack it.
        """
        similarities = []
        for pair, cosine in zip(pairs, cosines, strict=True):
            similarities.append((1 + cosine) / 2 if all(pair) else float(not any(pair)))
        *first, rest = similarities
        return sum(first) / len(first) + rest

    def _paid(self, sample: ChartSample) -> Paid:
        parts = reading.parts(sample.text)
        label = label_of(sample)
        tokens = self._count(sample.text) if sample.tokens is None else sample.tokens
        answer = parts.answer or ""
        right = float(same(answer, label, self._tolerance))
        right_type = isinstance(sample.chart_type, str) and (
            normal(parts.type or "") == normal(sample.chart_type)
        )
        data = reading.parsed_table(parts.table)
        true = true_table(sample)
        flags = []
        if data is None:
            flags.append("unparsable_table")
        if true is None:
            flags.append("no_true_table")
        components = {
            "format": float(reading.well_formed(sample.text)),
            "accuracy": right,
            "length": float(self._least <= tokens <= self._most),
            "type": float(right_type),
            "table": 0.0 if data is None else JSON_PAY + _table(reading.as_table(data), true),
            "relaxed": right,
            "exact": float(normal(answer) == normal(label)),
        }
        return Paid(components, (*flags, *answer_flags(parts)))


def normal(text: str) -> str:
    """The paper's norm: without special symbols at the end, in lower case."""
    return text.strip().rstrip(SPECIAL).lower()


def same(said: str, true: str, tolerance: float) -> bool:
    """Equation 1. A true 0, which it does not define, is met by 0."""
    answer = normal(said)
    wanted = normal(true)
    number = reading.as_number(answer)
    truth = reading.as_number(wanted)
    if number is None or truth is None:
        return answer != "" and answer == wanted
    return abs(number - truth) <= tolerance * abs(truth)


def _table(said: Table | None, true: Table | None) -> float:
    """Equation 2: the share of true headers in the policy's, and the mean share of right cells.

    The mean is over true rows, and a cell is right in its place.
    """
    if said is None or true is None or not true.columns or not true.rows:
        return 0.0
    headers = set(map(normal, said.columns))
    right_headers = sum(normal(name) in headers for name in true.columns)
    cells = 0.0
    for true_row, row in zip(true.rows, said.rows, strict=False):
        if true_row:
            cells += sum(map(operator.eq, true_row, row)) / len(true_row)
    return right_headers / len(true.columns) + cells / len(true.rows)
