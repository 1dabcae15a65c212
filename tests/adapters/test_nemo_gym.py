"""NeMo Gym against two of its own resources servers, in the Python that has the package: episodes,
pictures, a verifier that an answer breaks, a server that ends, and a step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayloop.core.failures import Cause, EnvironmentFailed
from rayloop.core.types import EndReason, Task
from rayloop.data.images import decode
from rayloop.envs.adapters.nemo_gym import NemoGym, NemoGymRows
from tests.adapters.conftest import SAMPLING, Train, served
from tests.support.played import episode_settings, play_one
from tests.support.runs import ROOT

PYTHON = ROOT / ".venv-nemo-gym/bin/python"
SERVER = ROOT / "tests/adapters/nemo_gym_server.py"
CITIES = ["Oslo", "Lima", "Kyiv", "Cairo"]
pytestmark = [
    pytest.mark.adapters,
    pytest.mark.timeout(280),
    pytest.mark.skipif(
        not PYTHON.exists(),
        reason="nemo-gym is not installed here (make test-adapters installs it, where there is a"
        " python3.13)",
    ),
]


def rows(server: str) -> list[dict[str, Any]]:
    """The rows that the package ships for a server."""
    [data] = PYTHON.parents[1].glob(
        f"lib/python*/site-packages/resources_servers/{server}/data/example.jsonl"
    )
    return [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]


def task(row: dict[str, Any]) -> Task:
    return NemoGymRows().task(row, "row 1", Path())


def kind(url: str) -> dict[str, Any]:
    return {"use": "rayloop.envs.adapters.nemo_gym:NemoGym", "with": {"url": url}}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture(scope="module")
def weather() -> Iterator[str]:
    with served(PYTHON, SERVER, "example_single_tool_call") as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def circles() -> Iterator[str]:
    with served(PYTHON, SERVER, "circle_click") as port:
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("place", range(5))
def test_five_episodes_are_played(weather: str, place: int) -> None:
    """The first four ask the tool and are paid for it, the last one answers at once."""
    left = ["I do not know."]
    if place < 4:
        left.insert(0, call("get_weather", city=CITIES[place]))
    row = rows("example_single_tool_call")[place]
    settings = episode_settings(kind(weather), max_turns=4, step_timeout=120)
    played = play_one(task(row), lambda _: left.pop(0), settings, SAMPLING)
    assert (played.end_reason, played.env_result) == (EndReason.DONE, float(place < 4))


def test_the_tool_answers_and_a_wrong_call_is_refused(weather: str) -> None:
    environment = NemoGym(NemoGym.Settings(url=weather))
    first = environment.reset(task(rows("example_single_tool_call")[0]))
    assert [message.role for message in first.messages] == ["system", "user"]
    assert "needs the argument 'city'" in str(environment.step(call("get_weather")).error)
    answered = environment.step(call("get_weather", city="Oslo"))
    assert answered.observation is not None
    assert "The weather in Oslo is cold." in str(answered.observation.messages)
    assert environment.evaluate() == 1.0
    environment.close()


def test_a_click_on_the_picture_is_paid(circles: str) -> None:
    row = rows("circle_click")[0]
    [target] = [circle for circle in row["circles"] if circle["color"] == row["target_color"]]
    for x, y, paid in ((target["x"], target["y"], 1.0), (0, 0, 0.0)):
        environment = NemoGym(NemoGym.Settings(url=circles))
        [picture] = environment.reset(task(row)).messages[-1].images
        assert decode(picture.data or b"").size == (1000, 1000)
        environment.step(call("click", x=x, y=y))
        assert environment.evaluate() == paid
        environment.close()


def test_an_answer_that_breaks_the_verifier_is_the_policys(circles: str) -> None:
    """Its square root takes no whole number of 400 digits; an empty answer is verified."""
    settings = episode_settings(kind(circles), max_turns=1, step_timeout=120)
    text = call("click", x=10**400, y=0)
    played = play_one(task(rows("circle_click")[0]), lambda _: text, settings, SAMPLING)
    assert played.end_reason is EndReason.POLICY_FAILURE


def test_a_server_that_ends_is_never_a_reward() -> None:
    with served(PYTHON, SERVER, "example_single_tool_call") as port:
        environment = NemoGym(NemoGym.Settings(url=f"http://127.0.0.1:{port}"))
        environment.reset(task(rows("example_single_tool_call")[0]))
        environment.step(call("get_weather", city="Oslo"))
    with pytest.raises(EnvironmentFailed, match="/verify: Connect") as raised:
        environment.evaluate()
    assert raised.value.cause is Cause.UNREACHABLE
    assert raised.value.server == f"http://127.0.0.1:{port}"
    environment.close()


def test_a_step_is_trained(digits_model: Path, train: Train, weather: str) -> None:
    run = train(
        digits_model,
        rows("example_single_tool_call")[:4],
        data__reader={"use": "rayloop.envs.adapters.nemo_gym:NemoGymRows"},
        environment={"episode": {"environment": kind(weather), "max_turns": 2}},
    )
    assert run.metrics[0]["rollout/trained"] == 8
    assert run.metrics[0]["lost/episodes"] == 0
