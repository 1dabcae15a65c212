"""The reward actor, called directly: what counts as a reward, and whose fault a failing grader is."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import threading
import time
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from rayloop.actors.reward import RewardActor
from rayloop.chat.tokenizer import load_tokenizer
from rayloop.config.model import ModelSettings
from rayloop.config.settings import Component, SettingsModel
from rayloop.core.failures import DataFailure, InfrastructureFailure, WorkerSpent
from rayloop.core.groups import Outcome, Scored, Unscored, UnscoredKind
from rayloop.core.protocols import ScoreContext
from rayloop.core.threads import hanging
from rayloop.core.types import EndReason, Sampling, Task, Trajectory, TrajectoryId, Turn
from rayloop.rewards.functions import as_outcome
from rayloop.rewards.settings import RewardSettings

TASK = Task("t1", (), ground_truth=3)


class Grader:
    """Answers with what ``answers`` yields next: a value to return or an exception to raise."""

    class Settings(SettingsModel):
        """Nothing to set."""

    answers: list[Any]
    asked: list[ScoreContext]
    seconds = 0.0

    def __init__(self, settings: Grader.Settings) -> None:
        del settings

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        answers = Grader.answers  # of this test: a thread that another one gave up may still sleep
        Grader.asked.append(context)
        time.sleep(Grader.seconds)
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer  # type: ignore[no-any-return]


class Client(Grader):
    """A source whose exceptions are those of what it asks."""

    infrastructure = True


class AsyncGrader(Grader):
    async def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:  # type: ignore[override]
        await asyncio.sleep(Grader.seconds)
        return super().score(trajectory, task, context)


@pytest.fixture(params=["Grader", "AsyncGrader"])
def grader(request: pytest.FixtureRequest) -> str:
    return f"{__name__}:{request.param}"


def trajectory(
    folder: Path, end: EndReason = EndReason.DONE, text: str = "The answer is 3"
) -> Trajectory:
    ids = tuple(load_tokenizer(folder).encode(f"{text}<|im_end|>").ids)
    turns = (Turn("prompt", (20, 21)), Turn("assistant", ids, logprobs=(-1.0,) * len(ids)))
    return Trajectory(TrajectoryId(0, 0), 0, "t1", 0, turns, Sampling(), end)


def score(
    folder: Path, use: str, answers: list[Any], seconds: float = 0.0, **settings: Any
) -> Outcome:
    Grader.answers, Grader.asked, Grader.seconds = list(answers), [], 0.0
    actor = RewardActor(
        ModelSettings(path=str(folder)), RewardSettings(source=Component(use=use), **settings)
    )
    Grader.seconds = seconds
    [outcome] = asyncio.run(actor.score(TASK, 5, trajectory(folder)))
    Grader.seconds = 0.0
    assert actor.health() == 0
    return outcome


def test_a_source_sees_the_step_and_the_decoded_turns(text_folder: Path, grader: str) -> None:
    assert score(text_folder, grader, [Scored(0.5, {"a": 1.0}, ("late",))]) == Scored(
        0.5, {"a": 1.0}, ("late",)
    )
    assert Grader.asked == [ScoreContext(5, ["The answer is 3"])]


@pytest.mark.parametrize(
    ("returned", "value"),
    [
        (1, 1.0),
        (0.25, 0.25),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (Fraction(1, 4), 0.25),
        (True, 1.0),
        (False, 0.0),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        (Decimal("0.5"), 0.5),
        (Scored(True), 1.0),
    ],
)
def test_a_number_is_a_reward(returned: Any, value: float) -> None:
    outcome = as_outcome(returned)
    assert outcome == Scored(value)
    assert isinstance(outcome, Scored)
    assert type(outcome.value) is float


@pytest.mark.parametrize(
    "returned",
    [
        math.nan,
        math.inf,
        -math.inf,
        None,
        "1.0",
        b"1",
        [1.0],
        {"score": 1},
        1j,
        10**400,
        np.array([1.0]),
        np.array(math.nan),
        Scored(math.nan),
        Scored(None),
        Scored("1"),
    ],
)
def test_anything_else_is_no_reward(returned: Any) -> None:
    outcome = as_outcome(returned)
    assert isinstance(outcome, Unscored)
    assert outcome.kind is UnscoredKind.INVALID_REWARD
    assert repr(getattr(returned, "value", returned))[:100] in outcome.reason


def test_components_that_are_no_numbers_are_dropped_and_flagged() -> None:
    outcome = as_outcome(
        Scored(1.0, {"good": 1, "nan": math.nan, "none": None, "text": "x"}, ("seen",))
    )  # type: ignore[dict-item]
    assert outcome == Scored(1.0, {"good": 1.0}, ("seen", "invalid_component"))


class Reader:
    """A source that reads what the policy was shown, too."""

    transcript = True
    read: ClassVar[list[str | None]] = []

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Scored:
        self.read.append(context.transcript)
        return Scored(0.0)


def test_a_source_that_asks_for_it_sees_all_that_followed_the_prompt(text_folder: Path) -> None:
    said = trajectory(text_folder)
    shown = Turn(
        "tool", tuple(load_tokenizer(text_folder).encode("<|im_start|>It is 4<|im_end|>").ids)
    )
    played = replace(said, turns=(*said.turns, shown, said.turns[-1]))
    actor = RewardActor(
        ModelSettings(path=str(text_folder)),
        RewardSettings(source=Component(use=f"{__name__}:Reader")),
    )
    asyncio.run(actor.score(TASK, 5, played))
    turn = "The answer is 3<|im_end|>"
    assert Reader.read == [f"{turn}<|im_start|>It is 4<|im_end|>{turn}"]


def test_unscored_passes_through(text_folder: Path, grader: str) -> None:
    unscored = Unscored(UnscoredKind.REWARD_UNAVAILABLE, "judge is down")
    assert score(text_folder, grader, [unscored]) == unscored


def popping(solution_str: str, extra_info: dict[str, Any]) -> float:
    """A function of verl's form that changes the row it is given."""
    return float(extra_info.pop("level") == "easy" and extra_info["tags"].pop() == "a")


def test_a_grader_that_changes_its_row_does_not_change_the_next_calls_row(
    text_folder: Path,
) -> None:
    actor = RewardActor(
        ModelSettings(path=str(text_folder)),
        RewardSettings(source=Component(use=f"{__name__}:popping")),
    )
    task = Task("t1", (), extra={"level": "easy", "tags": ["a"]})
    assert asyncio.run(actor.score(task, 5, *[trajectory(text_folder)] * 2)) == [Scored(1.0)] * 2


def test_a_crash_that_repeats_is_no_reward(text_folder: Path, grader: str) -> None:
    outcome = score(text_folder, grader, [KeyError("answer"), KeyError("answer")])
    assert outcome == Unscored(UnscoredKind.GRADER_ERROR, f"{grader}: KeyError: 'answer'")
    assert "in score" in outcome.trace
    assert outcome.trace.endswith("KeyError: 'answer'")


def by_length(solution_str: str) -> float:
    """Raises on an answer that is short, hangs on one that is long."""
    if len(solution_str) < 4:
        raise KeyError("short")
    time.sleep(0.0 if len(solution_str) < 40 else 1.0)
    return float(len(solution_str))


def test_trajectories_scored_in_one_call_have_outcomes_of_their_own(text_folder: Path) -> None:
    source = Component(use=f"{__name__}:by_length")
    actor = RewardActor(
        ModelSettings(path=str(text_folder)), RewardSettings(source=source, timeout=0.3)
    )
    texts = ("The answer is 3", "3", "The answer is 3. " * 4, "The answer")
    answers = [trajectory(text_folder, text=text) for text in texts]
    first, raised, hung, last = asyncio.run(actor.score(TASK, 0, *answers))
    assert (first, last) == (Scored(15.0), Scored(10.0))
    assert isinstance(raised, Unscored)
    assert isinstance(hung, Unscored)
    assert (raised.kind, hung.kind) == (UnscoredKind.GRADER_ERROR, UnscoredKind.TIMEOUT)


def test_a_crash_that_repeats_is_the_failing_value_when_that_was_asked_for(
    text_folder: Path, grader: str
) -> None:
    crashes = [ZeroDivisionError("x"), ZeroDivisionError("x")]
    outcome = score(text_folder, grader, crashes, on_error=-1.0)
    assert outcome == Scored(-1.0, {}, ("grader_error",))
    assert outcome.trace.endswith("ZeroDivisionError: x")


@pytest.mark.parametrize("on_error", ["exclude", 0.0])
def test_a_source_may_declare_its_exceptions_infrastructure(
    text_folder: Path, on_error: Any
) -> None:
    crashes = [RecursionError("deep"), RecursionError("deep")]
    outcome = score(text_folder, f"{__name__}:Client", crashes, on_error=on_error)
    assert outcome == Unscored(
        UnscoredKind.REWARD_UNAVAILABLE, f"{__name__}:Client: RecursionError: deep"
    )


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(3)], ids=repr)
def test_a_source_that_cancels_or_exits_does_not_end_the_actor(
    text_folder: Path, grader: str, error: BaseException
) -> None:
    outcome = score(text_folder, grader, [error, error])
    assert isinstance(outcome, Unscored)
    assert outcome.kind in (UnscoredKind.GRADER_ERROR, UnscoredKind.REWARD_UNAVAILABLE)
    assert score(text_folder, grader, [error, 0.5]) == Scored(0.5)


def test_a_tool_that_the_action_hung_is_the_failing_value_without_asking(text_folder: Path) -> None:
    Grader.answers, Grader.asked, Grader.seconds = [], [], 0.0
    settings = RewardSettings(source=Component(use=f"{__name__}:Grader"), on_error=-0.5)
    actor = RewardActor(ModelSettings(path=str(text_folder)), settings)
    hung = trajectory(text_folder, EndReason.TOOL_DEADLINE)
    assert asyncio.run(actor.score(TASK, 0, hung)) == [Scored(-0.5, {}, ("tool_deadline",))]
    assert Grader.asked == []


def test_a_crash_that_does_not_repeat_is_forgotten(text_folder: Path, grader: str) -> None:
    assert score(text_folder, grader, [ZeroDivisionError("x"), 0.75]) == Scored(0.75)


@pytest.mark.parametrize(
    "errors",
    [
        [ConnectionError("refused")] * 2,
        [TimeoutError("judge")] * 2,
        [InfrastructureFailure("judge")] * 2,
        [MemoryError("full")] * 2,
        [ValueError("x"), KeyError("y")],
    ],
    ids=repr,
)
def test_a_failure_around_the_grader_is_no_reward(
    text_folder: Path, grader: str, errors: list[Exception]
) -> None:
    outcome = score(text_folder, grader, errors)
    assert isinstance(outcome, Unscored)
    assert outcome.kind is UnscoredKind.REWARD_UNAVAILABLE
    assert str(errors[1]) in outcome.reason


def test_a_grader_may_blame_the_data(text_folder: Path, grader: str) -> None:
    outcome = score(text_folder, grader, [DataFailure("rows.jsonl:3", "no truth")])
    assert outcome == Unscored(UnscoredKind.BAD_DATA, "rows.jsonl:3: no truth")


def test_a_grader_that_takes_too_long_leaves_it_unscored(text_folder: Path, grader: str) -> None:
    began = time.monotonic()
    outcome = score(text_folder, grader, [1.0], seconds=5.0, timeout=0.1)
    assert isinstance(outcome, Unscored)
    assert outcome.kind is UnscoredKind.TIMEOUT
    assert time.monotonic() - began < 4.5


def test_a_hang_that_repeats_is_the_failing_value_when_that_was_asked_for(
    text_folder: Path, grader: str
) -> None:
    outcome = score(text_folder, grader, [1.0, 1.0], seconds=0.5, timeout=0.1, on_error=0.0)
    assert outcome == Scored(0.0, {}, ("grader_timeout",))
    assert len(Grader.asked) == 2 or grader.endswith("AsyncGrader")


def test_a_hang_of_a_client_is_never_a_reward(text_folder: Path) -> None:
    outcome = score(
        text_folder, f"{__name__}:Client", [1.0, 1.0], seconds=0.5, timeout=0.1, on_error=0.0
    )
    assert isinstance(outcome, Unscored)
    assert outcome.kind is UnscoredKind.TIMEOUT


def test_an_actor_with_too_many_hung_calls_asks_to_be_replaced(
    text_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayloop.core.threads.MAX_HUNG_CALLS", 2)
    while hanging():  # of the tests before
        time.sleep(0.05)
    Grader.answers, Grader.asked, Grader.seconds = [1.0] * 3, [], 1.0
    settings = RewardSettings(source=Component(use=f"{__name__}:Grader"), timeout=0.1)
    actor = RewardActor(ModelSettings(path=str(text_folder)), settings)
    for _ in range(2):
        assert isinstance(asyncio.run(actor.score(TASK, 0, trajectory(text_folder)))[0], Unscored)
    with pytest.raises(WorkerSpent, match="2 calls of the grader hang"):
        asyncio.run(actor.score(TASK, 0, trajectory(text_folder)))
    Grader.seconds = 0.0


def test_blocking_graders_do_not_wait_for_each_other(text_folder: Path) -> None:
    Grader.answers, Grader.asked, Grader.seconds = [1.0] * 16, [], 1.0
    settings = RewardSettings(source=Component(use=f"{__name__}:Grader"))
    actor = RewardActor(ModelSettings(path=str(text_folder)), settings)
    began, before = time.monotonic(), threading.active_count()
    assert asyncio.run(actor.score(TASK, 0, *[trajectory(text_folder)] * 8)) == [Scored(1.0)] * 8
    Grader.seconds = 0.0
    assert time.monotonic() - began < 6.0, "one after the other they take 8 s"
    assert threading.active_count() - before < 50


def test_the_actors_of_environment_and_reward_do_not_import_torch() -> None:
    code = "import sys, rayloop.actors.environment, rayloop.actors.reward\n"
    code += "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_names_that_are_no_texts_become_texts() -> None:
    """A checkpoint is plain data: it has room for texts only."""
    outcome = as_outcome(Scored(1.0, {7: 1.0}, (8,)))  # type: ignore[dict-item, arg-type]
    assert outcome == Scored(1.0, {"7": 1.0}, ("8",))
