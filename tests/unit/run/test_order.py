"""A curriculum: the first epoch goes by tiers, later ones are mixed, and a resume goes on in the
same order.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rayloop.core.failures import CheckpointError, ConfigError
from rayloop.core.ledger import Ledger
from rayloop.core.types import Task
from rayloop.data.cursor import TaskCursor
from rayloop.recipes.arc_vision.data import LargeFirst
from rayloop.rollout.failed_episodes import FailureHistory
from rayloop.rollout.manager import RolloutManager
from rayloop.run.config import RunConfig
from rayloop.run.folder import RunFolder
from rayloop.run.order import BySolveRate, training_rows
from rayloop.run.records.rollouts import RolloutRecord
from tests.support.runs import settings
from tests.unit.core.test_plain import Quiet

TIERS = [2, 0, 1, 0, 2, 1, 0, 0]


def visited(cursor: TaskCursor, count: int) -> list[int]:
    return [cursor.next() for _ in range(count)]


def test_the_first_epoch_goes_by_tiers_and_the_next_is_mixed() -> None:
    first = visited(cursor := TaskCursor(8, 3, True, TIERS), 8)
    assert [TIERS[index] for index in first] == sorted(TIERS)
    assert first != visited(TaskCursor(8, 3, False, TIERS), 8), "rows of a tier are shuffled too"
    assert visited(cursor, 8) == visited(TaskCursor(8, 3), 16)[8:]


def test_a_resume_goes_on_in_the_same_order_and_refuses_another() -> None:
    before = TaskCursor(8, 3, True, TIERS)
    visited(before, 3)
    after = TaskCursor(8, 3, True, TIERS)
    after.restore(before.state())
    assert visited(after, 9) == visited(before, 9)
    with pytest.raises(CheckpointError, match="order"):
        TaskCursor(8, 3).restore(before.state())
    old = {name: value for name, value in TaskCursor(8, 3).state().items() if name != "order"}
    TaskCursor(8, 3).restore(old)  # a checkpoint from before there was an order
    with pytest.raises(CheckpointError, match="order"):
        TaskCursor(8, 3, True, TIERS).restore(old)


def boxes(*truths: Sequence[float]) -> list[int]:
    order = LargeFirst(LargeFirst.Settings())
    return [order.tier(Task(str(n), (), list(truth))) for n, truth in enumerate(truths)]


def test_large_boxes_come_first() -> None:
    assert boxes([0, 0, 0.5, 0.5], [0, 0, 0.2, 0.2], [0, 0, 0.1, 0.1], [0, 0, 0.5, 0.1]) == [
        0,
        1,
        2,
        1,
    ]


def rates(folder: Path, **answers: list[float | None]) -> Path:
    file = folder / "items.jsonl"
    lines = [
        json.dumps({"arm": "right", "task": task, "source": "", "sample": n, "reward": reward})
        for task, rewards in answers.items()
        for n, reward in enumerate(rewards)
    ]
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return file


def test_rows_that_are_sometimes_solved_come_first(tmp_path: Path) -> None:
    file = rates(tmp_path, never=[0.0, 0.5], always=[1.0, 1.0], sometimes=[0.0, 1.0], lost=[None])
    order = BySolveRate(BySolveRate.Settings(rates=str(file)))
    assert [order.tier(Task(id, ())) for id in ("sometimes", "lost", "new", "never", "always")] == [
        0,
        1,
        1,
        2,
        2,
    ]
    file.write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="has no scored answer"):
        BySolveRate(BySolveRate.Settings(rates=str(file)))


def test_an_image_that_is_not_the_row_s_says_nothing_about_it(tmp_path: Path) -> None:
    file = rates(tmp_path, row=[0.0, 1.0])
    other = {"arm": "other source", "task": "swapped", "source": "", "sample": 0, "reward": 0.0}
    file.write_text(file.read_text(encoding="utf-8") + json.dumps(other) + "\n", encoding="utf-8")
    order = BySolveRate(BySolveRate.Settings(rates=str(file)))
    assert [order.tier(Task(id, ())) for id in ("row", "swapped")] == [0, 1]


def kept(task: str, reward: float | None, *, replayed: bool = False) -> RolloutRecord:
    return RolloutRecord(1, 0, 0, task, "", "", (), (), "done", reward, replayed=replayed)


def test_an_earlier_run_s_own_trajectories_count_too(tmp_path: Path) -> None:
    rollouts = RunFolder.at(tmp_path).rollouts
    rollouts.path.mkdir()
    rollouts.write(
        1,
        [
            kept("sometimes", 0.0),
            kept("never", 0.0),
            kept("never", 1.0, replayed=True),
            kept("lost", None),
        ],
        {},
    )
    rollouts.write(2, [kept("sometimes", 1.0), kept("always", 1.0)], {})
    order = BySolveRate(BySolveRate.Settings(rates=str(tmp_path)))
    assert [order.tier(Task(id, ())) for id in ("sometimes", "lost", "never", "always")] == [
        0,
        1,
        2,
        2,
    ]
    for file in rollouts.files().values():
        file.unlink()
    with pytest.raises(ConfigError, match="a run that had keep_rollouts above 0"):
        BySolveRate(BySolveRate.Settings(rates=str(tmp_path)))


def test_a_run_visits_its_rows_in_that_order(tmp_path: Path) -> None:
    config: dict[str, Any] = settings(tmp_path, tmp_path)
    plain = RunConfig.model_validate(config)
    ids = [task.id for task in training_rows(plain, Quiet())]
    file = rates(tmp_path, **{id: [0.0, 1.0] for id in ids[10:13]})
    config["data"]["order"] = {"use": "rayloop.run.order:BySolveRate", "with": {"rates": str(file)}}
    made = RunConfig.model_validate(config)
    scheduler = RolloutManager(
        made, Ledger(), training_rows(made, Quiet()), Quiet(), FailureHistory(made.environment)
    ).scheduler
    assert sorted(visited(scheduler.cursor, 3)) == [10, 11, 12]
