"""The seven rewards as published, mistakes included: sanchit97/chartrl at 83c4406, its fork
potate4/chartrl at 4948fe6. Texts are cut with ``str.split``: the content of a missing tag is the
whole text.
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
    """2 when the blocks stand in order from the first character on and ``</answer>`` ends a line,
    else 0. Linear in the text.
    """
    start = "<think>\n<type>"
    if not text.startswith(start):
        return 0.0
    end = len(start)
    for mark in _IN_ORDER:
        found = text.find(mark, end)
        if found < 0:
            return 0.0
        end = found + len(mark)
    return 2.0 if _CLOSED.search(text, end) else 0.0


def accuracy_reward(text: str, label: Any) -> float:
    """1 for a number within 5 % of ``label + 1e-6``, the denominator with its sign; for a label
    that is a text the same text.
    """
    answer = last(text, "answer").rstrip(".") if "<answer>" in text and "<think>" in text else ""
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
    """1 for more than 70 and at most 250 characters of thought, table and tags included; 0.25 for
    each ``<step-`` and one more, at most 1.5. The original's rule for thoughts of more than 500
    characters follows the payment, so it has no effect.
    """
    thought = last(text, "think")
    return float(70 < len(thought) <= 250) + min(0.25 * (thought.count("<step-") + 1), 1.5)


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
    """The table reward of each text of a batch, with flags: 0.5 for JSON, the comparison, 0.25 for
    exactly the two keys. A text whose table cannot be parsed is paid for the table of the last text
    that could: ``stale_table``. When the comparison raises (``comparison_failed``), the original
    pays nothing for it, and the fork what it had. Without ``tables`` nothing is paid.
    """
    if tables is None:
        return [(0.0, ())] * len(texts)
    parsed: Any = _UNPARSED
    paid = []
    for text, table in zip(texts, tables, strict=True):
        value, flags = 0.0, []
        try:
            parsed = json.loads(_block(text), parse_int=str, parse_float=str, parse_constant=str)
            value += 0.5
        except (ValueError, RecursionError):
            flags += ["unparsable_table"] + ["stale_table"] * (parsed is not _UNPARSED)
        compared, raised = (0.0, True) if parsed is _UNPARSED else _compare(parsed, table, fork)
        value += compared
        flags += ["comparison_failed"] * raised
        paid.append((value + 0.25 * _has_both_keys(parsed), tuple(flags)))
    return paid


def _block(text: str) -> str:
    inside = last(text, "table")
    return (
        inside.split("```json")[-1].split("```")[0].strip()
        if "```json" in inside
        else inside.replace("\n", "").strip()
    )


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
    true = dict(table) if isinstance(table, dict) else table
    _sort(said, true, fork)
    paid, failed = 0.0, False
    for part in (_headers, _cells):
        part_paid, raised = part(said, true, fork)
        paid, failed = paid + part_paid, failed or raised
        if raised and not fork:
            return 0.0, True
    return paid, failed


def _sort(said: Any, true: Any, fork: bool) -> None:
    """Both headers by their names and both lists of rows, each by itself; where one of a kind
    cannot be sorted, the rest stays.
    """
    for key, by in (("columns", lambda name: name.lower()), ("rows", None)):
        with suppress(Exception):  # whatever a policy writes in place of a table
            for table in (true, said):
                if key == "columns" or not fork or all(isinstance(row, list) for row in table[key]):
                    table[key] = sorted(table[key], key=by)


def _headers(said: Any, true: Any, fork: bool) -> tuple[float, bool]:
    paid = 0.0
    try:
        count = len(said["columns"])
        for i in range(min(count, len(true["columns"])) if fork else count):
            if said["columns"][i].lower() == true["columns"][i].lower():
                paid += 0.5 * (1 / count)
    except Exception:
        return paid, True
    return paid, False


def _cells(said: Any, true: Any, fork: bool) -> tuple[float, bool]:
    paid = 0.0
    try:
        rows = said["rows"]
        if fork and not all(isinstance(row, list) for row in (*rows, *true["rows"])):
            return 0.0, False
        for i in range(min(len(rows), len(true["rows"])) if fork else len(rows)):
            for j in range(min(len(rows[i]), len(true["rows"][i])) if fork else len(rows[i])):
                if rows[i][j] == true["rows"][i][j]:
                    paid += 0.5 * (1.0 / len(rows))
    except Exception:
        return paid, True
    return paid, False


def evaluated_answer(text: str) -> str:
    """The answer that the evaluation compares; the whole text without an answer tag."""
    return last(text, "answer")


def relaxed_accuracy(
    prediction: str, target: str, tolerance: float = 0.05, *, unanswerable: bool = False
) -> float:
    """1 for a number within ``tolerance`` of a target that is not 0 (``%`` divides by 100), else
    for the same text in any case.
    """
    if unanswerable and target.lower() == "unanswerable":
        return 1.0
    said, true = prediction.removesuffix(".").strip(), target.strip()
    number, truth = _number(said), _number(true)
    if number is not None and truth:
        return float(abs(number - truth) / abs(truth) <= tolerance)
    return float(said.lower() == true.lower())


def exact_match(prediction: str, target: str) -> float:
    """1 for the same text in any case, else 0."""
    return float(prediction.lower() == target.lower())


def _number(text: str) -> float | None:
    try:
        return float(text.rstrip("%")) / 100.0 if text.endswith("%") else float(text)
    except ValueError:
        return None


class Original(Variant):
    """The published functions; ``fork`` changes what the table's comparison does when it raises."""

    embeds_empty = True

    def __init__(self, *, fork: bool = False) -> None:
        self._fork = fork

    def rules(self, samples: Sequence[ChartSample]) -> list[Paid]:
        """All components but ``process``, for a batch."""
        tables = table_style_rewards(
            [s.text for s in samples], [s.table for s in samples], fork=self._fork
        )
        paid = []
        for sample, (table, flags) in zip(samples, tables, strict=True):
            text, target = sample.text, str(sample.label)
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
            paid.append(Paid(components, flags))
        return paid

    def process(self, sample: ChartSample) -> Process:
        """Flag ``process_raised``: there is no reasoning to split, where the original ends with an
        error.
        """
        if not isinstance(sample.reasoning, str):
            return Process((), ("process_raised",))
        return Process(((process_text(sample.text), sample.reasoning),))
