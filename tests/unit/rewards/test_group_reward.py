"""Rewards that are given the answers of a group together: what they see, and whose fault a failing
grader is.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rayloop.actors.reward import RewardActor
from rayloop.chat.tokenizer import load_tokenizer
from rayloop.config.model import ModelSettings
from rayloop.config.settings import Component, SettingsModel, check_components, load
from rayloop.core.failures import ConfigError, DataFailure, RewardLost
from rayloop.core.groups import Outcome, Scored, Unscored, UnscoredKind
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import EndReason, Sampling, Task, Trajectory, TrajectoryId, Turn
from rayloop.rewards.settings import RewardSettings

TASK = Task("t1", (), ground_truth="3", extra={"level": "easy"})


class Ranking:
    """The place of an answer's length among the group's, or what ``answers`` holds next."""

    class Settings(SettingsModel):
        """Nothing to set."""

    answers: list[Any]
    asked: list[tuple[list[int], list[str]]]

    def __init__(self, settings: Ranking.Settings) -> None:
        del settings

    def score_group(
        self, trajectories: list[Trajectory], task: Task, contexts: list[ScoreContext]
    ) -> Any:
        Ranking.asked.append(([t.id.sample for t in trajectories], [c.texts[-1] for c in contexts]))
        if Ranking.answers:
            answer = Ranking.answers.pop(0)
            if isinstance(answer, BaseException):
                raise answer
            return answer
        lengths = [len(context.texts[-1]) for context in contexts]
        trajectories.clear()  # a grader may do what it likes with its lists
        return [float(sorted(lengths).index(length)) for length in lengths]


class LaterRanking(Ranking):
    async def score_group(self, *args: Any) -> Any:
        await asyncio.sleep(0)
        return super().score_group(*args)


class Both(Ranking):
    """Scores an answer that is alone by itself."""

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        return Scored(0.5, {"alone": 1.0})


class Client(Ranking):
    infrastructure = (ConnectionError, ZeroDivisionError)


def longest(trajectories: Sequence[Trajectory], contexts: Sequence[ScoreContext]) -> list[bool]:
    texts = [context.texts[-1] for context in contexts]
    return [len(text) == max(map(len, texts)) for text in texts]


def share(
    prompts: Any, completions: Any, level: Any, log_metric: Any, **columns: Any
) -> list[float | None]:
    """TRL's form: sees all completions of a group."""
    assert len(prompts) == len(completions) == len(level) == len(columns["completion_ids"])
    log_metric("size", len(completions))
    texts = [completion[-1]["content"] for completion in completions]
    return [texts.count(text) / len(texts) if text != "none" else None for text in texts]


def too_few(completions: Any, **columns: Any) -> list[float]:
    return [1.0]


def verl(solution_str: str, ground_truth: str) -> float:
    return 1.0


def trajectory(folder: Path, sample: int, text: str, end: EndReason = EndReason.DONE) -> Trajectory:
    ids = tuple(load_tokenizer(folder).encode(text).ids)
    turns = (Turn("prompt", (20, 21)), Turn("assistant", ids, logprobs=(-1.0,) * len(ids)))
    return Trajectory(TrajectoryId(0, sample), 0, "t1", 0, turns, Sampling(), end)


def judge(
    folder: Path, use: str, texts: Sequence[str], answers: Sequence[Any] = (), **settings: Any
) -> list[Outcome]:
    Ranking.answers, Ranking.asked = list(answers), []
    source = Component(use=f"{__name__}:{use}")
    actor = RewardActor(
        ModelSettings(path=str(folder)), RewardSettings(source=source, per="group", **settings)
    )
    trajectories = [trajectory(folder, i, text) for i, text in enumerate(texts)]
    outcomes = asyncio.run(actor.score_together(trajectories, TASK, 5))
    assert actor.health() == 0
    return outcomes


TEXTS = ("The answer is 3", "The", "answer is")
kinds = pytest.mark.parametrize("use", ["Ranking", "LaterRanking"])


@kinds
def test_a_group_is_asked_about_once_and_each_gets_its_outcome(text_folder: Path, use: str) -> None:
    assert judge(text_folder, use, TEXTS) == [Scored(2.0), Scored(0.0), Scored(1.0)]
    assert Ranking.asked == [([0, 1, 2], list(TEXTS))]


@kinds
def test_each_outcome_is_looked_at_by_itself(text_folder: Path, use: str) -> None:
    given = [math.nan, Scored(0.5, {"a": 1.0}), Unscored(UnscoredKind.NOT_APPLICABLE, "no")]
    first, *others = judge(text_folder, use, TEXTS, [given])
    assert isinstance(first, Unscored)
    assert first.kind is UnscoredKind.INVALID_REWARD
    assert others == given[1:]


@kinds
@pytest.mark.parametrize(
    "given", [[1.0, 2.0], [1.0] * 4, 1.0, None, {"a": 1.0}, "abc", iter([1.0] * 3), {1.0, 2.0, 3.0}]
)
def test_another_number_of_outcomes_is_the_graders_error(
    text_folder: Path, use: str, given: Any
) -> None:
    outcomes = judge(text_folder, use, TEXTS, [given, given])
    assert [type(o) for o in outcomes] == [Unscored] * 3
    assert {o.kind for o in outcomes if isinstance(o, Unscored)} == {UnscoredKind.GRADER_ERROR}
    assert len(Ranking.asked) == 2, "it is asked once more"
    assert (
        judge(text_folder, use, TEXTS, [given, given], on_error=0.0)
        == [Scored(0.0, {}, ("grader_error",))] * 3
    )


@kinds
def test_what_it_raises_concerns_all_of_them(text_folder: Path, use: str) -> None:
    [reason] = {o.reason for o in judge(text_folder, use, TEXTS, [KeyError("x"), KeyError("x")])}  # type: ignore[union-attr]
    assert reason == f"{__name__}:{use}: KeyError: 'x'"
    assert judge(text_folder, use, TEXTS, [KeyError("x"), [1, 2, 3]]) == [
        Scored(1.0),
        Scored(2.0),
        Scored(3.0),
    ]
    bad = judge(text_folder, use, TEXTS, [DataFailure("rows.jsonl:3", "no truth")])
    assert bad == [Unscored(UnscoredKind.BAD_DATA, "rows.jsonl:3: no truth")] * 3
    with pytest.raises(RewardLost):
        judge(text_folder, use, TEXTS, [RewardLost("gone")])


@pytest.mark.parametrize("on_error", ["exclude", 0.0])
def test_a_source_may_name_the_exceptions_that_are_infrastructure(
    text_folder: Path, on_error: Any
) -> None:
    for error in (
        ConnectionResetError("x"),
        ZeroDivisionError("x"),
        OSError("x"),
        MemoryError("x"),
    ):
        outcomes = judge(text_folder, "Client", TEXTS, [error, error], on_error=on_error)
        assert {o.kind for o in outcomes if isinstance(o, Unscored)} == {
            UnscoredKind.REWARD_UNAVAILABLE
        }
    own = judge(text_folder, "Client", TEXTS, [KeyError("x")] * 2, on_error=on_error)
    if on_error == 0.0:
        assert own == [Scored(0.0, {}, ("grader_error",))] * 3
    else:
        assert {o.kind for o in own if isinstance(o, Unscored)} == {UnscoredKind.GRADER_ERROR}


def test_one_that_hung_a_tool_is_not_shown(text_folder: Path) -> None:
    Ranking.answers, Ranking.asked = [], []
    source = Component(use=f"{__name__}:Ranking")
    settings = RewardSettings(source=source, per="group", on_error=-1.0)
    actor = RewardActor(ModelSettings(path=str(text_folder)), settings)
    group = [trajectory(text_folder, i, text) for i, text in enumerate(TEXTS)]
    group[1] = dataclasses.replace(group[1], end_reason=EndReason.TOOL_DEADLINE)
    hung = Scored(-1.0, {}, ("tool_deadline",))
    assert asyncio.run(actor.score_together(group, TASK, 5)) == [Scored(1.0), hung, Scored(0.0)]
    assert [samples for samples, _ in Ranking.asked] == [[0, 2]]
    assert asyncio.run(actor.score_together([group[1]], TASK, 5)) == [hung]
    assert len(Ranking.asked) == 1, "nobody is asked about nothing"


def test_an_answer_that_is_alone_is_scored_by_itself_where_the_source_can(
    text_folder: Path,
) -> None:
    assert judge(text_folder, "Both", TEXTS[:1]) == [Scored(0.5, {"alone": 1.0})]
    assert judge(text_folder, "Both", TEXTS[:2]) == [Scored(1.0), Scored(0.0)]
    assert judge(text_folder, "Ranking", TEXTS[:1]) == [Scored(0.0)]


def test_functions_of_a_group(text_folder: Path) -> None:
    assert judge(text_folder, "longest", TEXTS) == [Scored(1.0), Scored(0.0), Scored(0.0)]
    found = judge(text_folder, "share", ["The", "The", "none", "3"])
    assert found[:2] == [Scored(0.5, {"size": 4.0})] * 2
    assert isinstance(found[2], Unscored)
    assert found[2].kind is UnscoredKind.NOT_APPLICABLE
    assert found[3] == Scored(0.25, {"size": 4.0})
    assert judge(text_folder, "share", ["The"]) == [Scored(1.0, {"size": 1.0})]
    wrong = judge(text_folder, "too_few", TEXTS)
    assert {o.kind for o in wrong if isinstance(o, Unscored)} == {UnscoredKind.GRADER_ERROR}
    assert "3 outcomes were expected, one per trajectory, not 1" in str(wrong[0])


class Undeclared(Both):
    infrastructure = "httpx"


@pytest.mark.parametrize(
    ("use", "per", "message"),
    [
        ("Ranking", "trajectory", "has score_group and no score: set reward.per: group"),
        (
            "longest",
            "trajectory",
            "function of all trajectories of a group needs reward.per: group",
        ),
        (
            "verl",
            "group",
            (
                r"a function of \(solution_str, ground_truth\), which is not a reward with per: group."
                r" Write score_group"
            ),
        ),
        (
            "Undeclared",
            "group",
            "infrastructure must be True or a tuple of exception types, not 'httpx'",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_remedy(
    tmp_path: Path, use: str, per: str, message: str
) -> None:
    path = tmp_path / "reward.yaml"
    path.write_text(f"per: {per}\nsource: {{use: '{__name__}:{use}'}}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"(?s)reward\.yaml:2: source: .*{message}"):
        check_components(load(path, [], RewardSettings))
    for other in ("Both", "share"):
        path.write_text(f"per: {per}\nsource: {{use: '{__name__}:{other}'}}\n", encoding="utf-8")
        check_components(load(path, [], RewardSettings))
