"""``evaluation.limit`` takes rows of every data source alike, spread over the file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rayloop.core.types import Task
from rayloop.data.cursor import evenly
from rayloop.run.config import RunConfig
from rayloop.run.order import held_out_rows
from tests.support.runs import settings
from tests.unit.core.test_plain import Quiet


def tasks(**counts: int) -> list[Task]:
    return [
        Task(f"{source}/{n}", (), source=source)
        for source, count in counts.items()
        for n in range(count)
    ]


def test_sources_are_taken_alike_and_each_spread_over_the_file() -> None:
    chosen = evenly(tasks(web=100, ios=100, windows=2), 12)
    assert Counter(task.source for task in chosen) == {"web": 5, "ios": 5, "windows": 2}
    assert [task.id for task in chosen if task.source == "web"] == [
        "web/0",
        "web/20",
        "web/40",
        "web/60",
        "web/80",
    ]
    assert chosen == evenly(tasks(web=100, ios=100, windows=2), 12)


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 202, 203, None])
def test_there_are_as_many_as_asked_for_in_the_order_of_the_file(limit: int | None) -> None:
    every = tasks(web=100, ios=100, windows=2)
    chosen = evenly(every, limit)
    assert len(chosen) == min(limit or 1000, len(every))
    assert chosen == [task for task in every if task in chosen]


def test_a_run_evaluates_that_many_rows(tmp_path: Path) -> None:
    config = settings(tmp_path, tmp_path)
    config["data"]["eval"] = config["data"]["train"]
    config["evaluation"] = {"every": 1, "limit": 4}
    made = RunConfig.model_validate(config)
    every = held_out_rows(
        made.model_copy(update={"evaluation": made.evaluation.model_copy(update={"limit": None})}),
        Quiet(),
    )
    assert held_out_rows(made, Quiet()) == evenly(every, 4) != every[:4]
