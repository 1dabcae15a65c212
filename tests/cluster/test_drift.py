"""Drift of engine and trainer in a run whose steps train on nothing of the present weights.

No Ray cluster.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayloop.cluster.driver import Driver
from rayloop.cluster.loop.weight_check import WeightCheck
from rayloop.core.failures import AlarmStopped
from rayloop.grpo.alarms import UNSEEN_STEPS
from rayloop.run.config import RunConfig
from rayloop.run.records.step_metrics import Collected
from tests.support.drivers import made_driver
from tests.support.runs import settings

OLD = {"actor/logprob_mismatch_mean/lag_1": 0.0}


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """It plays nothing; a weight update was lost, so that fresh episodes are 5 nats apart."""
    config = RunConfig.model_validate(
        settings(
            tmp_path,
            tmp_path,
            algorithm__staleness={"max_staleness": 1},
            alarms={"logprobs": {"stop": 0.5}},
        )
    )
    driver = made_driver(config, tmp_path, "never")
    driver.runner = SimpleNamespace(metrics=dict)  # type: ignore[assignment]
    driver.steps, driver.looked = [], []  # type: ignore[attr-defined]

    async def observe(tasks: Any, player: Any, step: int) -> float:
        driver.looked.append(step)  # type: ignore[attr-defined]
        return 5.0

    def recorded(step: int, *rest: Any) -> dict[str, float]:
        driver.steps.append(step)  # type: ignore[attr-defined]
        return {}

    monkeypatch.setattr(WeightCheck, "observe", staticmethod(observe))
    monkeypatch.setattr(driver.reporter, "step", recorded)
    return driver


async def train(driver: Driver, steps: int) -> None:
    for _ in range(steps):
        driver.step += 1
        await driver.record(OLD, Collected(()))


def test_a_lost_weight_update_ends_a_run_that_trains_on_nothing_fresh(driver: Driver) -> None:
    with pytest.raises(
        AlarmStopped, match=r"differ by 5\.00e\+00 nats per token of the same weights"
    ):
        asyncio.run(train(driver, 4 * UNSEEN_STEPS))
    assert driver.looked == [UNSEEN_STEPS, 2 * UNSEEN_STEPS, 3 * UNSEEN_STEPS]  # type: ignore[attr-defined]


def test_a_stop_does_not_wait_for_fresh_episodes_and_the_step_is_recorded(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        await train(driver, UNSEEN_STEPS - 1)
        driver.stopping.set()
        monkeypatch.setattr(WeightCheck, "observe", lambda *_: asyncio.sleep(60))
        await asyncio.wait_for(train(driver, 1), 10)

    asyncio.run(main())
    assert driver.steps == list(range(1, UNSEEN_STEPS + 1))  # type: ignore[attr-defined]
