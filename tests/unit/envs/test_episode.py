"""The episode loop: end reasons in their order, token bookkeeping, limits, deadlines and whose
fault a failure is.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayloop.chat.rendering import Renderer
from rayloop.cluster.supervision.attempts import _item
from rayloop.config.model import ModelSettings
from rayloop.core.failures import (
    DataFailure,
    EnvironmentFailed,
    EnvironmentHung,
    InfrastructureFailure,
    OverLongPrompt,
    PolicyFailure,
    ToolDeadline,
)
from rayloop.core.groups import Member, Scored, Unscored
from rayloop.core.protocols import Observation, ScoreContext, StepResult, ToolResult
from rayloop.core.threads import hanging
from rayloop.core.types import (
    EndReason,
    FinishReason,
    ImageSource,
    Message,
    RolloutRequest,
    Sampling,
    Task,
    TokenIds,
    Trajectory,
    TrajectoryId,
    Version,
)
from rayloop.envs.episode import run_episode, summarize
from rayloop.envs.history.policies import FULL, EpisodeHistory
from rayloop.envs.image_tools import ImageTools
from rayloop.envs.instance import InThread
from rayloop.envs.scripted import ScriptedTool
from rayloop.envs.settings import EpisodeSettings
from rayloop.envs.single_turn import SingleTurn
from rayloop.envs.tools import _Checked
from rayloop.rewards.environment_result import EnvironmentResult
from rayloop.run.held_out import AnswerRequest
from tests.support.pictures import picture
from tests.support.scripted_engine import Said, ScriptedEngine

END, STOP, LENGTH = FinishReason.END_TOKEN, FinishReason.STOP_STRING, FinishReason.LENGTH
TASK = Task(
    "t1",
    (Message("user", ("Click the button.", ImageSource(data=picture(56, 56)))),),
    source="page",
)


@pytest.fixture(scope="module")
def renderer(vision_folder: Path) -> Renderer:
    return Renderer(ModelSettings(path=str(vision_folder)), 1_000_000)


def request(task: Task = TASK, **sampling: Any) -> RolloutRequest:
    return RolloutRequest(
        task, TrajectoryId(3, 1), 0, 42, Sampling(**{"max_tokens": 16, **sampling})
    )


def scripted(*steps: dict[str, Any], **settings: Any) -> ScriptedTool:
    return ScriptedTool(ScriptedTool.Settings.model_validate({"steps": list(steps), **settings}))


def run(
    renderer: Renderer,
    environment: Any,
    said: list[Said],
    asked: RolloutRequest | None = None,
    history: EpisodeHistory = FULL,
    **settings: Any,
) -> tuple[Trajectory, ScriptedEngine]:
    """Play with a scripted engine; returns the trajectory and the engine."""
    engine = ScriptedEngine(renderer, said)
    defaults = {"max_turns": 4, "max_tokens": 500, "step_timeout": 5.0}
    chosen = EpisodeSettings.model_validate({**defaults, **settings})
    owned = InThread(type(environment).__name__, lambda: environment)
    episode = run_episode(
        asked or request(), owned, renderer, chosen, engine.generate, history=history
    )
    return asyncio.run(episode), engine


TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "", "parameters": {"type": "object"}},
}


def test_the_rows_own_tools_are_shown_where_the_environment_has_none(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = list[list[Any]]()
    prompt = renderer.prompt
    monkeypatch.setattr(
        renderer,
        "prompt",
        lambda messages, tools=(): (offered.append([*tools]), prompt(messages))[1],
    )
    task = Task("t", (Message("user", ("Weather?",)),), tools=(TOOL,))
    run(renderer, SingleTurn(SingleTurn.Settings()), [("a", END)], request(task))
    run(renderer, SingleTurn(SingleTurn.Settings()), [("a", END)])
    assert offered == [[TOOL], []]


NEXT = {"text": "go on"}


@pytest.mark.parametrize(
    ("steps", "said", "settings", "reason", "sampled"),
    [
        ([], [("done", END)], {}, EndReason.DONE, 1),
        ([NEXT, NEXT], [("a", END)] * 3, {}, EndReason.DONE, 3),
        ([NEXT, {"text": "bye", "done": True}], [("a", END)] * 2, {}, EndReason.DONE, 2),
        ([NEXT] * 9, [("a", END)] * 2, {"max_turns": 2}, EndReason.MAX_TURNS, 2),
        ([NEXT, {"done": True}], [("a", END)] * 2, {"max_turns": 2}, EndReason.DONE, 2),
        ([{"error": "no", "done": True}], [("a", END)], {}, EndReason.ACTION_ERROR, 1),
        ([{"error": "no", "text": "x"}], [("a", END)] * 2, {}, EndReason.DONE, 2),
        (
            [{"error": "no", "text": "x"}],
            [("a", END)],
            {"on_error": "end"},
            EndReason.ACTION_ERROR,
            1,
        ),
        (
            [{"error": "no", "text": "x"}],
            [("a", END)],
            {"on_error": "end", "max_turns": 1},
            EndReason.ACTION_ERROR,
            1,
        ),
        ([{"text": "long " * 200}], [("a", END)], {}, EndReason.OVER_LENGTH, 1),
        ([{"images": [{}, {}]}], [("a", END)], {"max_images": 2}, EndReason.MAX_IMAGES, 1),
        ([{"images": [{}]}], [("a", END)] * 2, {"max_images": 2}, EndReason.DONE, 2),
        (
            [{"images": [{}, {}], "text": "long " * 200}],
            [("a", END)],
            {"max_images": 2},
            EndReason.OVER_LENGTH,
            1,
        ),
        ([{"images": [{"width": 2000, "height": 5}]}], [("a", END)], {}, EndReason.ACTION_ERROR, 1),
    ],
)
def test_end_reasons(
    renderer: Renderer,
    steps: list[Any],
    said: list[Said],
    settings: dict[str, Any],
    reason: EndReason,
    sampled: int,
) -> None:
    trajectory, engine = run(renderer, scripted(*steps, result=0.25), said, **settings)
    assert trajectory.end_reason is reason
    assert len(trajectory.sampled_turns) == sampled == len(engine.requests)
    assert trajectory.turns[-1].sampled
    assert trajectory.env_result == 0.25


@pytest.mark.parametrize(
    ("steps", "settings", "executed"),
    [
        ([], {}, [None]),
        ([NEXT, {"error": "no", "text": "x"}], {}, [True, False, None]),
        ([{"error": "no", "done": True}], {}, [False]),
        ([NEXT] * 2, {"max_turns": 2}, [True, True]),
        ([{"text": "bye", "done": True}], {}, [None]),
    ],
)
def test_a_turn_says_whether_its_action_was_carried_out(
    renderer: Renderer, steps: list[Any], settings: dict[str, Any], executed: list[bool | None]
) -> None:
    trajectory, _ = run(renderer, scripted(*steps), [("a", END)] * len(executed), **settings)
    assert [turn.executed for turn in trajectory.sampled_turns] == executed


def test_a_turn_cut_by_the_episodes_limit_is_over_length(renderer: Renderer) -> None:
    prompt = len(renderer.prompt(TASK.messages).token_ids)
    trajectory, engine = run(renderer, scripted(), [("a b c", LENGTH)], max_tokens=prompt + 10)
    assert trajectory.end_reason is EndReason.OVER_LENGTH
    assert engine.requests[0][1].max_tokens == 10
    assert len(trajectory.flatten().token_ids) == prompt + 10
    assert trajectory.sampling.max_tokens == 16


def test_no_turn_is_asked_for_more_tokens_than_it_may_have(renderer: Renderer) -> None:
    """SGLang refuses a minimum above the maximum."""
    prompt = len(renderer.prompt(TASK.messages).token_ids)
    _, engine = run(
        renderer, scripted(), [("a b c", LENGTH)], request(min_tokens=16), max_tokens=prompt + 10
    )
    assert (engine.requests[0][1].min_tokens, engine.requests[0][1].max_tokens) == (10, 10)


def test_the_answers_of_all_turns_have_a_limit_of_their_own(renderer: Renderer) -> None:
    trajectory, engine = run(
        renderer,
        scripted(NEXT),
        [("a", END), ("b c", LENGTH)],
        request(max_tokens=1000),
        max_response_tokens=40,
    )
    answered = [len(turn.token_ids) for turn in trajectory.turns[1:3]]
    assert [sampling.max_tokens for _, sampling in engine.requests] == [40, 40 - sum(answered)]
    assert trajectory.end_reason is EndReason.OVER_LENGTH
    assert sum(len(turn.token_ids) for turn in trajectory.turns[1:]) == 40
    trajectory, _ = run(renderer, scripted(NEXT), [("a", END)], max_response_tokens=sum(answered))
    assert (trajectory.end_reason, len(trajectory.turns)) == (
        EndReason.OVER_LENGTH,
        2,
    ), "no room for a turn behind the observation"


class Retokenizing(ScriptedEngine):
    """What a server cut at its limit of tokens has fewer of them in the policy's tokenizer."""

    def tokens(self, said: Said, limit: int) -> TokenIds:
        return self._renderer.encode(said[0])[: limit - 1]


@pytest.mark.parametrize("engine", [ScriptedEngine, Retokenizing])
@pytest.mark.parametrize(
    ("limits", "reason", "cut"),
    [
        ({"max_response_tokens": 9}, EndReason.OVER_LENGTH, False),
        ({"max_response_tokens": 16}, EndReason.OVER_LENGTH, False),
        ({"max_response_tokens": 30}, EndReason.DONE, True),
        ({}, EndReason.DONE, True),
    ],
)
def test_only_an_answer_that_more_room_for_a_turn_would_help_counts_as_cut(
    renderer: Renderer,
    engine: type[ScriptedEngine],
    limits: dict[str, int],
    reason: EndReason,
    cut: bool,
) -> None:
    """A turn has 16 tokens; ``eval --retries`` plays what is cut again with twice as many."""
    made, asked = engine(renderer, [("a b c d e f g h", LENGTH)]), request()
    settings = EpisodeSettings.model_validate({"max_tokens": 500, **limits})
    played = asyncio.run(
        run_episode(asked, InThread("T", scripted), renderer, settings, made.generate)
    )
    summary = summarize(played, TASK, 0.0, renderer.image_token)
    item = _item(AnswerRequest("right", TASK, asked.sampling), Member(summary, Scored(0.0)), ())
    assert (played.end_reason, item.cut, summary.cut) == (reason, cut, True)


def test_a_turn_that_ends_exactly_at_the_limit_counts(renderer: Renderer) -> None:
    prompt = len(renderer.prompt(TASK.messages).token_ids)
    answer = len(ScriptedEngine(renderer, []).tokens(("fine", END), 0))
    assert (
        run(renderer, scripted(), [("fine", END)], max_tokens=prompt + answer)[0].end_reason
        is EndReason.DONE
    )
    trajectory, _ = run(renderer, scripted(NEXT), [("fine", END)], max_tokens=prompt + answer)
    assert trajectory.end_reason is EndReason.OVER_LENGTH


def test_a_turn_cut_by_its_own_limit_goes_to_the_environment(renderer: Renderer) -> None:
    trajectory, _ = run(renderer, scripted(NEXT), [("a b", LENGTH), ("c", END)])
    assert trajectory.end_reason is EndReason.DONE
    assert [turn.finish for turn in trajectory.sampled_turns] == [LENGTH, END]


def test_the_next_turn_is_limited_by_the_room_left(renderer: Renderer) -> None:
    prompt = len(renderer.prompt(TASK.messages).token_ids)
    _, engine = run(
        renderer, scripted(NEXT), [("a", END)] * 2, request(max_tokens=1000), max_tokens=prompt + 60
    )
    second = engine.requests[1][0]
    assert [sampling.max_tokens for _, sampling in engine.requests] == [
        60,
        prompt + 60 - len(second.token_ids),
    ]


@pytest.mark.parametrize("finish", [END, STOP, LENGTH])
def test_closing_tokens_are_context_and_sampled_tokens_are_kept(
    renderer: Renderer, finish: FinishReason
) -> None:
    said = [("call it</stop> now", finish), ("x", END)]
    trajectory, engine = run(renderer, scripted(NEXT), said, request(stop=("</stop>",)))
    first = engine.tokens(("call it</stop> now", finish), 16)
    flat = trajectory.flatten()
    start = len(trajectory.turns[0].token_ids)
    end = renderer.end_tokens[0]
    assert tuple(flat.token_ids[start : start + len(first)]) == first
    assert flat.loss_mask[start : start + len(first)].all()
    assert not flat.loss_mask[:start].any()
    observation = trajectory.turns[2].token_ids
    assert (observation[0] == end) == (finish is not END)
    assert not flat.loss_mask[start + len(first) : start + len(first) + len(observation)].any()
    assert (
        list(flat.token_ids).count(end)
        == list(renderer.prompt(TASK.messages).token_ids).count(end) + 3
    )
    assert engine.requests[1][0].token_ids == tuple(
        flat.token_ids[: len(engine.requests[1][0].token_ids)]
    )
    assert trajectory.turns[3].logprobs == (-0.5,) * len(trajectory.turns[3].token_ids)


class Listening(SingleTurn):
    """Keeps the texts it is given."""

    def __init__(self) -> None:
        super().__init__(SingleTurn.Settings())
        self.heard: list[str] = []
        self.closed = 0

    def step(self, text: str) -> StepResult:
        self.heard.append(text)
        return super().step(text)

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        (("go </a> on </b>", STOP), "go </a>"),
        (("go </a> on", END), "go </a> on"),
        (("go </b> on", STOP), "go </b>"),
    ],
)
def test_the_environments_text_is_cut_behind_the_first_stop_string(
    renderer: Renderer, said: Said, heard: str
) -> None:
    environment = Listening()
    run(renderer, environment, [said], request(stop=("</b>", "</a>")))
    assert environment.heard == [heard]
    assert environment.closed == 1


def test_each_turn_has_its_own_seed_and_the_groups_affinity(renderer: Renderer) -> None:
    said = [("a", END)] * 3
    _, engine = run(renderer, scripted(NEXT, NEXT), said)
    _, again = run(renderer, scripted(NEXT, NEXT), said)
    seeds = [prompt.seed for prompt, _ in engine.requests]
    assert len(set(seeds)) == 3
    assert seeds == [prompt.seed for prompt, _ in again.requests]
    assert {prompt.affinity for prompt, _ in engine.requests} == {"3"}
    assert engine.requests[0][1].banned_tokens == renderer.banned_tokens


def test_images_travel_once_and_only_those_that_are_no_files(
    renderer: Renderer, tmp_path: Path
) -> None:
    file = tmp_path / "page.png"
    file.write_bytes(picture(80, 60))
    task = Task("t", (Message("user", ("look", ImageSource(path=str(file)))),))
    picture_step = {"images": [{"width": 40}]}
    trajectory, engine = run(
        renderer, scripted(picture_step, picture_step), [("a", END)] * 3, request(task)
    )
    first, second, third = trajectory.images
    assert (first.path, second.path) == (str(file), None)
    assert second == third
    assert set(trajectory.image_bytes) == {second.sha256}
    assert [image.data for image in engine.requests[0][0].images] == [None]
    assert engine.requests[2][0].images[1].data == trajectory.image_bytes[second.sha256]


def test_a_summary_says_what_the_trajectory_holds(renderer: Renderer) -> None:
    trajectory, _ = run(renderer, scripted({"images": [{"width": 90}]}, NEXT), [("a", END)] * 3)
    summary = summarize(trajectory, TASK, 1.5, renderer.image_token)
    flat = trajectory.flatten()
    assert (summary.length, summary.sampled_tokens) == (
        len(flat.token_ids),
        int(flat.loss_mask.sum()),
    )
    assert (summary.turns, summary.images, summary.observation_images) == (3, 2, 1)
    assert (summary.first_version, summary.last_version) == (Version(0, 1), Version(0, 3))
    assert (summary.source, summary.seconds, summary.images_consistent) == ("page", 1.5, True)
    assert flat.token_ids.tolist().count(renderer.image_token) == sum(
        image.tokens for image in trajectory.images
    )


def test_a_summary_says_whether_a_turn_was_cut(renderer: Renderer) -> None:
    """Also when the episode ends as done: the limit of one turn is none of the episode's."""
    for said, cut in (([("a", END), ("b", LENGTH)], True), ([("a", END), ("b", END)], False)):
        trajectory, _ = run(renderer, scripted(NEXT), said)
        assert trajectory.end_reason is EndReason.DONE
        assert summarize(trajectory, TASK, 0.0, renderer.image_token).cut is cut


def test_equal_screens_with_equal_texts_are_equal_states(renderer: Renderer) -> None:
    small, large, other = ({"text": "look", "images": [{"width": width}]} for width in (56, 84, 56))
    said: list[Said] = [("a", END), ("b b", LENGTH), ("c", STOP), ("d", END), ("e", END)]
    trajectory, _ = run(
        renderer, scripted(small, other, large, {"text": "see", "images": [{}]}), said, max_turns=9
    )
    states = summarize(trajectory, TASK, 0.0, renderer.image_token).states
    assert [len(bytes.fromhex(state)) for state in states] == [8] * 5
    prompt, first, again, resized, words = states
    assert first == again, "also where the turn before was cut, and lacks its end token"
    assert len({prompt, first, resized, words}) == 4
    blue = Message("user", ("Click the button.", ImageSource(data=picture(56, 56, "blue"))))
    tasks = (TASK, TASK, dataclasses.replace(TASK, messages=(blue,)))
    begun = [run(renderer, scripted(), [("z", END)], request(task))[0].states[0] for task in tasks]
    assert begun[0] == begun[1] == prompt != begun[2]


class Paying(Listening):
    """Pays the next of ``rewards`` for each turn."""

    def __init__(self, *rewards: Any) -> None:
        super().__init__()
        self._rewards = iter(rewards)

    def step(self, text: str) -> StepResult:
        return StepResult(
            Observation((Message("user", ("go on",)),)), text == "stop", reward=next(self._rewards)
        )


def test_each_turn_has_its_reward(renderer: Renderer) -> None:
    said: list[Said] = [("a", END), ("b", END), ("stop", END)]
    trajectory, _ = run(renderer, Paying(0.5, np.float32(-2), np.bool_(True)), said)
    summary = summarize(trajectory, TASK, 0.0, renderer.image_token)
    assert summary.turn_rewards == (0.5, -2.0, 1.0)
    assert [type(reward) for reward in summary.turn_rewards] == [float] * 3
    assert [turn.executed for turn in trajectory.sampled_turns] == [True, True, None]
    unanswered, _ = run(
        renderer, Paying(0.5), [("a", END), ("b b", LENGTH)], max_response_tokens=30
    )
    assert unanswered.end_reason is EndReason.OVER_LENGTH
    assert [turn.reward for turn in unanswered.sampled_turns] == [0.5, 0.0]


@pytest.mark.parametrize("reward", [math.nan, -math.inf, "1", None])
def test_a_reward_that_is_no_finite_number_is_the_environments_failure(
    renderer: Renderer, reward: Any
) -> None:
    said = (
        f"Paying.step of task t1 returned StepResult with reward {reward!r}, which must be a finite"
        " number"
    )
    with pytest.raises(EnvironmentFailed, match=re.escape(said)) as failure:
        run(renderer, Paying(0.5, reward), [("a", END)] * 2)
    assert failure.value.bug


def test_a_sampled_image_token_makes_the_summary_inconsistent(renderer: Renderer) -> None:
    trajectory, _ = run(renderer, scripted(), [("a", END)])
    turn = trajectory.turns[1]
    forged = type(turn)(
        "assistant", (renderer.image_token or 0,), logprobs=(-1.0,), version=Version(0, 1)
    )
    broken = Trajectory(
        trajectory.id,
        0,
        "t1",
        0,
        (trajectory.turns[0], forged),
        trajectory.sampling,
        trajectory.end_reason,
    )
    assert not summarize(broken, TASK, 0.0, renderer.image_token).images_consistent


def test_an_over_long_prompt_is_excluded_with_its_size(renderer: Renderer) -> None:
    tokens = len(renderer.prompt(TASK.messages).token_ids)
    with pytest.raises(OverLongPrompt) as failure:
        run(renderer, scripted(), [], max_prompt_tokens=tokens - 1)
    assert (failure.value.tokens, failure.value.limit) == (tokens, tokens - 1)
    run(renderer, scripted(), [("a", END)], max_prompt_tokens=tokens)


def test_more_images_in_the_prompt_than_allowed_blame_the_data(renderer: Renderer) -> None:
    with pytest.raises(DataFailure, match="max_images is 0"):
        run(renderer, scripted(), [], max_images=0)


class Misbehaving(Listening):
    """Calls ``fault`` in one of its methods."""

    def __init__(self, where: str, fault: Any) -> None:
        super().__init__()
        self._where, self._fault = where, fault

    def _act(self, where: str) -> Any:
        return self._fault() if where == self._where else None

    def reset(self, task: Task) -> Observation:
        self._act("reset")
        return super().reset(task)

    def step(self, text: str) -> StepResult:
        return self._act("step") or super().step(text)

    def evaluate(self) -> float | None:
        return self._act("evaluate")  # type: ignore[no-any-return]


def raises(error: BaseException) -> Any:
    def fault() -> None:
        raise error

    return fault


@pytest.mark.parametrize("where", ["reset", "step", "evaluate"])
@pytest.mark.parametrize(
    "error", [ValueError("boom"), StopIteration("boom"), SystemExit("boom"), TimeoutError("boom")]
)
def test_an_exception_of_the_environment_is_no_reward(
    renderer: Renderer, where: str, error: BaseException
) -> None:
    environment = Misbehaving(where, raises(error))
    with pytest.raises(
        InfrastructureFailure, match=f"Misbehaving.{where} of task t1 .*boom"
    ) as failure:
        run(renderer, environment, [("a", END)])
    assert not isinstance(failure.value, EnvironmentHung)
    assert environment.closed == 1


def test_an_environment_may_blame_the_data(renderer: Renderer) -> None:
    with pytest.raises(DataFailure, match=r"page\.html"):
        run(renderer, Misbehaving("reset", raises(DataFailure("page.html", "missing"))), [])


@pytest.mark.parametrize("where", ["reset", "step", "evaluate"])
def test_a_hung_environment_is_given_up_at_its_deadline(renderer: Renderer, where: str) -> None:
    release = threading.Event()
    environment = Misbehaving(where, release.wait)
    began = time.monotonic()
    try:
        with pytest.raises(
            EnvironmentHung, match=f"{where} of task t1 gave no answer within 0.1 seconds"
        ):
            run(renderer, environment, [("a", END)], step_timeout=0.1)
        assert time.monotonic() - began < 10
        assert environment.closed == 0, "it belongs to the thread that hangs"
    finally:
        release.set()
    while hanging():
        time.sleep(0.01)
    assert environment.closed == 1


def test_a_tool_that_the_action_hung_ends_the_episode_unevaluated(renderer: Renderer) -> None:
    environment = Misbehaving(
        "step", raises(ToolDeadline("the tool loop gave no answer within 30 seconds"))
    )
    trajectory, _ = run(renderer, environment, [("a", END)])
    assert trajectory.end_reason is EndReason.TOOL_DEADLINE
    assert trajectory.env_result is None
    assert [turn.sampled for turn in trajectory.turns] == [False, True]
    assert environment.closed == 1


def test_only_a_step_can_blame_the_action(renderer: Renderer) -> None:
    with pytest.raises(EnvironmentFailed, match="reset of task t1 raised ToolDeadline"):
        run(renderer, Misbehaving("reset", raises(ToolDeadline("slow"))), [])


@pytest.mark.parametrize(
    ("where", "returned", "message"),
    [
        ("reset", ("a",), "Listening.reset must return Observation, not tuple"),
        (
            "reset",
            Observation(("higher",)),
            "Listening.reset must give Observation a tuple of Message, not str",
        ),  # type: ignore[arg-type]
        ("step", None, "Listening.step must return StepResult, not NoneType"),
        (
            "step",
            StepResult("higher"),
            "Listening.step must return StepResult with observation Observation or None, not str",
        ),  # type: ignore[arg-type]
        ("evaluate", "0.5", "Listening.evaluate must return a number or None, not str"),
    ],
)
def test_what_an_environment_must_return_is_said(
    renderer: Renderer, where: str, returned: Any, message: str
) -> None:
    environment = Listening()
    setattr(environment, where, lambda *_: returned)
    with pytest.raises(EnvironmentFailed, match=re.escape(message)) as failure:
        run(renderer, environment, [("a", END)])
    assert failure.value.bug


@pytest.mark.parametrize(
    ("error", "bug"), [(TypeError("x"), True), (OSError(28, "No space left on device"), False)]
)
def test_a_bug_is_distinguished_from_what_depends_on_the_machine(
    renderer: Renderer, error: Exception, bug: bool
) -> None:
    with pytest.raises(EnvironmentFailed) as failure:
        run(renderer, Misbehaving("step", raises(error)), [("a", END)])
    assert failure.value.bug is bug


def test_a_tool_runs_under_a_deadline_of_its_own() -> None:
    tools = ImageTools(ImageTools.Settings(tool_timeout=0.1))
    tools.reset(TASK)
    release, seen = threading.Event(), []

    class Loop:
        name, description = "loop", "waits"
        parameters: dict[str, Any] = {"properties": {"timeout": {}, "function": {}}}

        def __call__(self, **arguments: Any) -> ToolResult:
            seen.append(arguments)
            release.wait(10)
            return ToolResult()

    tools._tools = {"loop": _Checked(Loop())}
    try:
        with pytest.raises(ToolDeadline, match=r"the tool loop gave no answer within 0\.1 seconds"):
            tools.step(
                '<tool_call>{"name": "loop", "arguments": {"timeout": 1, "function":'
                " 2}}</tool_call>"
            )
        assert hanging() >= 1
    finally:
        release.set()
    assert seen == [{"timeout": 1, "function": 2}]


def test_the_environments_own_result_can_be_the_reward() -> None:
    source = EnvironmentResult()
    played = Trajectory(TrajectoryId(0, 0), 0, "t1", 0, (), Sampling(), EndReason.DONE, 0.75)
    assert source.score(played, TASK, ScoreContext(0, [])) == Scored(0.75)
    unscored = source.score(dataclasses.replace(played, env_result=None), TASK, ScoreContext(0, []))
    assert isinstance(unscored, Unscored)


def test_a_broken_image_from_the_environment_is_its_fault(renderer: Renderer) -> None:
    broken = Observation((Message("user", (ImageSource(data=b"garbage"),)),))
    with pytest.raises(InfrastructureFailure, match="broken image"):
        run(renderer, Misbehaving("step", lambda: StepResult(broken)), [("a", END)])


def test_a_cancelled_episode_closes_its_environment(renderer: Renderer) -> None:
    environment = Listening()
    owned = InThread("Listening", lambda: environment)

    async def never(*_: Any) -> Any:
        await asyncio.sleep(60)

    async def cancel() -> None:
        task = asyncio.create_task(
            run_episode(request(), owned, renderer, EpisodeSettings(), never)
        )
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()

    asyncio.run(cancel())
    assert environment.closed == 1


CROP = '<tool_call>{"name": "crop", "arguments": {"box": [0.0, 0.0, 1.0, 0.5]}}</tool_call>'


def tools() -> ImageTools:
    return ImageTools(ImageTools.Settings(min_side=14))


def test_a_crop_returns_an_image_of_its_own_size(renderer: Renderer) -> None:
    trajectory, _ = run(
        renderer, tools(), [(CROP, STOP), ("done", END)], request(stop=("</tool_call>",))
    )
    assert trajectory.end_reason is EndReason.DONE
    assert [(image.width, image.height, image.grid) for image in trajectory.images] == [
        (56, 56, (1, 4, 4)),
        (56, 28, (1, 2, 4)),
    ]
    assert trajectory.turns[2].role == "tool"


def on_disk(folder: Path) -> Task:
    (folder / "page.png").write_bytes(picture(56, 56))
    return Task(
        "t1", (Message("user", (ImageSource(path=str(folder / "page.png")), "Click the button.")),)
    )


def test_a_tool_reads_no_file_under_the_deadline_that_is_the_policys(tmp_path: Path) -> None:
    """A mount that hangs while the crop runs would earn the failing value."""
    made = ImageTools(ImageTools.Settings(min_side=14, tool_timeout=0.5))
    made.reset(on_disk(tmp_path))
    (tmp_path / "page.png").unlink()
    os.mkfifo(tmp_path / "page.png")
    step = made.step(CROP)
    assert step.observation is not None
    assert step.error is None


def test_a_missing_image_is_found_at_the_reset(tmp_path: Path) -> None:
    task = on_disk(tmp_path)
    (tmp_path / "page.png").unlink()
    with pytest.raises(DataFailure, match=r"page\.png: cannot be read: No such file"):
        tools().reset(task)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        ("{not json}", "not valid JSON"),
        ("[1]", "must look like"),
        ('{"name": "crop", "arguments": [1]}', "must be an object"),
        ('{"name": "zoom", "arguments": {}}', "unknown tool 'zoom'"),
        ('{"name": "crop", "arguments": {}}', "needs the argument 'box'"),
        ('{"name": "crop", "arguments": {"box": "all"}}', "must be of type array"),
        ('{"name": "crop", "arguments": {"box": [1]}}', "box must be"),
        ('{"name": "crop", "arguments": {"box": [0, 1, 1, 0]}}', "must have x1 < x2"),
        ('{"name": "crop", "arguments": {"box": [0, 0, 1, NaN]}}', "box must be"),
        ('{"name": "crop", "arguments": {"box": [0, 0, 0.1, 0.1]}}', "covers 6x6 pixels"),
        ('{"name": "crop", "arguments": {"box": [0, 0, 1, 1], "image": 1}}', "no image 1"),
    ],
)
def test_a_call_that_cannot_be_carried_out_is_answered(
    renderer: Renderer, call: str, complaint: str
) -> None:
    text = f"<tool_call>{call}</tool_call>"
    trajectory, _ = run(
        renderer, tools(), [(text, STOP), ("done", END)], request(stop=("</tool_call>",))
    )
    assert complaint in renderer.decode(trajectory.turns[2].token_ids)
    ended, _ = run(
        renderer, tools(), [(text, STOP)], request(stop=("</tool_call>",)), on_error="end"
    )
    assert ended.end_reason is EndReason.ACTION_ERROR


# What the policy broke ----------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["step", "evaluate"])
def test_what_the_policy_broke_ends_the_episode_without_a_result(
    renderer: Renderer, where: str
) -> None:
    trajectory, _ = run(
        renderer, Misbehaving(where, raises(PolicyFailure("an illegal move"))), [("a", END)] * 9
    )
    assert (trajectory.end_reason, trajectory.env_result) == (EndReason.POLICY_FAILURE, None)


class Shows(Misbehaving):
    """Answers each turn with the same observation."""

    def __init__(self, *parts: str | ImageSource) -> None:
        super().__init__("nowhere", None)
        self.parts = parts

    def step(self, text: str) -> StepResult:
        return StepResult(Observation((Message("user", self.parts),)))


def test_an_observation_that_takes_too_long_is_the_policys(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    def late(*_: Any) -> Any:
        release.wait(10)

    monkeypatch.setattr(renderer, "observation", late)
    try:
        trajectory, _ = run(renderer, Shows("x"), [("a", END)], step_timeout=0.3)
    finally:
        release.set()
    assert (trajectory.end_reason, trajectory.env_result) == (EndReason.TOOL_DEADLINE, None)


def test_too_many_and_too_large_observations_are_not_rendered(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any) -> Any:
        raise AssertionError("it was rendered")

    monkeypatch.setattr(renderer, "observation", refuses)
    many, _ = run(
        renderer, Shows(*[ImageSource(data=picture(56, 56))] * 3), [("a", END)], max_images=2
    )
    assert many.end_reason is EndReason.MAX_IMAGES
    long, _ = run(renderer, Shows("x" * 1_000_000), [("a", END)])
    assert long.end_reason is EndReason.OVER_LENGTH


def test_pictures_for_a_model_of_texts_are_words(text_folder: Path) -> None:
    asked = request(Task("t1", (Message("user", ("Click.",)),)))
    of = Renderer(ModelSettings(path=str(text_folder)))
    trajectory, _ = run(
        of, Shows("look", ImageSource(data=picture(56, 56))), [("a", END)] * 2, asked, max_turns=2
    )
    assert trajectory.end_reason is EndReason.MAX_TURNS
    assert "look(image: cannot be shown)" in of.decode(trajectory.turns[2].token_ids)
