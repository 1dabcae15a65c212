"""Gymnasium and OpenEnv at their edges: toys, and a server that speaks OpenEnv's protocol and fails
as it is asked to.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from rayloop.core.failures import DataFailure, EnvironmentFailed, PolicyFailure
from rayloop.core.protocols import StepResult
from rayloop.core.types import ImageSource, Message, Task
from rayloop.data.images import decode
from rayloop.envs.adapters.gymnasium import Gymnasium, GymSettings
from rayloop.envs.adapters.mcp import McpTools
from rayloop.envs.adapters.openenv import OpenEnv, OpenEnvSettings
from rayloop.envs.adapters.packages import picture
from tests.support.openenv_server import counting
from tests.support.runs import eventually

pytestmark = [pytest.mark.adapters, pytest.mark.timeout(60)]
TASK = Task("one", (Message("user", ("Play.",)),), extra={"seed": 3})


def shown(result: StepResult) -> tuple[str, list[tuple[int, int]]]:
    """The text of what is observed, and the sizes of its pictures."""
    assert result.observation is not None
    (message,) = result.observation.messages
    texts = [part for part in message.parts if isinstance(part, str)]
    return "".join(texts), [decode(image.data or b"").size for image in message.images]


# Gymnasium ----------------------------------------------------------------------------------------


def test_a_rendered_environment_is_played_with_pictures_and_numbers() -> None:
    pytest.importorskip("pygame", reason="CartPole draws with pygame")
    made = Gymnasium(GymSettings(id="CartPole-v1", image="render"))
    first = made.reset(TASK)
    assert first.messages[0] == TASK.messages[0]
    assert decode(first.messages[1].images[0].data or b"").size == (600, 400)
    made.close()


def describe(observed: Any, info: Any) -> str:
    return f"at {int(observed)}"


def toy(**changes: Any) -> Gymnasium:
    return Gymnasium(
        GymSettings(id="FrozenLake-v1", image="none", describe=f"{__name__}:describe", **changes)
    )


def test_texts_are_actions_and_a_text_that_is_none_gets_a_reason() -> None:
    made = toy(options={"is_slippery": False})
    first = made.reset(TASK)
    assert first.messages[-1].parts == ("at 0",)
    for wrong in ("go left", "move 7", "-1", "9" * 5000):
        refused = made.step(wrong)
        assert (refused.error, refused.done) == ("the action is a whole number from 0 to 3", False)
        assert shown(refused)[0].endswith("at 0")
    steps = [made.step(f"I take {action}") for action in (2, 2, 1, 1, 1, 2)]
    assert [step.done for step in steps] == [False] * 5 + [True]
    assert steps[-1].info == {"truncated": False}
    assert [refused.reward, *(step.reward for step in steps)] == [0.0] * 6 + [1.0]
    assert made.evaluate() == 1.0, "the goal was reached"
    made.close()


def test_a_seed_repeats_an_episode_and_truncation_ends_it() -> None:
    places = []
    for _ in range(2):
        made = toy(options={"max_episode_steps": 3})
        made.reset(TASK)
        steps = [made.step("1") for _ in range(3)]
        places.append([shown(step)[0] for step in steps])
        assert steps[-1].done
        made.close()
    assert places[0] == places[1]
    with pytest.raises(DataFailure, match="seed 'x'"):
        toy().reset(Task("two", TASK.messages, extra={"seed": "x"}))


def test_what_is_missing_or_wrong_is_said_before_anything_is_played(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValidationError, match="a function is named module:name"):
        GymSettings(id="CartPole-v1", act="nowhere:at_all")
    with pytest.raises(
        ValidationError, match="the package no_such is not installed: pip install no_such"
    ):
        GymSettings(id="CartPole-v1", imports=("no_such.games",))
    for settings, extra, given in (
        (GymSettings, "gymnasium", {"id": "CartPole-v1"}),
        (McpTools.Settings, "mcp", {"servers": [{"url": "http://h/mcp"}]}),
        (OpenEnvSettings, "openenv", {"url": "http://h"}),
    ):
        monkeypatch.setattr("rayloop.envs.adapters.packages.find_spec", lambda name: None)
        with pytest.raises(
            ValidationError, match=rf"is not installed: pip install \"rayloop\[{extra}\]\""
        ):
            settings.model_validate(given)
    for wrong in (
        np.zeros((2, 2, 4), np.uint8),
        np.zeros((2, 2, 3)),
        np.full((2, 2), 300),
        np.zeros((0, 2), np.uint8),
    ):
        with pytest.raises(ValueError, match="no picture"):
            picture(wrong)


# OpenEnv ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error::DeprecationWarning")
def test_a_session_is_an_episode() -> None:
    with counting() as (counter, url):
        made = OpenEnv(OpenEnvSettings(url=url, image="screen"))
        first = made.reset(TASK)
        assert (counter.resets, first.messages[0]) == ([{"seed": 3}], TASK.messages[0])
        assert decode(first.messages[1].images[0].data or b"").size == (28, 56)
        for wrong in ("no json", '{"by": "two"}', "[1]", "{" * 9):
            refused = made.step(wrong)
            assert (refused.done, bool(refused.error)) == (False, True)
            assert "the count is 0" in shown(refused)[0]
        steps = [made.step(f'I say {{"by": {by}}}') for by in (1, 2)]
        assert [shown(step)[0] for step in steps] == ["the count is 1", "the count is 3"]
        assert [step.done for step in steps] == [False, True]
        assert [refused.reward, *(step.reward for step in steps)] == [0.0, 0.0, 1.0]
        assert made.evaluate() == 1.0
        made.close()
        eventually(lambda: counter.closed == 1, "the session is closed", 5)


def test_a_picture_may_be_a_flat_list() -> None:
    with counting() as (_, url):
        made = OpenEnv(OpenEnvSettings(url=url, image="grid"))
        assert decode(made.reset(TASK).messages[1].images[0].data or b"").size == (2, 2)
        made.close()
        broken = OpenEnv(OpenEnvSettings(url=url, image="text"))
        with pytest.raises(EnvironmentFailed, match="the observation's picture"):
            broken.reset(TASK)
        broken.close()


def test_an_action_on_which_the_environment_raises_is_the_policys() -> None:
    with counting() as (counter, url):
        made = OpenEnv(OpenEnvSettings(url=url, message_timeout=5.0))
        counter.fault = "EXECUTION_ERROR"
        with pytest.raises(EnvironmentFailed, match="OpenEnv, reset: EXECUTION_ERROR"):
            made.reset(TASK)
        counter.fault = ""
        made.reset(TASK)
        counter.fault = "EXECUTION_ERROR"
        with pytest.raises(PolicyFailure, match="the action raised: as the test wants it"):
            made.step('{"by": 1}')
        made.close()


@pytest.mark.parametrize("fault", ["CAPACITY_REACHED", "SESSION_ERROR", "gone", "hang"])
def test_failures_of_the_server_are_never_the_policys(fault: str) -> None:
    with counting() as (counter, url):
        made = OpenEnv(OpenEnvSettings(url=url, message_timeout=1.0))
        made.reset(TASK)
        counter.fault = fault
        began = time.monotonic()
        with pytest.raises(EnvironmentFailed, match="OpenEnv, step"):
            made.step('{"by": 1}')
        assert time.monotonic() - began < 2.5
        made.close()
    gone = OpenEnv(OpenEnvSettings(url=url, message_timeout=1.0))
    with pytest.raises(EnvironmentFailed, match="ConnectionRefusedError"):
        gone.reset(TASK)
    gone.close()


def test_an_image_source_is_what_the_seam_knows() -> None:
    assert picture(np.zeros((4, 6, 1), np.int64)) == ImageSource(
        data=picture(np.zeros((4, 6), np.uint8)).data
    )
