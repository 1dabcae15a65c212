"""What every reward source keeps to: the shipped ones, functions of each form, plain and coroutine, alone and per group.

A new source: a line in ``benchmarks/pages/config.py`` and a case here, with an answer that is right and one that is wrong.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.pages.config import COMPONENTS
from rayloop.config.settings import Component, SettingsModel, check_components, load
from rayloop.core.groups import Outcome, Scored, Unscored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import EndReason, Message, Sampling, Task, Trajectory, TrajectoryId, Turn
from rayloop.rewards.functions import Per, around, as_outcome, as_outcomes, as_source
from rayloop.rewards.settings import ROLES, RewardSettings
from tests.support.judge_stub import JudgeStub, serving
from tests.support.packages import package_marks
from tests.support.pages import write_snippets

BOX = (0.1, 0.1, 0.5, 0.5)
RIGHT_BOX, WRONG_BOX = "<bbox>[0.1,0.1,0.5,0.5]</bbox>", "<bbox>[0.6,0.6,0.9,0.9]</bbox>"
THOUGHT, UNEMBEDDED = "<think>It is said.</think><answer>", {"weights": {"process": 0}}
BOXED_3, BOXED_4 = r"<answer>\boxed{3}</answer>", r"<answer>\boxed{4}</answer>"
ORIGINAL_3, ORIGINAL_4 = "<answer>\n\\boxed{3}\n</answer>", "<answer>\n\\boxed{4}\n</answer>"
ORIGINAL = {"variant": "original"}
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


def own(trajectory: Trajectory, task: Task, context: ScoreContext) -> float:
    return float(context.texts[-1] == task.ground_truth)


def trl(completions: Any, answer: Any, **columns: Any) -> list[float]:
    return [float(c[-1]["content"] == truth) for c, truth in zip(completions, answer, strict=True)]


def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, float]:
    return {"score": float(solution_str == ground_truth), "length": float(len(solution_str))}


def own_group(trajectories: Sequence[Trajectory], task: Task, contexts: Sequence[ScoreContext]) -> list[float]:
    texts = [context.texts[-1] for context in contexts]
    return [float(text == task.ground_truth) / texts.count(text) for text in texts]


async def own_later(trajectory: Trajectory, task: Task, context: ScoreContext) -> float:
    return own(trajectory, task, context)


async def trl_later(completions: Any, answer: Any, **columns: Any) -> list[float]:
    return trl(completions, answer)


async def verl_later(data_source: str, solution_str: str, ground_truth: str) -> dict[str, float]:
    return verl(data_source, solution_str, ground_truth)


async def own_group_later(trajectories: Any, task: Any, contexts: Any) -> list[float]:
    return own_group(trajectories, task, contexts)


class Ranking:
    """Right answers before wrong ones, by their share of the group that is no better."""

    class Settings(SettingsModel):
        """Nothing to set."""

    def __init__(self, settings: Ranking.Settings) -> None:
        del settings

    def score_group(self, trajectories: Any, task: Task, contexts: Any) -> list[Outcome]:
        right = own_group(trajectories, task, contexts)
        return [Scored(sum(other <= value for other in right) / len(right), {"right": value}) for value in right]


class LaterRanking(Ranking):
    async def score_group(self, *args: Any) -> list[Outcome]:  # type: ignore[override]
        return super().score_group(*args)


@dataclass(frozen=True)
class Case:
    """``right`` and ``wrong``: texts, or for an environment that judges by itself its results."""

    use: str
    right: str | float = "3"
    wrong: str | float = "4"
    truth: Any = "3"
    per: Per = "trajectory"
    options: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def task(self) -> Task:
        extra = {"answer": self.truth, "tags": ["a"], **self.extra}
        return Task("t", (Message("user", ("One and two?",)),), self.truth, "sums", extra)

    def source(self, stub: JudgeStub) -> Any:
        options = {**self.options}
        if self.use.endswith("JudgeReward"):
            options["judge"] = {"url": stub.url, "backoff": 0.01, "backoff_max": 0.05}
        component = Component(use=self.use, **{"with": options})
        ROLES[self.per].check(component)
        return as_source(component.build(), component.use, self.per)


SAID = [f"{THOUGHT}{answer}</answer>" for answer in "34"]
EMBEDDED = {"embedder": {"use": "rayloop.recipes.chart_rvr.rewards.embedders:WordEmbedder"}}
HERE = __name__
SHAPED = {"source": {"use": "rayloop.rewards.environment_result:EnvironmentResult"}, "max_tokens": 64, "overlong": 16}
LEGS = {"task": "leg_counting", "seed": 7}
CASES = [
    Case("rayloop.envs.adapters.reasoning_gym:ReasoningGymScore", "<answer>188</answer>", "<answer>x</answer>", extra=LEGS),
    Case("rayloop.recipes.arc_vision.reward:IoUReward", RIGHT_BOX, WRONG_BOX, BOX),
    Case("rayloop.recipes.arc_vision.reward:ArcVisionReward", RIGHT_BOX, WRONG_BOX, BOX),
    Case("rayloop.recipes.chart_rvr.rewards.reward:ChartReward", SAID[0], SAID[1], options=UNEMBEDDED),
    Case("rayloop.recipes.chart_rvr.rewards.reward:ChartReward", SAID[0], SAID[1], options=EMBEDDED, per="group"),
    Case("rayloop.recipes.chart_rvr.measure:ChartAnswer", "<answer>3</answer>", "<answer>4</answer>"),
    Case("rayloop.recipes.arpo.reward:ArpoReward", 1.0, 0.25),
    Case("rayloop.recipes.pyvision.reward:PyVisionReward", BOXED_3, BOXED_4),
    Case("rayloop.recipes.pyvision.reward:PyVisionReward", BOXED_3, BOXED_4, options={"verifiers": {"sums": "mra"}}),
    Case("rayloop.recipes.pyvision.reward:PyVisionReward", ORIGINAL_3, ORIGINAL_4, options=ORIGINAL | {"published": "vl_agent"}),
    Case("rayloop.recipes.pyvision.deepeyes:DeepEyesReward", "<answer>3</answer>", "<answer>4</answer>"),
    Case("rayloop.recipes.pyvision.deepeyes:DeepEyesReward", "<answer>3</answer>", "<answer>4</answer>", options=ORIGINAL),
    Case("rayloop.recipes.pyvision.verifiers:OptionReward", "<answer>3</answer>", "<answer>4</answer>"),
    Case("rayloop.recipes.arc_vision.reward:ArcVisionReward", RIGHT_BOX, WRONG_BOX, BOX, options=ORIGINAL),
    Case("rayloop.recipes.arc_vision.reward:ArcVisionReward", RIGHT_BOX, WRONG_BOX, BOX, options={"variant": "library"}),
    Case("rayloop.recipes.arpo.reward:ArpoReward", 1.0, 0.25, options=ORIGINAL),
    Case("rayloop.recipes.digits.data:SortReward", "1 2 3", "9 9 9", [1, 2, 3]),
    Case("rayloop.rewards.environment_result:EnvironmentResult", 1.0, 0.25),
    Case("rayloop.rewards.shaped:ShapedReward", 1.0, 0.25, options=SHAPED),
    Case("rayloop.judge.reward:JudgeReward", "<answer>red</answer>", "<answer>tan</answer>", "red", options={"rules_first": False}),
    *(Case(f"{HERE}:{name}{later}") for name in ("own", "trl", "verl") for later in ("", "_later")),
    *(Case(f"{HERE}:{name}", per="group") for name in ("own_group", "own_group_later", "trl", "trl_later")),
    *(Case(f"{HERE}:{name}", per="group") for name in ("Ranking", "LaterRanking")),
]  # fmt: skip


@pytest.fixture(scope="module")
def stub() -> Iterator[JudgeStub]:
    with serving(JudgeStub()) as running:
        yield running


def played(sample: int, answer: str | float) -> tuple[Trajectory, ScoreContext]:
    turns = (Turn("prompt", (1, 2)), Turn("assistant", (5, 6, 7), logprobs=(-1.0,) * 3))
    result = answer if isinstance(answer, float) else None
    ended = Trajectory(TrajectoryId(1, sample), 0, "t", 0, turns, Sampling(), EndReason.DONE, env_result=result)
    return ended, ScoreContext(4, [str(answer)], 10.0)


async def outcomes(source: Any, case: Case, answers: Sequence[str | float], task: Task) -> list[Outcome]:
    """What a run makes of the source's answer: one by one, at once as in an actor, or all in one call."""

    async def ask(method: Callable[..., Any], *args: Any) -> Any:
        result = await asyncio.to_thread(method, *args)
        return await result if inspect.isawaitable(result) else result

    made = [played(i, answer) for i, answer in enumerate(answers)]
    if case.per == "group":
        result = await ask(source.score_group, [t for t, _ in made], task, [c for _, c in made])
        return as_outcomes(result, len(answers))
    return [as_outcome(o) for o in await asyncio.gather(*(ask(source.score, t, task, c) for t, c in made))]


def judged(case: Case, stub: JudgeStub, *answers: str | float) -> list[Outcome]:
    async def go() -> list[Outcome]:
        source, task = case.source(stub), case.task()
        before = repr(task)
        try:
            found = await outcomes(source, case, answers, task)
            assert repr(task) == before, "the row is the next call's, too"
            return found
        finally:
            if hasattr(source, "client"):
                await source.client.close()

    stub.reset()
    return asyncio.run(go())


def values(found: Sequence[Outcome]) -> list[float]:
    assert all(isinstance(outcome, Scored) for outcome in found), found
    return [outcome.value for outcome in found if isinstance(outcome, Scored)]


each = pytest.mark.parametrize(
    "case", [pytest.param(case, id=f"{case.use.split(':')[1]}-{case.per}", marks=package_marks(case.use)) for case in CASES]
)


def test_every_shipped_source_is_here() -> None:
    shipped = {use for (title, _), uses in COMPONENTS.items() if title == "Rewards" for use in uses}
    assert shipped <= {case.use for case in CASES}


@each
def test_what_is_right_earns_more(case: Case, stub: JudgeStub) -> None:
    right, wrong = values(judged(case, stub, case.right, case.wrong))
    assert right > wrong


@each
def test_an_outcome_belongs_to_its_answer_and_to_no_place(case: Case, stub: JudgeStub) -> None:
    """At once, in another order and in another process: the same outcomes."""
    answers = [case.right, case.wrong, case.wrong, case.right, case.wrong]
    found = judged(case, stub, *answers)
    assert judged(case, stub, *answers[::-1])[::-1] == found
    assert found[0] == found[3] != found[1] == found[2] == found[4]


@each
def test_whatever_a_policy_says_is_an_outcome(case: Case, stub: JudgeStub) -> None:
    odd: list[Any] = [0.0, -1.5] if isinstance(case.right, float) else ODD
    found = judged(case, stub, *odd)
    for outcome in found:
        if isinstance(outcome, Scored):
            assert math.isfinite(outcome.value)
            assert all(isinstance(name, str) and math.isfinite(value) for name, value in outcome.components.items())
            assert "invalid_component" not in outcome.flags
        else:
            assert outcome.reason
    if not isinstance(case.right, float):
        assert max([o.value for o in found if isinstance(o, Scored)], default=0.0) <= values(judged(case, stub, case.right))[0]


@each
def test_one_answer_is_enough(case: Case, stub: JudgeStub) -> None:
    """A held-out answer is alone, and so is what is left of a group."""
    assert len(values(judged(case, stub, case.right))) == 1


@each
def test_it_says_what_is_infrastructure(case: Case, stub: JudgeStub) -> None:
    declared = around(case.source(stub))
    assert OSError in declared or Exception in declared


def test_a_judge_that_is_gone_is_no_number(stub: JudgeStub) -> None:
    (case,) = [case for case in CASES if case.use.endswith("JudgeReward")]
    gone = Case(
        case.use, case.right, case.wrong, case.truth, options={**case.options, "on_unavailable": "exclude", "patience": 0.2}
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
    simple, stub = Case("my_reward:score"), JudgeStub()
    assert judged(simple, stub, "3", "14") == [Scored(1.0, {"characters": 1.0}), Scored(0.0, {"characters": 2.0})]
    asked = Case("client:Asked", options={"url": "http://127.0.0.1:9"})
    assert httpx.HTTPError in around(asked.source(stub))
    made = asked.source(stub)
    made.client = httpx.AsyncClient(
        base_url="http://grader", transport=httpx.MockTransport(lambda request: httpx.Response(200, json={"score": 0.5}))
    )
    assert asyncio.run(outcomes(made, asked, ["3"], asked.task())) == [Scored(0.5)]
