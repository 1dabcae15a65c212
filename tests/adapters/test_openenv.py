"""The OpenEnv adapter against a server of the published package, in the Python that has it:
episodes, refusals, and a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayloop.core.failures import EnvironmentFailed
from rayloop.core.types import EndReason, Message, Task
from rayloop.data.images import decode
from rayloop.envs.adapters.openenv import OpenEnv, OpenEnvSettings
from tests.adapters.conftest import Train, played, served
from tests.support.runs import ROOT, eventually

pytest.importorskip("websockets", reason="make test-adapters installs websockets")
PYTHON = ROOT / ".venv-openenv/bin/python"
SERVER = ROOT / "tests/adapters/openenv_server.py"
TASK = Task("t", (Message("user", ("Count to three.",)),), extra={"seed": 3})
pytestmark = [
    pytest.mark.adapters,
    pytest.mark.skipif(
        not PYTHON.exists(), reason="openenv is not installed here (make test-adapters installs it)"
    ),
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of a server with two sessions."""
    with served(PYTHON, SERVER, "2") as port:
        yield f"http://127.0.0.1:{port}"


def kind(url: str) -> dict[str, Any]:
    return {
        "use": "rayloop.envs.adapters.openenv:OpenEnv",
        "with": {"url": url, "image": "screenshot"},
    }


@pytest.mark.parametrize("first", range(5))
def test_five_episodes_are_played(url: str, first: int) -> None:
    """By the episode's loop; the reward is 1 for a count of exactly three."""
    left = [f'{{"by": {first}}}', '{"by": 3}', '{"by": 3}']
    made = played(kind(url), {"seed": first}, lambda _: left.pop(0))
    assert (made.end_reason, made.env_result) == (EndReason.DONE, float(first in (0, 3)))
    assert [turn.sampled for turn in made.turns].count(True) == (1 if first >= 3 else 2)


def test_an_episode_has_pictures_refusals_and_a_result(url: str) -> None:
    made = OpenEnv(OpenEnvSettings(url=url, image="screenshot"))
    seen = made.reset(TASK).messages[-1]
    assert decode(seen.images[0].data or b"").size == (56, 28)
    for wrong, why in (
        ("no json", "JSON object"),
        ('{"wrong": 1}', "by: Field required"),
        ('{"by": "x"}', "valid integer"),
    ):
        refused = made.step(wrong)
        assert not refused.done
        assert why in str(refused.error)
    assert made.step('{"by": 1}').reward == 0.0
    last = made.step('I say {"by": 2}')
    assert (last.done, last.reward) == (True, 1.0)
    assert last.observation is not None
    assert "the count is 3" in str(last.observation.messages[-1].parts)
    assert made.evaluate() == 1.0
    made.close()


def test_a_server_without_a_free_session_says_what_to_do(url: str) -> None:
    """It says so unasked after the connection, and closes it."""
    both = [OpenEnv(OpenEnvSettings(url=url)) for _ in range(2)]
    for one in both:
        eventually(lambda one=one: begun(one), "a session is free", 10)
    third = OpenEnv(OpenEnvSettings(url=url))
    with pytest.raises(
        EnvironmentFailed, match=r"CAPACITY_REACHED: .*2/2 .*Raise the server's max_concurrent_envs"
    ):
        third.reset(TASK)
    for one in (*both, third):
        one.close()


def begun(one: OpenEnv) -> bool:
    try:
        one.reset(TASK)
    except EnvironmentFailed:
        return False
    return True


def test_a_step_is_trained(picture_model: Path, train: Train) -> None:
    with served(PYTHON, SERVER, "8") as port:
        run = train(
            picture_model,
            [{"prompt": "Count to three.", "seed": seed} for seed in range(4)],
            data__reader={"use": "rayloop.data.dataset:ChatRows"},
            environment={
                "episode": {"environment": kind(f"http://127.0.0.1:{port}"), "max_turns": 2}
            },
        )
    assert run.metrics[0]["rollout/turns/mean"] == 2
