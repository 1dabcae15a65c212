"""What the driver's loop holds from one step to the next."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from cluster.driver import Driver
from rayloop.run.config import RunConfig
from rayloop.run.step_metrics import Collected
from tests.support.drivers import made_driver
from tests.support.runs import settings


class Payload:
    """Stands for an object reference: as long as it lives, its trajectory is in the object store."""


def test_payloads_of_one_step_are_let_go_before_the_next_is_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Collected groups hold what filters took out as well: two steps' worth may not fit where one does."""
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
    for name in ("restore", "publish", "verify", "produce", "supervise", "evaluate", "train", "record", "checkpoint"):
        monkeypatch.setattr(Driver, name, nothing)
    driver = made_driver(RunConfig.model_validate(settings(tmp_path, tmp_path, steps=3)), tmp_path)
    asyncio.run(driver.run())
    assert alive == [0, 0, 0]
