"""Pictures of gymnasium's published environments: Atari's screens and MiniGrid's, as they come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rayloop.config.settings import Component
from rayloop.core.types import Message, Task
from rayloop.data.images import decode
from tests.adapters.conftest import Train

pytest.importorskip("ale_py", reason="make test-adapters installs ale-py")
pytest.importorskip("minigrid", reason="make test-adapters installs minigrid")
pytestmark = pytest.mark.adapters
ATARI = {"id": "ALE/Pong-v5", "imports": ["ale_py"], "options": {"max_episode_steps": 6}}
GRID = {
    "id": "MiniGrid-Empty-5x5-v0",
    "imports": ["minigrid"],
    "image": "render",
    "describe": f"{__name__}:mission",
    "options": {"max_episode_steps": 6, "tile_size": 14},
}


def mission(observation: Any, info: Any) -> str:
    return f"{observation['mission']}. 0 turns left, 1 right, 2 goes forward."


def kind(settings: dict[str, Any]) -> dict[str, Any]:
    return {"use": "rayloop.envs.adapters.gymnasium:Gymnasium", "with": settings}


@pytest.mark.parametrize(
    ("settings", "size"), [(ATARI, (160, 210)), (GRID, (70, 70))], ids=["atari", "minigrid"]
)
def test_five_episodes_are_played_with_pictures(
    settings: dict[str, Any], size: tuple[int, int]
) -> None:
    for seed in range(5):
        made = Component(**kind(settings)).build()
        first = made.reset(Task("t", (Message("user", ("Play.",)),), extra={"seed": seed}))
        steps = [made.step(action) for action in "222"]
        for observation in (first, *(step.observation for step in steps)):
            assert decode(observation.messages[-1].images[0].data or b"").size == size
        assert [step.error for step in steps] == [None] * 3
        made.close()


def test_the_goal_of_the_grid_pays() -> None:
    made = Component(**kind({**GRID, "options": {"tile_size": 14}})).build()
    made.reset(Task("t", (Message("user", ("Play.",)),), extra={"seed": 1}))
    steps = [made.step(action) for action in "22122"]
    assert steps[-1].done
    assert made.evaluate() > 0.9
    made.close()


def test_a_vector_environment_is_refused_with_what_to_do() -> None:
    for id_, options in (
        ("CartPole-v1", {"num_envs": 2}),
        ("CartPole-v1", {"vectorization_mode": "sync"}),
    ):
        with pytest.raises(
            ValidationError, match=r"of vector environments, .*algorithm\.group_size"
        ):
            Component(**kind({"id": id_, "options": options})).options()


@pytest.mark.parametrize("settings", [ATARI, GRID], ids=["atari", "minigrid"])
def test_a_step_is_trained(picture_model: Path, train: Train, settings: dict[str, Any]) -> None:
    run = train(
        picture_model,
        [{"prompt": "Play.", "seed": seed} for seed in range(4)],
        data__reader={"use": "rayloop.data.dataset:ChatRows"},
        environment={"episode": {"environment": kind(settings), "max_turns": 2}},
    )
    assert 1 <= run.metrics[0]["rollout/turns/mean"] <= 2
