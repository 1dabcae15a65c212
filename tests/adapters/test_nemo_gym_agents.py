"""Agents of NeMo Gym in the Python that has the package: ``/run`` with a tool, with ``/step``, and
what it reports when the resources server fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayloop.actors.environment import classify
from rayloop.core.types import EndReason
from tests.adapters.conftest import SAMPLING, Train, served
from tests.adapters.test_nemo_gym import CITIES, PYTHON, SERVER, call, pytestmark, rows, task
from tests.support import hostile_turns
from tests.support.played import all_scored, episode_settings, play_one
from tests.support.runs import ROOT

__all__ = ["pytestmark"]
FAILING = ROOT / "tests/adapters/nemo_gym_failing.py"
WEATHER = "example_single_tool_call"
TURNS = "example_multi_turn_gymnasium"
Kind = Callable[[str, int, str], dict[str, Any]]


@pytest.fixture
def kind(tmp_path: Path) -> Kind:
    """The environment of an agent whose resources server ``name`` listens at ``port``."""

    def made(name: str, port: int, agent: str = "simple_agent") -> dict[str, Any]:
        resources = {"entrypoint": "app.py", "domain": "other", "host": "127.0.0.1", "port": port}
        used = {
            "entrypoint": "app.py",
            "resources_server": {"type": "resources_servers", "name": name},
            "model_server": {"type": "responses_api_models", "name": "policy_model"},
            "max_steps": 4,
        }
        config = {
            name: {"resources_servers": {name: resources}},
            "my_agent": {"responses_api_agents": {agent: used}},
        }
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        settings = {
            "run": f"{ROOT}/rayloop/envs/agents/nemo_gym_env.py:play",
            "python": str(PYTHON),
            "preload": ["nemo_gym.server_utils", f"responses_api_agents.{agent}.app"],
            "env": {"NEMO_GYM_CONFIG": str(path)},
            "network": True,
        }
        return {"use": "rayloop.envs.agent_env:AgentEnv", "with": settings}

    return made


def row_of_agent(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "agent_ref": {"type": "responses_api_agents", "name": "my_agent"}}


@pytest.fixture(scope="module")
def failing() -> Iterator[int]:
    with served(PYTHON, FAILING) as port:
        yield port


@pytest.fixture(scope="module")
def weather() -> Iterator[int]:
    with served(PYTHON, SERVER, WEATHER) as port:
        yield port


def with_temporary_folder(folder: Path) -> str:
    """The Python of the package, whose temporary files are in ``folder``.

    wandb, which the package imports, leaves two empty folders there when Ray kills the process.
    """
    file = folder / "python"
    file.write_text(f'#!/bin/sh\nTMPDIR={folder} exec {PYTHON} "$@"\n', encoding="utf-8")
    file.chmod(0o755)
    return str(file)


def outcome(kind: dict[str, Any], row: dict[str, Any], says: list[str]) -> tuple[str, float | str]:
    """How the episode ended and its result, or why it has none and which server failed."""
    settings = episode_settings(kind, max_turns=4, step_timeout=120)
    try:
        played = play_one(task(row_of_agent(row)), lambda _: says.pop(0), settings, SAMPLING)
    except Exception as error:
        failure = classify(error)
        print(failure.why)
        return str(failure.cause), failure.server
    assert played.env_result is not None
    return str(played.end_reason), played.env_result


@pytest.mark.parametrize("place", range(5))
def test_five_episodes_are_played(weather: int, kind: Kind, place: int) -> None:
    """The first four ask the tool and are paid for it, the last one answers at once."""
    says = ["I do not know."]
    if place < 4:
        says.insert(0, call("get_weather", city=CITIES[place]))
    ended = outcome(kind(WEATHER, weather, "simple_agent"), rows(WEATHER)[place], says)
    assert ended == (str(EndReason.DONE), float(place < 4))


@pytest.mark.parametrize(("last", "paid"), [("The Eiffel tower.", 1.0), ("The Louvre.", 0.0)])
def test_a_server_with_steps_is_played(kind: Kind, last: str, paid: float) -> None:
    """The server answers each turn with the next question of the row."""
    with served(PYTHON, SERVER, TURNS) as port:
        says = ["Paris.", "Two million.", last]
        ended = outcome(kind(TURNS, port, "gymnasium_agent"), rows(TURNS)[0], says)
    assert ended == (str(EndReason.DONE), paid)
    assert says == []


@pytest.mark.parametrize(
    ("does", "cause"),
    [
        ("mask session_lost", "lost"),
        ("mask provider_quota_exhausted", "full"),
        ("mask osworld:reset_failed", "raised"),
        ("judge", "grader"),
        ("breaks", "grader"),
        ("status 503", "full"),
        ("status 504", "hung"),
    ],
)
def test_what_a_server_broke_has_no_reward(failing: int, kind: Kind, does: str, cause: str) -> None:
    row = {"responses_create_params": {"input": "Hello"}, "does": does}
    ended = outcome(kind("failing", failing, "simple_agent"), row, ["An answer."])
    assert ended == (cause, f"http://127.0.0.1:{failing}")


@pytest.mark.parametrize(
    ("does", "end", "paid"),
    [
        ("pays", EndReason.DONE, 1.0),
        ("refuses", EndReason.DONE, 0.0),
        ("broken_by_answers", EndReason.ACTION_ERROR, 0.0),
    ],
)
def test_what_the_policy_did_is_scored(
    failing: int, kind: Kind, does: str, end: EndReason, paid: float
) -> None:
    row = {"responses_create_params": {"input": "Hello"}, "does": does}
    ended = outcome(kind("failing", failing, "simple_agent"), row, ["An answer."])
    assert ended == (str(end), paid)


def test_hostile_turns_are_scored(weather: int, kind: Kind) -> None:
    """Whatever the policy writes or calls, no episode is left out."""
    row = row_of_agent(rows(WEATHER)[0])
    tools = [{"function": tool} for tool in row["responses_create_params"]["tools"]]
    texts = [*hostile_turns.calls(tools)[::5], *hostile_turns.texts(8)[::14]]
    settings = episode_settings(
        kind(WEATHER, weather, "simple_agent"), max_turns=8, step_timeout=120
    )
    paid = all_scored(task(row), texts, settings, SAMPLING)
    assert {one.value for one in paid} <= {0.0, 1.0}
    print(f"\n{len(texts)} texts in {len(paid)} episodes, every one scored")


def test_a_server_that_has_ended_is_named(kind: Kind) -> None:
    with served(PYTHON, FAILING) as port:
        pass
    row = {"responses_create_params": {"input": "Hello"}, "does": "pays"}
    ended = outcome(kind("failing", port, "simple_agent"), row, ["An answer."])
    assert ended == ("unreachable", f"http://127.0.0.1:{port}")


def test_a_step_is_trained(
    digits_model: Path, train: Train, weather: int, kind: Kind, tmp_path: Path
) -> None:
    environment = kind(WEATHER, weather, "simple_agent")
    environment["with"]["python"] = with_temporary_folder(tmp_path)
    run = train(
        digits_model,
        [row_of_agent(row) for row in rows(WEATHER)[:4]],
        data__reader={"use": "rayloop.envs.adapters.nemo_gym:NemoGymRows"},
        environment={
            "episode": {
                "environment": environment,
                "max_turns": 4,
            }
        },
    )
    assert run.metrics[0]["rollout/trained"] == 8
    assert run.metrics[0]["lost/episodes"] == 0
