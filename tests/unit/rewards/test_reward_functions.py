"""Plain functions as rewards, in the forms that rayloop, TRL and verl document; and components that
are none.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayloop.config.settings import Component, SettingsModel, check_components, dump, load
from rayloop.core.failures import ConfigError
from rayloop.core.groups import Outcome, Scored, Unscored, UnscoredKind
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import (
    EndReason,
    ImageSource,
    Message,
    Sampling,
    Task,
    Trajectory,
    TrajectoryId,
    Turn,
)
from rayloop.data.dataset import ChatRows
from rayloop.rewards.functions import as_outcome, as_source
from rayloop.rewards.settings import REWARD, RewardSettings

TURN = Turn("assistant", (5, 6, 7), logprobs=(-1.0,) * 3)
TRAJECTORY = Trajectory(
    TrajectoryId(1, 0), 0, "t1", 0, (Turn("prompt", (1, 2)), TURN), Sampling(), EndReason.DONE
)
MESSAGES = (
    Message("system", ("Be brief.",)),
    Message("user", (ImageSource(path="a.png"), "How many?")),
)
ROW = {"answer": "3", "solution": "<answer>3</answer>", "level": "easy"}
TASK = Task("t1", MESSAGES, ground_truth="3", source="counting", extra=ROW)
PLAIN = Task(
    "t1", MESSAGES[1:], ground_truth="3", source="counting", extra={**ROW, "prompt": "How many?"}
)


def outcome(function: Any, *texts: str, task: Task = TASK) -> Outcome:
    """What a run makes of the function's result."""
    result: Any = as_source(function, "my:f").score(TRAJECTORY, task, ScoreContext(4, texts))
    if inspect.isawaitable(result):

        async def wait() -> Any:
            return await result

        result = asyncio.run(wait())
    return as_outcome(result)


# rayloop's own ------------------------------------------------------------------------------------


def test_the_own_form_may_take_what_it_needs() -> None:
    assert outcome(
        lambda trajectory, task, context: context.texts[-1] == task.ground_truth, "3"
    ) == Scored(1.0)
    assert outcome(lambda context: len(context.texts), "a", "b") == Scored(2.0)
    assert outcome(lambda trajectory, task, context: Scored(0.5, {"a": 1.0}), "x") == Scored(
        0.5, {"a": 1.0}
    )


def test_options_are_keyword_arguments() -> None:
    source = Component(use=f"{__name__}:with_options", **{"with": {"bonus": 0.25}})
    assert outcome(source.build(), "x") == Scored(0.25)
    with pytest.raises(ConfigError, match=r"does not take the arguments in `with`: .*bonsu"):
        Component(use=f"{__name__}:with_options", **{"with": {"bonsu": 1}}).options()


def with_options(
    trajectory: Trajectory, task: Task, context: ScoreContext, bonus: float = 0.0
) -> float:
    return bonus


# TRL's --------------------------------------------------------------------------------------------


def reward_by_length(completions, **kwargs):  # type: ignore[no-untyped-def]
    """Standard format: a completion is a text."""
    return [float(len(completion)) for completion in completions]


def format_reward_func(completions, **kwargs):  # type: ignore[no-untyped-def]
    """Conversational format: a completion is a list of messages."""
    contents = [completion[0]["content"] for completion in completions]
    return [
        1.0 if re.match(r"^<think>.*?</think><answer>.*?</answer>$", content) else 0.0
        for content in contents
    ]


def accuracy(prompts, completions, completion_ids, answer, trainer_state, **kwargs):  # type: ignore[no-untyped-def]
    assert prompts == [
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "<image>How many?"},
        ]
    ]
    assert completion_ids == [[5, 6, 7]]
    assert trainer_state.global_step == 4
    assert kwargs["level"] == ["easy"]
    return [float(c[-1]["content"] == a) for c, a in zip(completions, answer, strict=True)]


def only_math(prompts, completions, level, **kwargs):  # type: ignore[no-untyped-def]
    return [None if level == "easy" else 1.0 for level in level]


async def slow(prompts, completions, **kwargs):  # type: ignore[no-untyped-def]
    await asyncio.sleep(0)
    return [0.5] * len(prompts)


def logging_metrics(completions, log_extra=None, log_metric=None, **kwargs):  # type: ignore[no-untyped-def]
    log_extra("seen", [c[0]["content"] for c in completions])
    log_metric("exact", 1.0)
    return [True]


def annotated(completions: list[str], solution: list[str]) -> list[float]:
    return [float(text == s) for text, s in zip(completions, solution, strict=True)]


def wants_another_column(completions, difficulty):  # type: ignore[no-untyped-def]
    return [0.0]


def test_trl_gets_messages_or_texts() -> None:
    good = "<think>two and one</think><answer>3</answer>"
    assert outcome(format_reward_func, good) == Scored(1.0)
    assert outcome(format_reward_func, "3") == Scored(0.0)
    assert outcome(reward_by_length, "abc", task=PLAIN) == Scored(3.0)
    assert outcome(annotated, "<answer>3</answer>") == Scored(1.0)


def test_trl_gets_what_the_default_reader_makes_of_a_row(tmp_path: Path) -> None:
    reader = ChatRows(ChatRows.Settings())
    row = {"answer": "3", "level": "easy"}
    text = reader.task({**row, "prompt": "How many?"}, "rows.jsonl:1", tmp_path)
    chat = reader.task(
        {**row, "prompt": [{"role": "user", "content": "How many?"}]}, "rows.jsonl:1", tmp_path
    )
    seen: list[Any] = []

    def reward(prompts, completions, answer, level, **kwargs):  # type: ignore[no-untyped-def]
        seen.append((prompts[0], completions[0], answer, level, kwargs["ground_truth"]))
        return [1.0]

    assert [outcome(reward, "3", task=task) for task in (text, chat)] == [Scored(1.0)] * 2
    asked, said = (
        [{"role": "user", "content": "How many?"}],
        [{"role": "assistant", "content": "3"}],
    )
    assert seen == [
        ("How many?", "3", ["3"], ["easy"], ["3"]),
        (asked, said, ["3"], ["easy"], ["3"]),
    ]


@pytest.mark.parametrize(
    "name", ["images", "id", "reward_model", "extra_info", "data_source", "question", "hint"]
)
def test_trl_gets_every_column_of_the_row(tmp_path: Path, name: str) -> None:
    row = {
        "question": "<image>How many?",
        "images": ["a.png"],
        "id": 7,
        "reward_model": {"ground_truth": "3"},
        "extra_info": {"hint": "few"},
        "data_source": "counting",
    }
    task = ChatRows(ChatRows.Settings(prompt="question")).task(row, "rows.jsonl:1", tmp_path)
    seen: list[Any] = []
    wanted: dict[str, Any] = {}
    exec(
        f"def reward(completions, {name}, **kwargs):\n    seen.append({name})\n    return [1.0]",
        {"seen": seen},
        wanted,
    )
    assert outcome(wanted["reward"], "3", task=task) == Scored(1.0)
    assert seen == [[row.get(name, "few")]]


def test_verl_gets_the_rows_own_extra_info(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "level": 1, "extra_info": info} for info in ({"index": 3}, None)]
    seen: list[Any] = []
    for row in rows:
        task = ChatRows(ChatRows.Settings()).task(row, "rows.jsonl:1", tmp_path)
        outcome(lambda solution_str, extra_info: seen.append(extra_info) or 1.0, "x", task=task)
    assert seen == [{"index": 3}, {"prompt": "a", "level": 1, "extra_info": None}]


@pytest.mark.parametrize(
    "returned",
    [(0.5,), np.array([0.5]), torch.tensor([0.5]), (value for value in [0.5])],
    ids=lambda one: type(one).__name__,
)
def test_any_sequence_of_one_number_is_a_reward(returned: Any) -> None:
    assert outcome(lambda completions, **_: returned, "x") == Scored(0.5)


@pytest.mark.parametrize(
    ("returned", "shown"), [("good", "'good'"), (math.nan, "nan"), ([1.0], "[1.0]")]
)
def test_what_is_no_number_is_shown_as_it_was_returned(returned: Any, shown: str) -> None:
    expected = Unscored(
        UnscoredKind.INVALID_REWARD, f"the reward source returned {shown}, not a finite number"
    )
    assert outcome(lambda completions, **_: [returned], "x") == expected
    assert outcome(lambda solution_str: {"score": returned}, "x") == expected


def test_what_the_trainer_state_lacks_is_named() -> None:
    with pytest.raises(
        AttributeError,
        match="trainer_state has no max_steps here: of TRL's there is global_step only",
    ):
        outcome(
            lambda completions, trainer_state: [
                trainer_state.global_step / trainer_state.max_steps
            ],
            "x",
        )


def test_trl_gets_the_columns_of_the_row_as_lists() -> None:
    assert outcome(accuracy, "3") == Scored(1.0)
    assert outcome(accuracy, "4") == Scored(0.0)


def test_trl_gets_the_ground_truth_under_its_usual_names_when_the_row_has_no_such_column() -> None:
    bare = Task("t1", MESSAGES, ground_truth="3")
    assert outcome(
        lambda completions, solution, **_: [float(solution == ["3"])], "x", task=bare
    ) == Scored(1.0)
    assert outcome(
        lambda completions, ground_truth: [float(ground_truth == ["3"])], "x", task=bare
    ) == Scored(1.0)


def test_trl_none_is_no_reward_and_no_failure() -> None:
    assert outcome(only_math, "3") == Unscored(
        UnscoredKind.NOT_APPLICABLE, "the reward function returned None for this row"
    )


def test_trl_functions_may_be_coroutines_and_log() -> None:
    assert outcome(slow, "x") == Scored(0.5)
    assert outcome(logging_metrics, "x") == Scored(1.0, {"exact": 1.0})


def test_several_turns_are_several_messages() -> None:
    seen: list[Any] = []
    outcome(lambda completions, **_: seen.append(completions) or [0.0], "first", "second")
    said = [{"role": "assistant", "content": text} for text in ("first", "second")]
    assert seen == [[said]]


@pytest.mark.parametrize(
    "returned", [0.5, [0.5, 0.5], [], "1", b"1", None, {0: 1.0}, np.array(0.5), np.zeros(2)]
)
def test_a_list_of_one_is_expected(returned: Any) -> None:
    found = outcome(lambda completions, **_: returned, "x")
    assert isinstance(found, Unscored)
    assert found.kind is UnscoredKind.INVALID_REWARD
    assert f"returned {returned!r} for one completion" in found.reason


def test_a_missing_column_is_named() -> None:
    with pytest.raises(
        TypeError, match=r"wants difficulty, and the row has no such column; offered are answer, "
    ):
        outcome(wants_another_column, "x")


# verl's -------------------------------------------------------------------------------------------


def compute_score(data_source, solution_str, ground_truth, extra_info=None):  # type: ignore[no-untyped-def]
    assert data_source == "counting"
    assert extra_info["level"] == "easy"
    return float(solution_str.endswith(ground_truth))


def compute_score_dict(data_source, solution_str, ground_truth, extra_info=None, **kwargs):  # type: ignore[no-untyped-def]
    right = solution_str == ground_truth
    return {"score": 2.0 * right - 1, "acc": right, "pred": solution_str}


def test_verl_returns_a_number_or_a_dict() -> None:
    assert outcome(compute_score, "it is 3") == Scored(1.0)
    assert outcome(compute_score_dict, "3") == Scored(1.0, {"acc": 1.0})
    assert outcome(compute_score_dict, "4") == Scored(-1.0, {"acc": 0.0})


def test_verl_gets_its_extra_info_when_the_reader_keeps_all_columns() -> None:
    kept = Task("t1", MESSAGES, "3", "counting", {"extra_info": ROW, "data_source": "counting"})
    assert outcome(compute_score, "it is 3", task=kept) == Scored(1.0)


def test_a_dict_without_a_score_is_reported() -> None:
    found = outcome(
        lambda data_source, solution_str, ground_truth, extra_info=None: {"acc": 1.0}, "x"
    )
    assert found == Unscored(
        UnscoredKind.INVALID_REWARD,
        "the reward function returned a dict without score; its keys are acc",
    )


# What the configuration refuses -------------------------------------------------------------------


class NoScore:
    class Settings(SettingsModel):
        """Nothing to set."""

    def __init__(self, settings: Settings) -> None:
        del settings

    def judge(self) -> float:
        return 0.0


class PlainSettings(NoScore):
    class Settings:  # type: ignore[assignment]
        pass

    def score(self) -> float:
        return 0.0


class NoSettings:
    def __init__(self, scale: float) -> None: ...

    def score(self) -> float:
        return 0.0


class Called:
    def __call__(self, completions: list[Any], **kwargs: Any) -> list[float]:
        return [0.0]


CALLED = Called()


def unrelated(a: int, b: int) -> int:
    return a + b


def hidden(*args, **kwargs):  # type: ignore[no-untyped-def]
    return [0.0]


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (f"{__name__}:NoScore", "has no method score, so it cannot be the reward"),
        (
            f"{__name__}:PlainSettings",
            (
                "has a Settings class that is not a pydantic model, so it is not a component. Write in"
                " the class:"
            ),
        ),
        (
            f"{__name__}:NoSettings",
            "has no nested Settings class, so it is not a component. Write in the class:",
        ),
        (
            f"{__name__}:Called",
            (
                r"has no nested Settings class, .* an instance called like a function, name one: f"
                r" = Called\("
            ),
        ),
        (
            f"{__name__}:hidden",
            (
                r"a function of \(\*args, \*\*kwargs\), which is not a .* functools.wraps\(function\)"
                r" on its wrapper"
            ),
        ),
        (
            f"{__name__}:unrelated",
            (
                r"is a function of \(a, b\), which is not a reward. Write score\(trajectory, task,"
                r" context\)"
            ),
        ),
        (f"{__name__}:TURN", "is neither class nor function, but Turn"),
    ],
)
def test_what_is_no_reward_is_refused_with_its_place_and_the_remedy(
    tmp_path: Path, use: str, message: str
) -> None:
    path = tmp_path / "reward.yaml"
    path.write_text(f"timeout: 5\nsource: {{use: '{use}'}}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"(?s)reward\.yaml:2: source: .*{message}") as refused:
        check_components(load(path, [], RewardSettings))
    assert refused.value.exit_code == 2


def test_an_instance_of_a_class_can_be_a_function() -> None:
    component = Component(use=f"{__name__}:CALLED")
    REWARD.check(component)
    assert outcome(component.build(), "x") == Scored(0.0)


def test_a_list_of_rewards_is_refused_with_where_to_read_how_they_are_combined(
    tmp_path: Path,
) -> None:
    path = tmp_path / "reward.yaml"
    path.write_text("timeout: 5\nsource: [{use: 'a:f'}, {use: 'a:g'}]\n", encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"reward\.yaml:2: source: .*one reward, not a list.*docs/rewards\.md"
    ):
        load(path, [], RewardSettings)


def test_a_function_is_no_environment() -> None:
    from rayloop.envs.settings import ENVIRONMENT

    with pytest.raises(ConfigError, match="is a function; the environment must be a class"):
        ENVIRONMENT.check(Component(use=f"{__name__}:unrelated"))


def test_a_function_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "my_reward.py"
    file.write_text(
        textwrap.dedent("""\
        from dataclasses import dataclass
        LOADED = []
        @dataclass
        class Part:
            value: float
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            return Part(1.0).value
        """),
        encoding="utf-8",
    )
    component = Component(use=f"{file}:compute_score")
    REWARD.check(component)
    assert outcome(component.build(), "x") == Scored(1.0)
    assert component.resolve() is component.resolve(), "loaded once"
    with pytest.raises(ConfigError, match=r"cannot be loaded: .*no attribute 'missing'"):
        Component(use=f"{file}:missing").resolve()
    with pytest.raises(ConfigError, match=r"cannot be loaded: FileNotFoundError"):
        Component(use=f"{tmp_path}/gone.py:f").resolve()
    file.with_name("broken.py").write_text("import nothing_of_this_name\n", encoding="utf-8")
    with pytest.raises(
        ConfigError,
        match=r"cannot be loaded: ModuleNotFoundError: No module named 'nothing_of_this_name'",
    ):
        Component(use=f"{tmp_path}/broken.py:f").resolve()


@pytest.mark.parametrize(
    ("use", "meant"),
    [
        ("rayloop.recipes.arc_vision.reward:IoUReword", "IoUReward"),
        ("rayloop.recipes.arc_vison.reward:IoUReward", "arc_vision"),
        ("rayloop.recipes.arc_vision.rewards:IoUReward", "reward"),
    ],
)
def test_a_misspelt_component_names_the_nearest(use: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean `{meant}`"):
        Component(use=use).resolve()


def test_nothing_alike_is_no_suggestion() -> None:
    with pytest.raises(ConfigError) as caught:
        Component(use="rayloop.recipes.arc_vision.reward:Zzz").resolve()
    assert "did you mean" not in str(caught.value)


def test_a_function_survives_the_dump(tmp_path: Path) -> None:
    settings = RewardSettings(
        source=Component(use=f"{__name__}:with_options", **{"with": {"bonus": 1.0}})
    )
    path = tmp_path / "reward.yaml"
    path.write_text(dump(settings, expand_components=True), encoding="utf-8")
    assert load(path, [], RewardSettings) == settings


def test_the_reason_of_who_judged_is_kept() -> None:
    found = as_outcome(Scored(1.0, {"accuracy": float("nan")}, reason="exact: the same text"))
    assert isinstance(found, Scored)
    assert (found.reason, found.flags) == ("exact: the same text", ("invalid_component",))
