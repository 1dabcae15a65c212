"""reasoning-gym: every task of the package is read or refused, its scorer judges, and none
evaluates what the policy says.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from rayloop.config.settings import Component
from rayloop.core.failures import DataFailure
from rayloop.core.groups import Outcome, Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import Task
from tests.adapters.conftest import Train

pytest.importorskip("reasoning_gym", reason="make test-adapters installs reasoning-gym")

from reasoning_gym.factory import DATASETS

from rayloop.envs.adapters.reasoning_gym import CONSTANTS, EVALUATING, RUNNING

pytestmark = pytest.mark.adapters
USE = "rayloop.envs.adapters.reasoning_gym"
OWN = {
    "basic_arithmetic",
    "bitwise_arithmetic",
    "gsm_symbolic",
    "number_sorting",
    "propositional_logic",
}
"""Tasks with an ``eval`` of what the package itself made, or with a parser of that name; read by
hand, 0.1.25.
"""


def read(**row: Any) -> Task:
    return Component(use=f"{USE}:ReasoningGymRows").build().task(row, "rows:1", Path())


def score(task: Task, text: str) -> Outcome:
    trajectory: Any = None
    return (
        Component(use=f"{USE}:ReasoningGymScore")
        .build()
        .score(trajectory, task, ScoreContext(1, [text]))
    )


def test_five_rows_are_judged_by_the_packages_scorer() -> None:
    for seed, name in enumerate(
        ("leg_counting", "word_sorting", "chain_sum", "number_sorting", "sudoku")
    ):
        task = read(task=name, seed=seed)
        assert (task.source, task.messages[0].role) == (name, "system")
        assert score(task, f"I think. <answer>{task.ground_truth}</answer>") == Scored(
            1.0, {"answered": 1.0, "exact": 1.0}
        ), name
        wrong = score(task, "I do not know.")
        assert isinstance(wrong, Scored)
        assert (wrong.value < 0.2, wrong.components) == (True, {"answered": 0.0, "exact": 0.0})


def test_a_seed_a_size_and_a_config_make_the_row() -> None:
    one, other = (
        read(task="chain_sum", seed=3, index=i, size=5, config={"min_terms": 6, "max_terms": 6})
        for i in (1, 2)
    )
    assert one.id != other.id
    assert one.messages != other.messages
    assert one == read(
        task="chain_sum", seed=3, index=1, size=5, config={"min_terms": 6, "max_terms": 6}
    )
    assert sum(str(one.messages[-1].parts[0]).count(sign) for sign in "+-") >= 5
    for wrong in (
        {"config": {"no_such": 1}},
        {"index": 7, "size": 2},
        {"seed": "x"},
        {"task": "no_such"},
    ):
        with pytest.raises(DataFailure, match="rows:1"):
            read(**{"task": "chain_sum", "seed": 3, **wrong})


@pytest.mark.parametrize("name", [*EVALUATING, *RUNNING])
def test_a_task_that_evaluates_is_refused_by_name(name: str) -> None:
    assert name in DATASETS
    with pytest.raises(DataFailure, match=f"{name} (evaluates|runs)"):
        read(task=name, seed=1)


PAYS_GUESSES = ("coin_flip", "game_of_life_halting")
GUESSES = (
    *CONSTANTS,
    "nan",
    "inf",
    "-inf",
    "nan + nani",
    "1e309",
    "2",
    "yes",
    "[]",
    "{}",
    "()",
    "...",
    "0.1",
)


PLAYED = sorted(set(DATASETS) - {*EVALUATING, *RUNNING, *PAYS_GUESSES})


@pytest.mark.parametrize("name", PLAYED)
def test_no_task_pays_a_guess(name: str) -> None:
    """In full; many scorers pay a part for an answer that is near."""
    for seed in range(3):
        task = read(task=name, seed=seed)
        truth = str(task.ground_truth)
        wrong = [guess for guess in GUESSES if not same_answer(guess, truth)]
        outcomes = {guess: score(task, f"<answer>{guess}</answer>") for guess in wrong}
        paid = {
            guess: outcome.value
            for guess, outcome in outcomes.items()
            if isinstance(outcome, Scored)
        }
        assert paid.keys() == set(wrong)
        assert {guess: value for guess, value in paid.items() if not value < 1} == {}, truth


@pytest.mark.parametrize("name", PAYS_GUESSES)
def test_a_task_whose_scorer_pays_a_guess_is_refused(name: str) -> None:
    with pytest.raises(
        DataFailure, match=f"the scorer of {name} pays 1 for '.+' where '.+' is right: leave it out"
    ):
        read(task=name, seed=1)


def same_answer(guess: str, truth: str) -> bool:
    try:
        return float(guess) == float(truth)
    except ValueError:
        return guess.casefold() == truth.strip().casefold()


def test_a_number_that_is_not_finite_is_no_answer() -> None:
    task = read(task="complex_arithmetic", seed=1)
    assert score(task, "<answer>nan</answer>") == Scored(
        0.0, {"answered": 1.0, "exact": 0.0}, ("unreadable",)
    )
    assert score(task, f"<answer>{task.ground_truth}</answer>") == Scored(
        1.0, {"answered": 1.0, "exact": 1.0}
    )


def test_no_other_scorer_of_the_package_evaluates() -> None:
    """By its source: a task of a later release with ``eval`` or sympy's parser in its module is
    found here.
    """
    found = {
        name
        for name, (made, _) in DATASETS.items()
        if re.search(
            r"\b(eval|exec|parse_expr|sympify|S)\(", inspect.getsource(inspect.getmodule(made))
        )  # type: ignore[arg-type]
    }
    assert found - OWN <= {*EVALUATING, *RUNNING}
    assert found >= set(EVALUATING)


def test_a_step_is_trained(digits_model: Path, train: Train) -> None:
    rows = [{"task": "leg_counting", "seed": seed} for seed in range(4)]
    made = train(
        digits_model,
        rows,
        data__reader={"use": f"{USE}:ReasoningGymRows", "with": {"system": ""}},
        reward={"source": {"use": f"{USE}:ReasoningGymScore"}},
        environment={"episode": {"max_turns": 1}},
    )
    assert made.metrics[0]["rollout/played/leg_counting"] == 8
