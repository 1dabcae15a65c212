"""What an evaluation changes of its run, and whether it begins before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rayloop.cluster.supervision.attempts import _request
from rayloop.core.failures import ConfigError
from rayloop.core.types import Message, Task, TrajectoryId
from rayloop.estimate.run import plan
from rayloop.run.config import RunConfig, read
from rayloop.run.held_out import answer_requests
from tests.support.runs import settings

OVER = {
    "environment.episode.max_turns": 30,
    "environment.episode.max_tokens": 9000,
    "rollout.sampling.temperature": 0.5,
}
TASKS = [Task("a", (Message("user", ("?",)),))]


def config(folder: Path, **evaluation: object) -> RunConfig:
    return RunConfig.model_validate(
        settings(folder, folder, evaluation={"greedy": False, "samples": 1, **evaluation})
    )


def test_an_evaluation_is_played_with_its_own_values(tmp_path: Path) -> None:
    made = config(tmp_path, over=OVER)
    (asked,) = answer_requests(made, TASKS, controls=False, samples=1)
    assert asked.sampling.temperature == 0.5
    request = _request(made, asked, TrajectoryId(-1, 0))
    assert request.episode == {"max_turns": 30, "max_tokens": 9000}
    episode = made.environment.episode
    changed = episode.model_copy(update=request.episode)
    assert (changed.max_turns, changed.max_images) == (30, episode.max_images)
    assert made.in_evaluation.environment.episode == changed
    assert made.longest == 9000, "the engine has room for both"
    assert (made.rollout.sampling.temperature, made.environment.episode.max_turns) == (
        1.0,
        1,
    ), "training keeps its own"
    plain = config(tmp_path)
    assert (plain.in_evaluation, _request(plain, asked, TrajectoryId(-1, 0)).episode) == (plain, {})


@pytest.mark.parametrize(
    ("over", "message"),
    [
        (
            "{environment.episode.max_turn: 30}",
            r"'environment\.episode\.max_turn' is not a key that an evaluation can change",
        ),
        (
            "{environment.episode.environment: {use: x}}",
            r"is not a key that an evaluation can change.*max_turns.*temperature",
        ),
        ("{policy.optimizer.lr: 1.0}", r"'policy\.optimizer\.lr' is not a key"),
        (
            "{environment: {episode: {max_turns: 30}}}",
            r"'environment' is not a key .*evaluation\.over=\{environment\.episode\.max_turns: 3\}",
        ),
        (
            "{environment.episode.max_turns: many}",
            r"environment\.episode\.max_turns: got 'many': Input should be a valid integer",
        ),
        (
            "{rollout.sampling.temperature: 5}",
            r"rollout\.sampling\.temperature: got 5: Input should be less than or equal to 2",
        ),
    ],
)
def test_a_wrong_value_is_named_with_its_line(tmp_path: Path, over: str, message: str) -> None:
    file = tmp_path / "run.yaml"
    text = yaml.safe_dump(settings(tmp_path, tmp_path))
    file.write_text(f"{text}evaluation:\n  samples: 1\n  over: {over}\n", encoding="utf-8")
    line = len(text.splitlines()) + 3
    with pytest.raises(ConfigError, match=rf"run\.yaml:{line}: evaluation\.over: .*{message}"):
        read(file, [])


def test_what_does_not_fit_together_in_an_evaluation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"tokens in evaluations \(evaluation\.over\), above episode\.max_tokens"
    ):
        config(tmp_path, over={"rollout.sampling.max_tokens": 100_000})
    file = tmp_path / "run.yaml"
    over = {"environment.episode.step_timeout": 4000.0}
    file.write_text(
        yaml.safe_dump(settings(tmp_path, tmp_path, evaluation={"over": over})), encoding="utf-8"
    )
    message = (
        r"longer than 2 x environment\.episode\.step_timeout \(8000 s\), which it waits for in"
        r" evaluations \(evaluation\.over\)\."
    )
    with pytest.raises(ConfigError, match=message):
        read(file, [])


@pytest.mark.parametrize(
    "changes", [{"greedy": False}, {"samples": 2}, {"over": {"rollout.sampling.max_tokens": 5}}]
)
@pytest.mark.parametrize(("key", "value"), [("temperature", 0.5), ("top_p", 0.5), ("top_k", 5)])
def test_a_temperature_that_no_answer_is_sampled_with_is_refused(
    tmp_path: Path, changes: dict[str, object], key: str, value: float
) -> None:
    only: dict[str, object] = {
        "greedy": True,
        "samples": 0,
        "over": {f"rollout.sampling.{key}": value},
    }
    with pytest.raises(
        ValueError, match=rf"rollout\.sampling\.{key} has no effect.*greedy: false, or samples"
    ):
        config(tmp_path, **only)
    config(tmp_path, **{**only, **changes})


def test_the_trainings_own_durations_are_checked_beside_an_evaluations(tmp_path: Path) -> None:
    values = settings(tmp_path, tmp_path, environment__episode={"step_timeout": 4000.0})
    values["evaluation"] = {"over": {"environment.episode.step_timeout": 10.0}}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    with pytest.raises(
        ConfigError,
        match=(
            r"longer than 2 x environment\.episode\.step_timeout \(8000 s\), which it waits for\."
        ),
    ):
        read(file, [])


@pytest.mark.parametrize(("first", "count"), [(True, 3), (False, 2)])
def test_the_first_evaluation_can_be_left_out(tmp_path: Path, first: bool, count: int) -> None:
    values = settings(tmp_path, tmp_path, steps=10, evaluation={"every": 5, "first": first})
    values["data"]["eval"] = values["data"]["train"]
    made = RunConfig.model_validate(values)
    assert plan(made, None, 1280).evaluations == count
