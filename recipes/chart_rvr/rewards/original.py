"""The seven rewards as published, mistakes included.

They come from sanchit97/chartrl at 83c4406, and from its fork potate4/chartrl at 4948fe6. Texts are
cut with ``str.split``: the content of a missing tag is the whole text.
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rayloop.recipes.chart_rvr.rewards.reading import ChartSample, Paid, Process, Variant

_TAGS = ("<type>", "</type>", "<think>", "</think>", "<answer>", "</answer>", "<table>", "</table>")
_ONCE = (*_TAGS, "<think>\n<type>", "</type>\n<table>")
_IN_ORDER = ("</type>\n<table>", "</table>", "</think>\n<answer>")
_CLOSED = re.compile(r"</answer>$", re.MULTILINE)
_UNPARSED = object()
"""No table has been parsed yet in this batch."""


def format_reward(text: str) -> float:
    """2 when the blocks are in order from the first character on, else 0.

    ``</answer>`` must end a line. Linear in the text.
    """
    opening = "<think>\n<type>"
    if not text.startswith(opening):
        return 0.0
    end = len(opening)
    for mark in _IN_ORDER:
        start = text.find(mark, end)
        if start < 0:
            return 0.0
        end = start + len(mark)
    return 2.0 if _CLOSED.search(text, end) else 0.0


def accuracy_reward(text: str, label: Any) -> float:
    """1 for a number within 5 % of ``label + 1e-6``, or for the text of a label that is a text.

    The denominator has the label's sign.
    """
    has_tags = "<answer>" in text and "<think>" in text
    answer = last(text, "answer").rstrip(".") if has_tags else ""
    if not answer:
        return 0.0
    try:
        truth = float(label) + 1e-6
    except (TypeError, ValueError, OverflowError):
        return float(isinstance(label, str) and label.lower() == answer.lower())
    try:
        return float(abs(float(answer) - truth) / truth <= 0.05)
    except (ValueError, ZeroDivisionError):
        return 0.0


def length_think_reward(text: str) -> float:
    """1 for more than 70 and at most 250 characters of thought, and a part for the steps.

    Table and tags count as thought. 0.25 is paid for each ``<step-`` and one more, at most 1.5. The
    original's rule for thoughts of more than 500 characters follows the payment, so it has no
    effect.
    """
    thought = last(text, "think")
    length = float(70 < len(thought) <= 250)
    steps = min(0.25 * (thought.count("<step-") + 1), 1.5)
    return length + steps


def num_token_reward(text: str) -> float:
    """2 when each of the eight tags and the two transitions occurs exactly once, else 0."""
    return 2.0 if all(text.count(mark) == 1 for mark in _ONCE) else 0.0


def chart_type_reward(text: str, chart_type: Any) -> float:
    """1 for the true type in any case, else 0."""
    return float(isinstance(chart_type, str) and last(text, "type").lower() == chart_type.lower())


def process_text(text: str) -> str:
    """The text that the process reward compares with the true reasoning."""
    return text.split("</table>")[-1].strip().split("</think>")[0].strip()


def last(text: str, tag: str) -> str:
    """The text inside the last ``tag``; the whole text without that tag."""
    return text.split(f"<{tag}>")[-1].strip().split(f"</{tag}>")[0].strip()


def table_style_rewards(
    texts: Sequence[str], tables: Sequence[Any] | None, *, fork: bool = False
) -> list[tuple[float, tuple[str, ...]]]:
    """The table reward of each text of a batch, with flags.

    0.5 for JSON, the comparison, 0.25 for exactly the two keys. A text whose table cannot be parsed
    is paid for the table of the last text that could: ``stale_table``. When the comparison raises
    (``comparison_failed``), the original pays nothing for it, and the fork what it had. Without
    ``tables`` nothing is paid.
    """
    if tables is None:
        return [(0.0, ())] * len(texts)
    parsed: Any = _UNPARSED
    results = []
    for text, table in zip(texts, tables, strict=True):
        value = 0.0
        flags = []
        try:
            parsed = json.loads(_block(text), parse_int=str, parse_float=str, parse_constant=str)
            value += 0.5
        except (ValueError, RecursionError):
            flags.append("unparsable_table")
            if parsed is not _UNPARSED:
                flags.append("stale_table")
        comparison, raised = _compare(parsed, table, fork)
        value += comparison
        if raised:
            flags.append("comparison_failed")
        value += 0.25 * _has_both_keys(parsed)
        results.append((value, tuple(flags)))
    return results


def _block(text: str) -> str:
    """The text of the table that the original parses."""
    inside = last(text, "table")
    if "```json" in inside:
        return inside.split("```json")[-1].split("```")[0].strip()
    return inside.replace("\n", "").strip()


def _has_both_keys(parsed: Any) -> bool:
    try:
        return set(parsed) == {"columns", "rows"}
    except TypeError:
        return False


def _compare(said: Any, table: Any, fork: bool) -> tuple[float, bool]:
    """The pay for equal headers and cells, and whether the comparison raised.

    Sorts the policy's table in place, as the original; the true one stays as it is, which changes
    no later result.
    """
    if said is _UNPARSED:
        return 0.0, True
    true = dict(table) if isinstance(table, dict) else table
    _sort(said, true, fork)
    headers, headers_raised = _headers(said, true, fork)
    if headers_raised and not fork:
        return 0.0, True
    cells, cells_raised = _cells(said, true, fork)
    if cells_raised and not fork:
        return 0.0, True
    return headers + cells, headers_raised or cells_raised


def _sort(said: Any, true: Any, fork: bool) -> None:
    """Sort both headers by their names, and both lists of rows.

    The true table comes first. When one list of a kind cannot be sorted, the next stays as it is.
    """
    # A policy may write anything in place of a table.
    with suppress(Exception):
        for table in (true, said):
            table["columns"] = sorted(table["columns"], key=lambda name: name.lower())
    with suppress(Exception):
        for table in (true, said):
            if not fork or all(isinstance(row, list) for row in table["rows"]):
                table["rows"] = sorted(table["rows"])


def _headers(said: Any, true: Any, fork: bool) -> tuple[float, bool]:
    """The pay for equal headers, and whether the comparison raised."""
    value = 0.0
    try:
        count = len(said["columns"])
        compared = min(count, len(true["columns"])) if fork else count
        for i in range(compared):
            if said["columns"][i].lower() == true["columns"][i].lower():
                value += 0.5 * (1 / count)
    except Exception:
        return value, True
    return value, False


def _cells(said: Any, true: Any, fork: bool) -> tuple[float, bool]:
    """The pay for equal cells, and whether the comparison raised.

    The pay is divided by the number of rows, not of cells, as the original does.
    """
    value = 0.0
    try:
        rows = said["rows"]
        if fork and not all(isinstance(row, list) for row in (*rows, *true["rows"])):
            return 0.0, False
        row_count = min(len(rows), len(true["rows"])) if fork else len(rows)
        for i in range(row_count):
            cell_count = min(len(rows[i]), len(true["rows"][i])) if fork else len(rows[i])
            for j in range(cell_count):
                if rows[i][j] == true["rows"][i][j]:
                    value += 0.5 * (1.0 / len(rows))
    except Exception:
        return value, True
    return value, False


def evaluated_answer(text: str) -> str:
    """The answer that the evaluation compares; the whole text without an answer tag."""
    return last(text, "answer")


def relaxed_accuracy(
    prediction: str, target: str, tolerance: float = 0.05, *, unanswerable: bool = False
) -> float:
    """1 for a number within ``tolerance`` of a target that is not 0, else for the same text.

    ``%`` divides a number by 100. Texts are compared in any case.
    """
    if unanswerable and target.lower() == "unanswerable":
        return 1.0
    said = prediction.removesuffix(".").strip()
    true = target.strip()
    number = _number(said)
    truth = _number(true)
    if number is not None and truth:
        return float(abs(number - truth) / abs(truth) <= tolerance)
    return float(said.lower() == true.lower())


def exact_match(prediction: str, target: str) -> float:
    """1 for the same text in any case, else 0."""
    return float(prediction.lower() == target.lower())


def _number(text: str) -> float | None:
    try:
        if text.endswith("%"):
            return float(text.rstrip("%")) / 100.0
        return float(text)
    except ValueError:
        return None


class Original(Variant):
    """The published functions; ``fork`` changes what the table's comparison does when it raises."""

    embeds_empty = True

    def __init__(self, *, fork: bool = False) -> None:
        self._fork = fork

    def rules(self, samples: Sequence[ChartSample]) -> list[Paid]:
        """All components but ``process``, for a batch."""
        texts = [sample.text for sample in samples]
        true_tables = [sample.table for sample in samples]
        tables = table_style_rewards(texts, true_tables, fork=self._fork)
        results = []
        for sample, (table, flags) in zip(samples, tables, strict=True):
            text = sample.text
            target = str(sample.label)
            said = evaluated_answer(text)
            components = {
                "format": format_reward(text),
                "accuracy": accuracy_reward(text, sample.label),
                "length": length_think_reward(text),
                "tags": num_token_reward(text),
                "type": chart_type_reward(text, sample.chart_type),
                "table": table,
                "relaxed": relaxed_accuracy(said, target),
                "exact": exact_match(said, target),
            }
            results.append(Paid(components, flags))
        return results

    def process(self, sample: ChartSample) -> Process:
        """The texts to compare.

        The flag ``process_raised``: the row has no reasoning to split, and the original ends with
        an error.
        """
        if not isinstance(sample.reasoning, str):
            return Process((), ("process_raised",))
        return Process(((process_text(sample.text), sample.reasoning),))
