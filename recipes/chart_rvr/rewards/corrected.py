"""The seven rewards without the original's mistakes (README.md lists each mistake, its effect, and the correction).

Everything else stays as published, with the sizes of the components: a perfect table of any size is worth 2.25.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from rayloop.core.failures import DataFailure
from rayloop.recipes.chart_rvr.rewards.original import num_token_reward
from rayloop.recipes.chart_rvr.rewards.reading import Count, Parts, Table, as_table, parsed_table, parts, steps_of, well_formed
from rayloop.recipes.chart_rvr.rewards.sample import SEVEN, ChartSample, Paid, Pair, Process
from rayloop.recipes.chart_rvr.rewards.tables import shares
from rayloop.recipes.chart_rvr.rewards.values import readable, same_answer

STEP, STEPS_MOST = 0.25, 1.5
JSON, KEYS, HEADERS, CELLS = 0.5, 0.25, 0.5, 1.0
"""Pay for a table: parseable, exactly the two keys, all headers, all cells."""


class BySample:
    """A definition that pays each sample by itself, from its parts."""

    def rules(self, samples: Sequence[ChartSample]) -> list[Paid]:
        """Raises DataFailure for a row without label, and for a true table that is none."""
        return [self._paid(sample) for sample in samples]

    def answer(self, text: str) -> str | None:
        """The text inside ``<answer>``."""
        return parts(text).answer or None

    def _paid(self, sample: ChartSample) -> Paid:
        raise NotImplementedError


class Corrected(BySample):
    """``least``, ``most`` and ``cap`` are tokens of the reasoning after the table, counted by ``count``."""

    components: tuple[str, ...] = SEVEN

    def __init__(self, tolerance: float, years: tuple[int, int], least: int, most: int, cap: int, count: Count) -> None:
        self._tolerance, self._years = Fraction(str(tolerance)), years
        self._least, self._most, self._cap, self._count = least, most, cap, count

    def process(self, sample: ChartSample) -> Process:
        """Flags ``no_reasoning`` (the policy's) and ``no_true_reasoning``: nothing to compare, paid 0."""
        if not isinstance(sample.reasoning, str) or not sample.reasoning.strip():
            return Process((), ("no_true_reasoning",))
        steps = parts(sample.text).steps
        return Process(((steps, sample.reasoning),)) if steps else Process((), ("no_reasoning",))

    def conformity(self, pairs: Sequence[Pair], cosines: Sequence[float]) -> float:
        """The cosine of the reasoning."""
        return cosines[0]

    def _paid(self, sample: ChartSample) -> Paid:
        found, label = parts(sample.text), label_of(sample)
        table, flags = self._table(found.table, sample)
        right = bool(found.answer) and same_answer(found.answer or "", label, self._tolerance, self._years)
        components = {
            "format": 2.0 * well_formed(sample.text),
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
        """1 between ``least`` and ``most`` tokens, and 0.25 for each step with a text, at most 1.5; nothing above ``cap``."""
        tokens = self._count(steps)
        if tokens > self._cap:
            return 0.0
        return float(self._least <= tokens <= self._most) + min(STEP * len(steps_of(steps)), STEPS_MOST)

    def _table(self, text: str | None, sample: ChartSample) -> tuple[float, tuple[str, ...]]:
        data, true = parsed_table(text), true_table(sample)
        if data is None:
            return 0.0, ("unparsable_table",)
        form = JSON + KEYS * (isinstance(data, dict) and data.keys() == {"columns", "rows"})
        if true is None:
            return form, ("no_true_table",)
        said = as_table(data)
        if said is None:
            return form, ("not_a_table",)
        headers, cells = shares(said, true)
        return form + HEADERS * headers + CELLS * cells, ()


def label_of(sample: ChartSample) -> str:
    """The true answer as a text. Raises DataFailure when the row has none."""
    label = str(sample.label).strip() if sample.label is not None else ""
    if not label:
        raise DataFailure(sample.where, "the row has no label: there is no true answer to compare with")
    return label


def true_table(sample: ChartSample) -> Table | None:
    """The row's table, None when it has none. Raises DataFailure for something else than a table."""
    if sample.table is None:
        return None
    if (table := as_table(sample.table)) is None:
        raise DataFailure(sample.where, f"table must be {{columns: [..], rows: [[..], ..]}}, not {sample.table!r:.100}")
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
