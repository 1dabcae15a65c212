"""Reward sources with an answer that is right and one that is wrong, and what a run makes of
answers.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from rayloop.config.settings import Component, SettingsModel
from rayloop.core.groups import Outcome, Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import EndReason, Message, Sampling, Task, Trajectory, TrajectoryId, Turn
from rayloop.rewards.functions import Per, as_outcome, as_outcomes, as_source
from rayloop.rewards.settings import ROLES
from tests.support.judge_stub import JudgeStub, serving

BOX = (0.1, 0.1, 0.5, 0.5)
RIGHT_BOX, WRONG_BOX = "<bbox>[0.1,0.1,0.5,0.5]</bbox>", "<bbox>[0.6,0.6,0.9,0.9]</bbox>"
THOUGHT, UNEMBEDDED = "<think>It is said.</think><answer>", {"weights": {"process": 0}}
BOXED_3, BOXED_4 = r"<answer>\boxed{3}</answer>", r"<answer>\boxed{4}</answer>"
ORIGINAL_3, ORIGINAL_4 = "<answer>\n\\boxed{3}\n</answer>", "<answer>\n\\boxed{4}\n</answer>"
ORIGINAL = {"variant": "original"}
VL_AGENT = {**ORIGINAL, "published": "vl_agent"}
ASKED = {"rules_first": False}


def own(trajectory: Trajectory, task: Task, context: ScoreContext) -> float:
    return float(context.texts[-1] == task.ground_truth)


def trl(completions: Any, answer: Any, **columns: Any) -> list[float]:
    return [float(c[-1]["content"] == truth) for c, truth in zip(completions, answer, strict=True)]


def verl(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> dict[str, float]:
    return {"score": float(solution_str == ground_truth), "length": float(len(solution_str))}


def own_group(
    trajectories: Sequence[Trajectory], task: Task, contexts: Sequence[ScoreContext]
) -> list[float]:
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
    """Right answers before wrong ones, by the share of the group that they are at least as good as."""

    class Settings(SettingsModel):
        """Nothing to set."""

    def __init__(self, settings: Ranking.Settings) -> None:
        del settings

    def score_group(self, trajectories: Any, task: Task, contexts: Any) -> list[Outcome]:
        right = own_group(trajectories, task, contexts)
        return [
            Scored(sum(other <= value for other in right) / len(right), {"right": value})
            for value in right
        ]


class LaterRanking(Ranking):
    async def score_group(self, *args: Any) -> list[Outcome]:  # type: ignore[override]
        return super().score_group(*args)


@dataclass(frozen=True)
class RewardCase:
    """A reward source.

    ``right`` and ``wrong``: texts, or for an environment that judges by itself its results.
    """

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
SHAPED = {
    "source": {"use": "rayloop.rewards.environment_result:EnvironmentResult"},
    "max_tokens": 64,
    "overlong": 16,
}
LEGS = {"task": "leg_counting", "seed": 7}
CASES = [
    RewardCase(
        "rayloop.envs.adapters.reasoning_gym:ReasoningGymScore",
        "<answer>188</answer>",
        "<answer>x</answer>",
        extra=LEGS,
    ),
    RewardCase("rayloop.recipes.arc_vision.reward:IoUReward", RIGHT_BOX, WRONG_BOX, BOX),
    RewardCase(
        "rayloop.recipes.arc_vision.click_reward:ClickReward",
        "Action: click(start_box='(84,42)')",
        "Action: click(start_box='(150,42)')",
        BOX,
        extra={"image_size": (280, 140)},
    ),
    RewardCase("rayloop.recipes.arc_vision.reward:ArcVisionReward", RIGHT_BOX, WRONG_BOX, BOX),
    RewardCase(
        "rayloop.recipes.chart_rvr.rewards.reward:ChartReward", SAID[0], SAID[1], options=UNEMBEDDED
    ),
    RewardCase(
        "rayloop.recipes.chart_rvr.rewards.reward:ChartReward",
        SAID[0],
        SAID[1],
        options=EMBEDDED,
        per="group",
    ),
    RewardCase(
        "rayloop.recipes.chart_rvr.measure:ChartAnswer", "<answer>3</answer>", "<answer>4</answer>"
    ),
    RewardCase("rayloop.recipes.arpo.reward:ArpoReward", 1.0, 0.25),
    RewardCase("rayloop.recipes.pyvision.reward:PyVisionReward", BOXED_3, BOXED_4),
    RewardCase(
        "rayloop.recipes.pyvision.reward:PyVisionReward",
        BOXED_3,
        BOXED_4,
        options={"verifiers": {"sums": "mra"}},
    ),
    RewardCase(
        "rayloop.recipes.pyvision.reward:PyVisionReward", ORIGINAL_3, ORIGINAL_4, options=VL_AGENT
    ),
    RewardCase(
        "rayloop.recipes.pyvision.deepeyes:DeepEyesReward",
        "<answer>3</answer>",
        "<answer>4</answer>",
    ),
    RewardCase(
        "rayloop.recipes.pyvision.deepeyes:DeepEyesReward",
        "<answer>3</answer>",
        "<answer>4</answer>",
        options=ORIGINAL,
    ),
    RewardCase(
        "rayloop.recipes.pyvision.verifiers:OptionReward",
        "<answer>3</answer>",
        "<answer>4</answer>",
    ),
    RewardCase(
        "rayloop.recipes.arc_vision.reward:ArcVisionReward",
        RIGHT_BOX,
        WRONG_BOX,
        BOX,
        options=ORIGINAL,
    ),
    RewardCase(
        "rayloop.recipes.arc_vision.reward:ArcVisionReward",
        RIGHT_BOX,
        WRONG_BOX,
        BOX,
        options={"variant": "library"},
    ),
    RewardCase("rayloop.recipes.arpo.reward:ArpoReward", 1.0, 0.25, options=ORIGINAL),
    RewardCase("rayloop.recipes.digits.data:SortReward", "1 2 3", "9 9 9", [1, 2, 3]),
    RewardCase("rayloop.rewards.environment_result:EnvironmentResult", 1.0, 0.25),
    RewardCase("rayloop.rewards.shaped:ShapedReward", 1.0, 0.25, options=SHAPED),
    RewardCase(
        "rayloop.judge.reward:JudgeReward",
        "<answer>red</answer>",
        "<answer>tan</answer>",
        "red",
        options=ASKED,
    ),
    *(
        RewardCase(f"{HERE}:{name}{later}")
        for name in ("own", "trl", "verl")
        for later in ("", "_later")
    ),
    *(
        RewardCase(f"{HERE}:{name}", per="group")
        for name in ("own_group", "own_group_later", "trl", "trl_later")
    ),
    *(RewardCase(f"{HERE}:{name}", per="group") for name in ("Ranking", "LaterRanking")),
]


@pytest.fixture(scope="module")
def stub() -> Iterator[JudgeStub]:
    with serving(JudgeStub()) as running:
        yield running


def played(sample: int, answer: str | float) -> tuple[Trajectory, ScoreContext]:
    turns = (Turn("prompt", (1, 2)), Turn("assistant", (5, 6, 7), logprobs=(-1.0,) * 3))
    result = answer if isinstance(answer, float) else None
    ended = Trajectory(
        TrajectoryId(1, sample), 0, "t", 0, turns, Sampling(), EndReason.DONE, env_result=result
    )
    return ended, ScoreContext(4, [str(answer)], 10.0)


async def outcomes(
    source: Any, case: RewardCase, answers: Sequence[str | float], task: Task
) -> list[Outcome]:
    """What a run makes of the source's answer: one by one, at once as in an actor, or all in one
    call.
    """

    async def ask(method: Callable[..., Any], *args: Any) -> Any:
        result = await asyncio.to_thread(method, *args)
        return await result if inspect.isawaitable(result) else result

    made = [played(i, answer) for i, answer in enumerate(answers)]
    if case.per == "group":
        result = await ask(source.score_group, [t for t, _ in made], task, [c for _, c in made])
        return as_outcomes(result, len(answers))
    return [
        as_outcome(o)
        for o in await asyncio.gather(*(ask(source.score, t, task, c) for t, c in made))
    ]


def judged(case: RewardCase, stub: JudgeStub, *answers: str | float) -> list[Outcome]:
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
