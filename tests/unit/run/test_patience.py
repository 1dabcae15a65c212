"""Early stopping and the best checkpoint go by the held-out reward that the reporter has seen, also
after a resume.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rayloop.core.events import EarlyStop, Event
from rayloop.core.incidents import AlreadyDone
from rayloop.measure.controls import RIGHT, Item
from rayloop.run.config import RunConfig
from rayloop.run.reporter import Reporter
from tests.support.runs import settings


class Silent:
    def log(self, step: int, metrics: Any) -> None: ...

    def close(self) -> None: ...


def reporter(folder: Path, patience: int | None = 2) -> tuple[Reporter, list[Event]]:
    config = settings(folder, folder)
    config["data"]["eval"] = config["data"]["train"]
    config["evaluation"] = {"every": 1, "patience": patience}
    made = Reporter(RunConfig.model_validate(config), folder, lambda *_: Silent())
    reported: list[Event] = []

    def emit(event: Event, step: int | None = None) -> None:
        reported.append(event)

    made.event = emit  # type: ignore[method-assign]
    return made, reported


def evaluate(made: Reporter, *rewards: float | None, first: int = 0) -> None:
    for step, reward in enumerate(rewards, start=first):
        made.evaluated(step, [Item(RIGHT, "t", "s", reward=reward)], {})


def test_the_run_is_given_up_after_so_many_evaluations_without_a_better_one(tmp_path: Path) -> None:
    made, reported = reporter(tmp_path)
    evaluate(made, 0.1, 0.3, 0.3, 0.4, 0.2)
    assert not made.given_up, "an equal reward is no better one, and a better one begins anew"
    assert made.is_best(3)
    assert not made.is_best(4)
    evaluate(made, 0.4, first=5)
    assert made.given_up
    assert [event for event in reported if isinstance(event, EarlyStop)] == [
        EarlyStop(2, {"reward": 0.4, "step": 3})
    ]


def test_without_patience_a_run_goes_on_and_nothing_measured_counts_nothing(tmp_path: Path) -> None:
    endless, _ = reporter(tmp_path, None)
    evaluate(endless, 0.5, *[0.1] * 50)
    assert not endless.given_up
    made, _ = reporter(tmp_path)
    evaluate(made, 0.5, None, None, None)
    assert not made.given_up


def test_a_resume_counts_on_and_the_evaluation_that_it_repeats_once(tmp_path: Path) -> None:
    before, _ = reporter(tmp_path)
    evaluate(before, 0.5, 0.1)
    after, reported = reporter(tmp_path)
    after.restore(before.state())
    evaluate(after, 0.1, first=1)
    assert not after.given_up
    evaluate(after, 0.1, first=2)
    assert after.given_up
    after.already_done(2)
    assert reported[-1] == AlreadyDone("raise evaluation.patience above 2 to continue")
    old = before.state()
    del old["worse"]  # as checkpoints were before
    after.restore(old)
    assert not after.given_up


@pytest.mark.parametrize("key", [("evaluation", "patience", 3)])
def test_what_goes_by_held_out_rewards_needs_them(
    key: tuple[str, str, Any], tmp_path: Path
) -> None:
    config = settings(tmp_path, tmp_path)
    config.setdefault(key[0], {})[key[1]] = key[2]
    with pytest.raises(
        ValidationError,
        match=rf"{key[0]}\.{key[1]} goes by the held-out reward, which this run never",
    ):
        RunConfig.model_validate(config)
