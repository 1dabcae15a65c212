"""The rewards as Chart-RVR's paper defines them (sections 3.3 to 3.5), which its code does not implement.

R = format + length + accuracy + l1 (type + table) + l2 process; l1 and l2 are ``weights``. There is no reward for tags.
"""

from __future__ import annotations

from collections.abc import Sequence

from rayloop.recipes.chart_rvr.rewards.corrected import BySample, answer_flags, label_of, true_table
from rayloop.recipes.chart_rvr.rewards.reading import Count, Table, as_table, parsed_table, parts, steps_of, well_formed
from rayloop.recipes.chart_rvr.rewards.sample import ChartSample, Paid, Pair, Process

JSON = 0.5
SPECIAL = " \t\n.,;:!?%°*'\"`"
"""The characters that ``normal`` strips from a text's end; the paper does not list its "trailing special symbols"."""


class Paper(BySample):
    """``least`` and ``most`` are its eta 1 and 2, in tokens of the whole completion; ``steps`` is its m. It prints none of them."""

    components: tuple[str, ...] = ("format", "accuracy", "length", "type", "table", "process")

    def __init__(self, tolerance: float, least: int, most: int, steps: int, count: Count) -> None:
        self._tolerance, self._least, self._most = tolerance, least, most
        self._steps, self._count = steps, count

    def process(self, sample: ChartSample) -> Process:
        """Pairs of the first ``steps`` true steps, then of what is left of both."""
        if not isinstance(sample.reasoning, str) or not (true := steps_of(sample.reasoning)):
            return Process((), ("no_true_reasoning",))
        said, m = steps_of(parts(sample.text).steps), self._steps
        first = [(said[i] if i < len(said) else "", true[i] if i < len(true) else "") for i in range(m)]
        return Process((*first, ("\n".join(said[m:]), "\n".join(true[m:]))))

    def conformity(self, pairs: Sequence[Pair], cosines: Sequence[float]) -> float:
        """Evidence gathering (the mean of the first m) and reasoning alignment, each 0..1, with s = (1 + cos) / 2.

        A step that is missing has s = 0, one that both lack 1."""
        *first, rest = [
            (1 + cosine) / 2 if all(pair) else float(not any(pair)) for pair, cosine in zip(pairs, cosines, strict=True)
        ]
        return sum(first) / len(first) + rest

    def _paid(self, sample: ChartSample) -> Paid:
        found, label = parts(sample.text), label_of(sample)
        tokens = self._count(sample.text) if sample.tokens is None else sample.tokens
        right = float(same(found.answer or "", label, self._tolerance))
        data, true = parsed_table(found.table), true_table(sample)
        table = 0.0 if data is None else JSON + _table(as_table(data), true)
        components = {
            "format": float(well_formed(sample.text)),
            "accuracy": right,
            "length": float(self._least <= tokens <= self._most),
            "type": float(isinstance(sample.chart_type, str) and normal(found.type or "") == normal(sample.chart_type)),
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
    number, truth = _number(answer), _number(wanted)
    if truth is None or number is None:
        return bool(answer) and answer == wanted
    return abs(number - truth) <= tolerance * abs(truth)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _table(said: Table | None, true: Table | None) -> float:
    """Equation 2: the share of true headers that are there, and the mean over true rows of the share of cells in their places."""
    if said is None or true is None or not true.columns or not true.rows:
        return 0.0
    there = set(map(normal, said.columns))
    headers = sum(normal(name) in there for name in true.columns) / len(true.columns)
    pairs = zip(true.rows, said.rows, strict=False)
    cells = sum(sum(a == b for a, b in zip(wanted, row, strict=False)) / len(wanted) for wanted, row in pairs if wanted)
    return headers + cells / len(true.rows)
