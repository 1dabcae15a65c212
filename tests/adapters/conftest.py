"""A tiny model, and one training step on it, for the environments of published packages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import digits_model as digits_model
from tests.support.models import picture_model as picture_model
from tests.support.runs import Run, finished, settings

Train = Callable[..., Run]
RESULT = {"use": "rayloop.rewards.environment_result:EnvironmentResult"}


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Two groups of four trajectories, and a step on them."""

    def made(model: Path, rows: list[dict[str, Any]], **changes: Any) -> Run:
        data = tmp_path / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        before = {"data": {"train": str(data)}, "steps": 1, "reward": {"source": RESULT}, "recovery": {}}
        before |= {"algorithm": {"group_size": 4, "groups_per_step": 2, "filtering": {"filters": []}}}
        run = finished(settings(tmp_path, model, **{**before, **changes}))
        (step,) = run.metrics
        assert step["rollout/trained"] == 8, step
        return run

    return made
