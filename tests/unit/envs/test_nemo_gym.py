"""The NeMo Gym adapter at its edges, against a server that answers what a test wants."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayloop.core.failures import Cause, DataFailure, EnvironmentFailed, PolicyFailure
from rayloop.core.types import Task
from rayloop.envs.adapters.nemo_gym import NemoGym, NemoGymRows
from tests.support.nemo_gym_server import CALL, ROW, Answers, answering

Served = tuple[Answers, NemoGym]


def task(row: dict[str, Any]) -> Task:
    return NemoGymRows().task(row, "rows.jsonl:1", Path())


@pytest.fixture
def served() -> Iterator[Served]:
    with answering() as (answers, url):
        environment = NemoGym(NemoGym.Settings(url=url, message_timeout=20))
        yield answers, environment
        environment.close()


def test_the_server_gets_row_calls_and_answer_in_one_session(served: Served) -> None:
    answers, environment = served
    environment.reset(task(ROW))
    environment.step(CALL)
    environment.step("It is cold.")
    assert environment.evaluate() == 1.0
    paths = [path for path, _ in answers.requests]
    assert paths == ["/seed_session", "/get_weather", "/verify"]
    assert answers.cookies == [None, "session=s1", "session=s1"]
    (_, seeded), (_, arguments), (_, verified) = answers.requests
    assert (seeded, arguments) == (ROW, {"city": "Oslo"})
    output = verified["response"]["output"]
    assert {key: verified[key] for key in ROW} == ROW
    assert [item["type"] for item in output] == ["function_call", "function_call_output", "message"]
    assert output[0]["arguments"] == '{"city": "Oslo"}'
    assert output[1]["output"] == '{"weather": "cold"}'
    assert output[2]["content"][0]["text"] == "It is cold."


def test_a_row_has_its_conversation_and_tools() -> None:
    read = task(ROW)
    assert [(message.role, message.parts) for message in read.messages] == [
        ("system", ("Be brief.",)),
        ("user", ("How is the weather?",)),
    ]
    short = {"responses_create_params": {"input": "Hello"}, "agent_ref": {"name": "simple"}}
    assert task(short).messages[0].parts == ("Hello",)
    assert task(short).source == "simple"


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "Hello"}, "this is not a row of NeMo Gym"),
        ({"responses_create_params": {"input": []}}, "a text or a list of messages"),
        (
            {"responses_create_params": {"input": [{"type": "function_call", "name": "f"}]}},
            "messages only",
        ),
    ],
)
def test_another_row_is_refused(row: dict[str, Any], why: str) -> None:
    with pytest.raises(DataFailure, match=why):
        task(row)


def test_a_masked_answer_is_never_a_reward(served: Served) -> None:
    answers, environment = served
    masked = {"reward": 0.0, "mask_sample": True, "failure_reason": "the sandbox does not answer"}
    answers.by_path["/verify"] = (200, masked)
    environment.reset(task(ROW))
    with pytest.raises(EnvironmentFailed, match="other: the sandbox does not answer"):
        environment.evaluate()


def test_a_named_failure_of_a_valid_sample_is_scored(served: Served) -> None:
    answers, environment = served
    noted = {"reward": 0.25, "mask_sample": False, "failure_kind": "judge_unparseable"}
    answers.by_path["/verify"] = (200, noted)
    environment.reset(task(ROW))
    assert environment.evaluate() == 0.25


def verifier(broken_by: list[bool]) -> Any:
    """A verifier that raises on answers with items, on empty ones, or on neither."""

    def verify(request: dict[str, Any]) -> tuple[int, Any]:
        has_answer = bool(request["response"]["output"])
        return (500, "ValueError()") if has_answer in broken_by else (200, {"reward": 0.5})

    return verify


def test_an_empty_answer_shows_who_broke_the_verifier(served: Served) -> None:
    answers, environment = served
    environment.reset(task(ROW))
    environment.step("x")
    answers.by_path["/verify"] = (200, verifier([True]))
    with pytest.raises(PolicyFailure, match='breaks the verifier: "ValueError'):
        environment.evaluate()
    answers.by_path["/verify"] = (200, verifier([True, False]))
    with pytest.raises(EnvironmentFailed, match="HTTP 500") as raised:
        environment.evaluate()
    assert raised.value.cause is Cause.RAISED


def test_a_verifier_that_failed_once_pays(served: Served) -> None:
    answers, environment = served
    environment.reset(task(ROW))
    environment.step("x")
    statuses = [500]
    answers.by_path["/verify"] = (
        200,
        lambda _: (statuses.pop(), "late") if statuses else (200, {"reward": 0.5}),
    )
    assert environment.evaluate() == 0.5


@pytest.mark.parametrize("body", [{"mask_sample": False}, [1.0], {"reward": "much"}])
def test_an_answer_without_a_reward_is_the_servers_bug(served: Served, body: Any) -> None:
    answers, environment = served
    answers.by_path["/verify"] = (200, body)
    environment.reset(task(ROW))
    with pytest.raises(EnvironmentFailed, match="without a reward") as raised:
        environment.evaluate()
    assert raised.value.cause is Cause.BUG


def test_a_session_that_does_not_begin_is_the_servers(served: Served) -> None:
    answers, environment = served
    answers.by_path["/seed_session"] = (422, {"detail": "no taskset"})
    with pytest.raises(EnvironmentFailed, match="/seed_session: HTTP 422") as raised:
        environment.reset(task(ROW))
    assert raised.value.cause is Cause.RAISED


def test_a_number_that_is_none_is_sent(served: Served) -> None:
    answers, environment = served
    environment.reset(task(ROW))
    assert environment.step(CALL.replace('"Oslo"', '"Oslo", "days": NaN')).error is None
    [_, (_, arguments)] = answers.requests
    assert math.isnan(arguments["days"])
