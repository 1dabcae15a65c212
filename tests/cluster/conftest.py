"""Models for the tests with real runs, and a run without Ray for those with stand-ins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayloop.core.types import RolloutRequest
from tests.support.models import digits_model as digits_model
from tests.support.models import grounding_model as grounding_model
from tests.support.models import picture_model as picture_model
from tests.support.stand_ins import Behave, Handle, Make, World


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    def make(behave: Callable[[World], Behave], **changes: Any) -> World:
        made: World

        async def bound(actor: Handle, request: RolloutRequest) -> Any:
            return await behave(made)(actor, request)

        made = World(
            tmp_path,
            monkeypatch,
            bound,
            algorithm={"group_size": 8, "groups_per_step": 2},
            **changes,
        )
        return made

    return make
