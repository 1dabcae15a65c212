"""The seven rewards without the original's mistakes (README.md lists each mistake; a perfect table
of any size is worth the published 2.25), and as sections 3.3 to 3.5 of Chart-RVR's paper define
them, which its code does not implement.
"""

from collections.abc import Sequence
from fractions import Fraction

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

STEP, STEPS_MOST = 0.25, 1.5
JSON, KEYS, HEADERS, CELLS = 0.5, 0.25, 0.5, 1.0
"""Pay for a table: parseable, exactly the two keys, all headers, all cells."""


class Corrected(Variant):
    """``least``, ``most`` and ``cap`` are tokens of the reasoning after the table, counted by
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
        # By its text: the float 0.05 is not exactly a twentieth.
        self._tolerance, self._years = Fraction(str(tolerance)), years
        self._least, self._most, self._cap, self._count = least, most, cap, count

    def process(self, sample: ChartSample) -> Process:
        """Flags ``no_reasoning`` (the policy's) and ``no_true_reasoning``: nothing to compare, paid
        0.
        """
        if not isinstance(sample.reasoning, str) or not sample.reasoning.strip():
            return Process((), ("no_true_reasoning",))
        steps = reading.parts(sample.text).steps
        return Process(((steps, sample.reasoning),)) if steps else Process((), ("no_reasoning",))

    def _paid(self, sample: ChartSample) -> Paid:
        found, label = reading.parts(sample.text), label_of(sample)
        table, flags = self._table(found.table, sample)
        right = bool(found.answer) and same_answer(
            found.answer or "", label, self._tolerance, self._years
        )
        components = {
            "format": 2.0 * reading.well_formed(sample.text),
            "accuracy": float(right and "<think>" in sample.text),
            "length": self._length(found.steps),
            "tags": num_token_reward(sample.text),
            "type": type_reward(found.type, sample.chart_type),
            "table": table,
            "relaxed": float(right),
            "exact": float(found.answer is not None and readable(found.answer) == readable(label)),
        }
        return Paid(components, (*flags, *answer_flags(found)))

    def _length(self, steps: str) -> float:
        """1 between ``least`` and ``most`` tokens, and 0.25 for each step with a text, at most 1.5;
        nothing above ``cap``.
        """
        tokens = self._count(steps)
        if tokens > self._cap:
            return 0.0
        return float(self._least <= tokens <= self._most) + min(
            STEP * len(reading.steps_of(steps)), STEPS_MOST
        )

    def _table(self, text: str | None, sample: ChartSample) -> tuple[float, tuple[str, ...]]:
        data, true = reading.parsed_table(text), true_table(sample)
        if data is None:
            return 0.0, ("unparsable_table",)
        form = JSON + KEYS * (isinstance(data, dict) and data.keys() == {"columns", "rows"})
        if true is None:
            return form, ("no_true_table",)
        said = reading.as_table(data)
        if said is None:
            return form, ("not_a_table",)
        headers, cells = shares(said, true)
        return form + HEADERS * headers + CELLS * cells, ()


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
    if (table := reading.as_table(sample.table)) is None:
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
    return " ".join(text.casefold().replace("-", " ").replace("_", " ").split()).rstrip(".")


def answer_flags(found: Parts) -> tuple[str, ...]:
    """The flags of an answer that is missing or not closed."""
    if not found.answer:
        return ("no_answer",)
    return () if found.closed else ("unclosed_answer",)


SPECIAL = " \t\n.,;:!?%°*'\"`"
"""The characters that ``normal`` strips from a text's end; the paper does not list its "trailing
special symbols".
"""


class Paper(Variant):
    """``least`` and ``most`` are its eta 1 and 2, in tokens of the whole completion; ``steps`` is
    its m. It prints none of them.
    """

    components: tuple[str, ...] = ("format", "accuracy", "length", "type", "table", "process")

    def __init__(self, tolerance: float, least: int, most: int, steps: int, count: Count) -> None:
        self._tolerance, self._least, self._most = tolerance, least, most
        self._steps, self._count = steps, count

    def process(self, sample: ChartSample) -> Process:
        """Pairs of the first ``steps`` true steps, then of what is left of both."""
        if not isinstance(sample.reasoning, str) or not (
            true := reading.steps_of(sample.reasoning)
        ):
            return Process((), ("no_true_reasoning",))
        said, m = reading.steps_of(reading.parts(sample.text).steps), self._steps
        first = [
            (said[i] if i < len(said) else "", true[i] if i < len(true) else "") for i in range(m)
        ]
        return Process((*first, ("\n".join(said[m:]), "\n".join(true[m:]))))

    def conformity(self, pairs: Sequence[Pair], cosines: Sequence[float]) -> float:
        """The mean of the first m steps plus that of the rest, s = (1 + cos) / 2; 0 for a missing
        step, 1 where both lack it.
        """
        *first, rest = [
            (1 + cosine) / 2 if all(pair) else float(not any(pair))
            for pair, cosine in zip(pairs, cosines, strict=True)
        ]
        return sum(first) / len(first) + rest

    def _paid(self, sample: ChartSample) -> Paid:
        found, label = reading.parts(sample.text), label_of(sample)
        tokens = self._count(sample.text) if sample.tokens is None else sample.tokens
        right = float(same(found.answer or "", label, self._tolerance))
        data, true = reading.parsed_table(found.table), true_table(sample)
        table = 0.0 if data is None else JSON + _table(reading.as_table(data), true)
        components = {
            "format": float(reading.well_formed(sample.text)),
            "accuracy": right,
            "length": float(self._least <= tokens <= self._most),
            "type": float(
                isinstance(sample.chart_type, str)
                and normal(found.type or "") == normal(sample.chart_type)
            ),
            "table": table,
            "relaxed": right,
            "exact": float(normal(found.answer or "") == normal(label)),
        }
        flags = ("unparsable_table",) * (data is None) + ("no_true_table",) * (true is None)
        return Paid(components, (*flags, *answer_flags(found)))


def normal(text: str) -> str:
    """The paper's norm: without special symbols at the end, in lower case."""
    return text.strip().rstrip(SPECIAL).lower()


def same(said: str, true: str, tolerance: float) -> bool:
    """Equation 1. A true 0, which it does not define, is met by 0."""
    answer, wanted = normal(said), normal(true)
    number, truth = reading.as_number(answer), reading.as_number(wanted)
    return (
        bool(answer) and answer == wanted
        if truth is None or number is None
        else abs(number - truth) <= tolerance * abs(truth)
    )


def _table(said: Table | None, true: Table | None) -> float:
    """Equation 2: the share of true headers that are there, and the mean over true rows of the
    share of cells in their places.
    """
    if said is None or true is None or not true.columns or not true.rows:
        return 0.0
    there = set(map(normal, said.columns))
    headers = sum(normal(name) in there for name in true.columns) / len(true.columns)
    pairs = zip(true.rows, said.rows, strict=False)
    cells = sum(
        sum(a == b for a, b in zip(wanted, row, strict=False)) / len(wanted)
        for wanted, row in pairs
        if wanted
    )
    return headers + cells / len(true.rows)
