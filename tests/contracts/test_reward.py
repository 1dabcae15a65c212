"""What every reward source keeps to: the shipped ones, functions of each form, plain and coroutine,
alone and per group.

A new source: a line in ``tools/pages/config.py`` and a case in
``tests/support/reward_cases.py``.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import httpx
import pytest

from rayloop.config.settings import check_components, load
from rayloop.core.groups import Scored, Unscored
from rayloop.rewards.functions import infrastructure_errors
from rayloop.rewards.settings import RewardSettings
from tests.support.judge_stub import JudgeStub
from tests.support.packages import package_marks
from tests.support.pages import write_snippets
from tests.support.reward_cases import CASES, RewardCase, judged, outcomes, values
from tests.support.reward_cases import stub as stub
from tools.pages.config import COMPONENTS

ODD = [
    "",
    " ",
    "\x00",
    "\ud7ff\U0001f600",
    "9" * 5000,
    "<bbox>[nan,0,1,inf]</bbox>",
    "<answer></answer>",
    "<tool_call>{",
    "\\boxed{",
]
"""Answers that a policy may give; none is the grader's failure."""


each = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{case.use.split(':')[1]}-{case.per}", marks=package_marks(case.use))
        for case in CASES
    ],
)


def test_every_shipped_source_is_here() -> None:
    shipped = {use for (title, _), uses in COMPONENTS.items() if title == "Rewards" for use in uses}
    assert shipped <= {case.use for case in CASES}


@each
def test_what_is_right_earns_more(case: RewardCase, stub: JudgeStub) -> None:
    right, wrong = values(judged(case, stub, case.right, case.wrong))
    assert right > wrong


@each
def test_an_outcome_belongs_to_its_answer_and_to_no_place(
    case: RewardCase, stub: JudgeStub
) -> None:
    """At once, in another order and in another process: the same outcomes."""
    answers = [case.right, case.wrong, case.wrong, case.right, case.wrong]
    found = judged(case, stub, *answers)
    assert judged(case, stub, *answers[::-1])[::-1] == found
    assert found[0] == found[3] != found[1] == found[2] == found[4]


@each
def test_whatever_a_policy_says_is_an_outcome(case: RewardCase, stub: JudgeStub) -> None:
    odd: list[Any] = [0.0, -1.5] if isinstance(case.right, float) else ODD
    found = judged(case, stub, *odd)
    for outcome in found:
        if isinstance(outcome, Scored):
            assert math.isfinite(outcome.value)
            assert all(
                isinstance(name, str) and math.isfinite(value)
                for name, value in outcome.components.items()
            )
            assert "invalid_component" not in outcome.flags
        else:
            assert outcome.reason
    if not isinstance(case.right, float):
        assert (
            max([o.value for o in found if isinstance(o, Scored)], default=0.0)
            <= values(judged(case, stub, case.right))[0]
        )


@each
def test_one_answer_is_enough(case: RewardCase, stub: JudgeStub) -> None:
    """A held-out answer is alone, and so is what is left of a group."""
    assert len(values(judged(case, stub, case.right))) == 1


@each
def test_it_says_what_is_infrastructure(case: RewardCase, stub: JudgeStub) -> None:
    declared = infrastructure_errors(case.source(stub))
    assert OSError in declared or Exception in declared


def test_a_judge_that_is_gone_is_no_number(stub: JudgeStub) -> None:
    (case,) = [case for case in CASES if case.use.endswith("JudgeReward")]
    gone = RewardCase(
        case.use,
        case.right,
        case.wrong,
        case.truth,
        options={**case.options, "on_unavailable": "exclude", "patience": 0.2},
    )
    stub.reset()
    stub.always = None
    before, stub.address = stub.address, "http://127.0.0.1:9"
    try:
        (outcome,) = judged(gone, stub, case.right)
    finally:
        stub.address = before
    assert isinstance(outcome, Unscored)


def test_the_rewards_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_snippets("bring_your_own/reward.md", tmp_path)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(folder)
    check_components(load(folder / "reward.yaml", [], RewardSettings))
    simple, stub = RewardCase("my_reward:score"), JudgeStub()
    assert judged(simple, stub, "3", "14") == [
        Scored(1.0, {"characters": 1.0}),
        Scored(0.0, {"characters": 2.0}),
    ]
    asked = RewardCase("client:Asked", options={"url": "http://127.0.0.1:9"})
    assert httpx.HTTPError in infrastructure_errors(asked.source(stub))
    made = asked.source(stub)
    made.client = httpx.AsyncClient(
        base_url="http://grader",
        transport=httpx.MockTransport(lambda request: httpx.Response(200, json={"score": 0.5})),
    )
    assert asyncio.run(outcomes(made, asked, ["3"], asked.task())) == [Scored(0.5)]
