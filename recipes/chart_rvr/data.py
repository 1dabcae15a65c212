"""Chart questions as tasks.

The prompt asks for type, table, steps and answer, and the supervised answer has that form.
"""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rayloop.config.settings import SettingsModel
from rayloop.core.failures import DataFailure
from rayloop.core.types import Message, Task
from rayloop.data.messages import field, image_entry
from rayloop.data.rows import parsed
from rayloop.recipes.chart_rvr.checkout import Checkout

TYPES = (
    "line",
    "bar",
    "stacked bar",
    "pie",
    "histogram",
    "scatterplot",
    "area",
    "stacked area",
    "bubble",
    "treemap",
)
_ANSWER = "<answer>\nthe final answer on one line\n</answer>"
_STEPS = (
    "<step-1>: what the question asks for\n<step-2>: the data it needs\n...\n<step-n>: the last"
    " step to the answer"
)
_TYPE = f"<type>the kind of chart, one of: {', '.join(TYPES)}</type>"
_TABLE = (
    '<table>the data as one JSON object {"columns": [...], "rows": [[...], ...]}, nothing'
    " else</table>"
)
_FORM = (
    "Look at the chart, answer the question, and write exactly these two blocks and nothing else:\n"
)
TEMPLATES = {
    "direct": "Look at the chart and answer the question with a word, a number or a short phrase.",
    "steps": f"{_FORM}<think>\n{_STEPS}\n</think>\n{_ANSWER}",
    "type": f"{_FORM}<think>\n{_TYPE}\n{_STEPS}\n</think>\n{_ANSWER}",
    "table": f"{_FORM}<think>\n{_TYPE}\n{_TABLE}\n{_STEPS}\n</think>\n{_ANSWER}",
}
"""Chart-RVR's four prompts in our words.

They ask for the answer alone; with steps; with the type; with type and table, which are paid.
"""


class ChartRows:
    """Reads rows ``{image, query, label, table, chart_type, reasoning}``.

    ``sanchit97/chart-rvr-grpo-train`` has such rows. The last three columns may be missing, and
    tables may be JSON in a text. The chart's type splits the metrics.
    """

    class Settings(SettingsModel):
        template: Literal["direct", "steps", "type", "table"] | Checkout = "table"
        """The form of the answer that the prompt asks for.

        Rewards for type and table need ``table``, answers without reasoning ``direct``.
        ``{checkout: FOLDER}``: the published prompt, from a checkout of its repository.
        """
        system: str = ""
        """Another text in place of the template's, for a custom prompt."""
        suffix: str = ""
        """Added to every question, as ChartFC's " Answer yes or no." does."""
        image: str = "image"
        """Column of the chart's image. Set it when yours is called otherwise."""
        query: str = "query"
        """Column of the question; ``question`` in many data sets."""
        label: str = "label"
        """Column of the true answer; of a list of answers the first counts."""
        chart_type: str = "chart_type"
        """Column of the chart's type; rows without it earn nothing for the type."""
        table: str = "table"
        """Column of the chart's data as ``{columns, rows}``, when yours is called otherwise."""
        reasoning: str = "reasoning"
        """Column of the true steps, when yours is called otherwise."""
        source: str = "data_source"
        """Column by which metrics are split, such as who wrote the question.

        Rows without it are split by ``data_source`` or type.
        """
        keep: tuple[str, ...] = ()
        """Further columns that a reward or a benchmark's rule reads from the task."""

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigError for a checkout without the published prompt."""
        self._settings = settings
        if settings.system:
            self._system = settings.system
        elif isinstance(settings.template, str):
            self._system = TEMPLATES[settings.template]
        else:
            self._system = settings.template.text()

    def task(self, row: Mapping[str, Any], where: str, root: Path) -> Task:
        """The row as a task. Raises DataFailure."""
        names = self._settings
        label = field(row, names.label, where)
        label = label[0] if isinstance(label, list) else label
        if not isinstance(label, str | int | float) or not str(label).strip():
            raise DataFailure(
                where, f"{names.label} must be a text or a number, not {label!r:.100}"
            )
        question = str(field(row, names.query, where)) + names.suffix
        kind = row.get(names.chart_type)
        extra = {
            **{name: row.get(name) for name in names.keep},
            "query": question,
            "chart_type": kind,
            "table": parsed(row.get(names.table)),
            "reasoning": row.get(names.reasoning),
        }
        image = image_entry(field(row, names.image, where), where, root)
        messages = (Message("system", (self._system,)), Message("user", (image, question)))
        source = str(row.get(names.source) or row.get("data_source") or kind or "")
        return Task(str(row.get("id") or where), messages, str(label), source, extra)


class ConversationRows(ChartRows):
    """Rows of ChartQAPro, with the conversation before the question.

    ``paragraph`` and earlier ``questions`` and ``answers`` are put before it.
    """

    def task(self, row: Mapping[str, Any], where: str, root: Path) -> Task:
        """The row with the conversation before its question. Raises DataFailure."""
        column = self._settings.query
        earlier = zip(_listed(row, "questions")[:-1], _listed(row, "answers")[:-1], strict=False)
        exchanges = [f"{question}\n{answer}" for question, answer in earlier]
        parts = [row.get("paragraph"), *exchanges, str(field(row, column, where))]
        text = "\n".join(part for part in parts if part)
        return super().task({**row, column: text}, where, root)


def _listed(row: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = row.get(name)
    return value if isinstance(value, list) else ()


class ChartAnswers:
    """The supervised answer in the form that the prompt asks for.

    It has the row's type, table, steps and label.
    """

    tokens = ()

    def answer(self, task: Task, rng: random.Random) -> str:
        """The row's answer. Raises DataFailure for a row that lacks one of them."""
        missing = [
            name for name in ("chart_type", "table", "reasoning") if not task.extra.get(name)
        ]
        if missing:
            raise DataFailure(
                f"task {task.id}",
                f"no {' and no '.join(missing)}: the row has no rationale to learn from",
            )
        kind = task.extra["chart_type"]
        table = json.dumps(task.extra["table"])
        thought = f"<type>{kind}</type>\n<table>{table}</table>\n{task.extra['reasoning']}"
        return f"<think>\n{thought}\n</think>\n<answer>\n{task.ground_truth}\n</answer>"
