"""What the driver's loop holds from one step to the next."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from rayloop.cluster.driver import Driver
from rayloop.core.failures import ConfigError
from rayloop.core.types import Task, Version
from rayloop.measure.controls import RIGHT, Item
from rayloop.run.config import RunConfig
from rayloop.run.records.step_metrics import Collected
from tests.support.drivers import made_driver
from tests.support.runs import settings


class Payload:
    """Stands for an object reference: as long as it lives, its trajectory is in the object store."""


def test_payloads_of_one_step_are_let_go_before_the_next_is_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Collected groups hold what filters took out as well: two steps' worth may not fit where one
    does.
    """
    held = list[weakref.ref[Payload]]()
    alive = list[int]()

    async def collect(self: Driver) -> Any:
        gc.collect()
        alive.append(sum(payload() is not None for payload in held))
        trained, filtered = Payload(), Payload()
        held[:] = [weakref.ref(trained), weakref.ref(filtered)]
        return Collected((trained,), (trained, filtered))  # type: ignore[arg-type]

    async def nothing(self: Driver, *_: Any) -> dict[str, float]:
        return {}

    monkeypatch.setattr(Driver, "collect", collect)
    for name in (
        "restore",
        "sync_weights",
        "verify",
        "produce",
        "supervise",
        "evaluate",
        "train",
        "record",
        "checkpoint",
    ):
        monkeypatch.setattr(Driver, name, nothing)
    driver = made_driver(RunConfig.model_validate(settings(tmp_path, tmp_path, steps=3)), tmp_path)
    asyncio.run(driver.run())
    assert alive == [0, 0, 0]


class Policy:
    """Saves nothing."""

    async def save(self, folder: str) -> None: ...

    async def load(self, folder: str, sums: Any) -> None: ...


class Services:
    policy = Policy()


def test_a_run_ends_when_held_out_rewards_get_no_better_and_keeps_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewards = [0.1, 0.2, 0.6, 0.3, 0.5, 0.9, 0.9]

    async def evaluate(self: Driver) -> None:
        self.reporter.evaluated(self.step, [Item(RIGHT, "t", "", reward=rewards[self.step])], {})

    async def collect(self: Driver) -> Any:
        return Collected(())

    async def sync_weights(self: Driver) -> None:
        self.version = Version(1, self.step)

    async def nothing(self: Driver, *_: Any) -> dict[str, float]:
        return {}

    monkeypatch.setattr(Driver, "collect", collect)
    monkeypatch.setattr(Driver, "evaluate", evaluate)
    monkeypatch.setattr(Driver, "sync_weights", sync_weights)
    for name in ("restore", "verify", "produce", "supervise", "train", "record"):
        monkeypatch.setattr(Driver, name, nothing)
    config = settings(tmp_path, tmp_path, steps=6)
    config["data"]["eval"] = config["data"]["train"]
    config["evaluation"] = {"every": 1, "patience": 2}
    config["checkpoint"] = {"every": 100, "keep": 1}
    (tmp_path / "evaluations").mkdir()
    driver = made_driver(RunConfig.model_validate(config), tmp_path, services=Services())
    monkeypatch.setattr(driver.services, "policy", Policy())
    asyncio.run(driver.run())
    assert driver.step == 4, "two evaluations after step 2 were no better"
    assert [found.step for found in driver.checkpoints.newest_first()] == [4, 2]
    assert (tmp_path / "checkpoints" / "best").resolve().name == "step_000002"
    assert (tmp_path / "events.jsonl").read_text(encoding="utf-8").count('"early_stop"') == 1


@pytest.mark.parametrize(("first", "steps"), [(True, [0, 2, 3]), (False, [2, 3])])
def test_the_evaluation_before_the_first_step_can_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool, steps: list[int]
) -> None:
    played = list[int]()

    async def play(asked: Any, player: Any, step: int, *_: Any) -> list[Item]:
        played.append(step)
        return [Item(RIGHT, "t", "", reward=0.5)]

    monkeypatch.setattr("rayloop.cluster.loop.evaluating.evaluate_answers", play)
    config = settings(tmp_path, tmp_path, steps=3)
    config["data"]["eval"] = config["data"]["train"]
    config["evaluation"] = {"every": 2, "first": first}
    (tmp_path / "evaluations").mkdir()
    driver = made_driver(RunConfig.model_validate(config), tmp_path, services=Services())
    driver.held_out = [Task("t", ())]
    for driver.step in range(4):
        asyncio.run(driver.evaluate())
    assert played == steps


@pytest.mark.parametrize("clear", [False, True])
def test_a_quarantine_of_before_is_cleared_by_one_setting(tmp_path: Path, clear: bool) -> None:
    """Every task was quarantined, as by a full disk.

    What this start itself quarantined and saved stays so.
    """
    values = settings(tmp_path, tmp_path)

    def driver(**checkpoint: Any) -> Driver:
        config = RunConfig.model_validate({**values, "checkpoint": checkpoint})
        return made_driver(config, tmp_path, hashes={"data.train": "0"}, services=Services())

    def save(made: Driver, step: int) -> None:
        made.step, made.version = step, Version(made.checkpoints.lineage, step)
        asyncio.run(made.checkpoint())

    before = driver(every=1)
    before.checkpoints.next_lineage()
    for task in before.rollouts.dataset:
        before.rollouts.quarantine(task, "", "No space left on device")
    before.history.groups_failed["train-1"] = 1
    save(before, 1)

    after = driver(every=1, resume=str(before.checkpoints.find("auto").folder) if clear else "auto")
    asyncio.run(after.restore())
    found = after.rollouts.scheduler.quarantined
    reported = [
        record["tasks"]
        for _, record in after.reporter.updates
        if record.get("event") == "quarantine_cleared"
    ]
    if not clear:
        assert (len(found), reported) == (24, [])
        with pytest.raises(ConfigError, match=r"checkpoint\.resume="):
            after.rollouts.scheduler.probe_tasks()
        return
    assert (found, after.history.groups_failed) == (set(), {})
    assert [len(tasks) for tasks in reported] == [24]
    bad = after.rollouts.dataset[3]
    after.rollouts.quarantine(bad, "", "it is broken")
    save(after, 2)
    asyncio.run(after.restore())
    assert after.rollouts.scheduler.quarantined == {bad.id}
