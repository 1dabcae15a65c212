"""Supervised answers to small charts, by an annotator who makes mistakes: ``warm.yaml`` and
``loosen.yaml`` train on them.
"""

from __future__ import annotations

import dataclasses
import random

from pydantic import Field

from rayloop.config.settings import SettingsModel
from rayloop.core.types import Task
from rayloop.recipes.chart_rvr.data import ChartAnswers
from rayloop.recipes.chart_rvr.prepare import COLOURS, COLUMNS, KINDS

_TABLE = '{"columns": ["' + '", "'.join(COLUMNS) + '"], "rows": [["'
_TAGS = (
    "<think>\n",
    "<type>",
    "</type>\n",
    "<table>",
    "</table>\n",
    "<step-1>: ",
    "\n<step-2>: ",
    "\n</think>\n",
    "<answer>\n",
    "\n</answer>",
)


class HastyAnswers:
    """``ChartAnswers`` with slips, each by chance: a value that is read too low, the first item for
    an answer, no table.
    """

    class Settings(SettingsModel):
        misread: float = Field(0.0, ge=0, le=1)
        """Chance of each value of the table to be one too low, which leaves something to be learned
        by reward.
        """
        first: float = Field(0.0, ge=0, le=1)
        """Chance of answering with the table's first item, or its value, whatever was asked; above
        0.5 most answers.
        """
        skip: float = Field(0.0, ge=0, le=1)
        """Chance of the table to be left out, which costs the format and the tags as well."""

    tokens = (
        *_TAGS,
        _TABLE,
        '", "',
        '"], ["',
        '"]]}',
        *KINDS,
        *COLOURS,
        "What is the value of ",
        "Which colour is the ",
        "The question asks for ",
        "The value of ",
        " is ",
        ", that of ",
        "The highest",
        "The lowest",
    )

    def __init__(self, settings: HastyAnswers.Settings) -> None:
        self._settings = settings

    def answer(self, task: Task, rng: random.Random) -> str:
        """Raises DataFailure for a row without a rationale."""
        slips = self._settings
        rows = [(item, self._read(value, rng)) for item, value in task.extra["table"]["rows"]]
        truth = task.ground_truth
        if rng.random() < slips.first:
            truth = task.extra["table"]["rows"][0][str(truth).isdigit()]
        said = dataclasses.replace(
            task,
            ground_truth=truth,
            extra={**task.extra, "table": {**task.extra["table"], "rows": rows}},
        )
        text = ChartAnswers().answer(said, rng)
        if rng.random() >= slips.skip:
            return text
        before, _, rest = text.partition("<table>")
        return before + rest.partition("</table>\n")[2]

    def _read(self, value: str, rng: random.Random) -> str:
        return (
            str(int(value) - 1) if value != "1" and rng.random() < self._settings.misread else value
        )
