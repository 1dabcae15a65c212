"""Environments of verifiers, in the Python that has the package, as agents of AgentEnv: one
turn, a tool, a talk, and a step.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rayloop.core.failures import EnvironmentFailed
from rayloop.core.groups import Member, Scored
from rayloop.core.types import EndReason, Task
from rayloop.envs.episode import summarize
from rayloop.grpo.advantage_kinds import turn_returns
from tests.adapters.conftest import Train, played, scored
from tests.support import hostile_turns
from tests.support.runs import ROOT

PYTHON = ROOT / ".venv-verifiers/bin/python"
TASKSETS = Path(__file__).parent / "tasksets"
KIND: dict[str, Any] = {
    "use": "rayloop.envs.agent_env:AgentEnv",
    "with": {
        "run": f"{ROOT}/rayloop/envs/agents/verifiers_env.py:play",
        "python": str(PYTHON),
        "preload": ["verifiers.v1"],
        "env": {"PYTHONPATH": str(TASKSETS)},
    },
}
CALL = '<tool_call>{"name": "adder_add", "arguments": {"a": 3, "b": 1}}</tool_call>'
pytestmark = [
    pytest.mark.adapters,
    pytest.mark.timeout(280),
    pytest.mark.skipif(
        not PYTHON.exists(),
        reason="verifiers is not installed here (make test-adapters installs it)",
    ),
]


@pytest.mark.parametrize(
    ("taskset", "says", "result"),
    [
        ("sums", ("4",), 1.5),
        ("sums", ("5",), 0.5),
        ("tool_sums", (CALL, "4"), 1.5),
        ("talk_sums", ("5", "4"), 1.5),
        ("talk_sums", ("4", "5"), 0.5),
    ],
)
def test_the_rubric_gives_the_reward(taskset: str, says: tuple[str, ...], result: float) -> None:
    left = list(says)
    made = played(KIND, {"taskset": taskset, "index": 3}, lambda _: left.pop(0))
    assert (made.end_reason, made.env_result) == (EndReason.DONE, result), made
    assert [turn.sampled for turn in made.turns].count(True) == len(says)


@pytest.mark.parametrize(
    ("says", "paid"), [(("5", "5", "4"), [-1.0, 1.0, 1.0]), (("4", "4", "5"), [1.0, -1.0, -1.0])]
)
def test_each_seat_of_a_game_is_paid_its_own_reward(
    says: tuple[str, ...], paid: list[float]
) -> None:
    """The second answer is the other seat's.

    Its conversation ends first, and so it stands first among the turns.
    """
    left, posted = list(says), {**KIND, "with": {**KIND["with"], "reward": "posted"}}
    made = played(
        posted, {"taskset": "duel_sums", "env": "duel_sums", "index": 3}, lambda _: left.pop(0)
    )
    assert (made.end_reason, made.env_result) == (EndReason.DONE, sum(paid)), made
    assert [turn.reward for turn in made.sampled_turns] == paid
    member = Member(summarize(made, Task("t", ()), 1.0, None), Scored(sum(paid)))
    assert turn_returns(member, 0.0) == paid


def test_hostile_answers_are_scored_and_a_judge_that_is_away_is_not() -> None:
    contract = {"taskset": "contract_sums", "env": "contract_sums", "index": 3}
    texts = [
        '{"sum": 4}',
        "4",
        '{"sum": 0}',
        '{"sum": "x"}',
        "[]",
        "",
        *hostile_turns.texts(6)[::14],
    ]
    ends = Counter[EndReason]()
    for text in texts:
        made = played(KIND, contract, lambda _, text=text: text)  # type: ignore[misc]
        scored(made)
        ends[made.end_reason] += 1
    assert set(ends) == {EndReason.DONE, EndReason.ACTION_ERROR}, ends
    with pytest.raises(EnvironmentFailed, match="the judge does not answer"):
        played(KIND, {**contract, "index": 9}, lambda _: "ConnectionError: not mine")


def test_a_step_is_trained(digits_model: Path, train: Train) -> None:
    rows = [{"prompt": "Add.", "taskset": "talk_sums", "index": index} for index in range(4)]
    reader = {"use": "rayloop.data.dataset:ChatRows"}
    episode = {"environment": KIND, "max_turns": 4, "step_timeout": 120}
    made = train(digits_model, rows, data__reader=reader, environment={"episode": episode})
    assert made.metrics[0]["reward/mean"] >= 0.5
