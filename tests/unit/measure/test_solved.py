"""pass@k against the definition, and how results are split by columns."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import comb

import pytest

from rayloop.measure.controls import (
    BLIND,
    OTHER,
    RIGHT,
    SAME,
    SAMPLED,
    Item,
    by_column,
    pass_rates,
    solved_tasks,
    summarise,
)
from rayloop.measure.intervals import pass_at
from rayloop.measure.report import table


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_the_estimator_is_the_mean_over_all_draws(n: int) -> None:
    for right in range(n + 1):
        answers = [index < right for index in range(n)]
        for k in range(1, n + 1):
            draws = [any(chosen) for chosen in combinations(answers, k)]
            assert pass_at(n, right, k) == pytest.approx(sum(draws) / len(draws))
            assert pass_at(n, right, k) == pytest.approx(1 - comb(n - right, k) / comb(n, k))
    assert pass_at(10_000, 1, 100) == pytest.approx(0.01)


@pytest.mark.parametrize(("n", "right", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_what_makes_no_sense_is_refused(n: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k}"):
        pass_at(n, right, k)


def items(task: str, clicks: list[float], arm: str = SAMPLED) -> list[Item]:
    return [
        Item(arm, task, "s", n, reward=0.3, components={"click": click})
        for n, click in enumerate(clicks)
    ]


def test_rates_are_over_tasks_and_of_the_sampled_answers() -> None:
    made = [
        *items("a", [1, 0, 0, 0, 0]),
        *items("b", [0, 0, 0, 0]),
        *items("c", [1] * 4),
        *items("b", [1], RIGHT),
    ]
    rates = pass_rates(made, "click", 1.0)
    assert list(rates) == [1, 2, 4]
    assert rates[1][0] == pytest.approx((0.2 + 0 + 1) / 3)
    assert rates[4][0] == pytest.approx((0.8 + 0 + 1) / 3)
    assert list(pass_rates(items("a", [1, 1, 0]), "click", 1.0)) == [1, 2, 3]
    assert pass_rates(made, "iou", 0.5) == {}
    assert pass_rates(made, "reward", 0.3)[1][0] == 1.0
    counts = solved_tasks(made, "click", 1.0)
    assert {task for task, (right, _) in counts.items() if right} == {"a", "b", "c"}
    assert solved_tasks(items("d", [0, 0]), "click", 1.0) == {"d": (0, 2)}


@pytest.mark.parametrize("arm", [SAME, OTHER, BLIND])
def test_a_task_is_not_solved_without_its_own_image(arm: str) -> None:
    made = [
        *items("a", [1], arm),
        *items("b", [1], arm),
        *items("b", [0], RIGHT),
        *items("b", [1, 0]),
    ]
    assert solved_tasks(made, "click", 1.0) == {"b": (1, 3)}


def test_means_by_a_column_are_of_the_right_image() -> None:
    made = [
        *items("a", [1], RIGHT),
        *items("b", [0], RIGHT),
        *items("c", [1], RIGHT),
        *items("a", [0], "same source"),
    ]
    rows = by_column(made, {"a": "web", "b": "web", "c": "mobile"})
    assert {kind: scores["click"][0] for kind, scores in rows.items()} == {
        "mobile": 1.0,
        "web": 0.5,
    }
    summary = summarise([made[0], replace(made[1], source="t"), *made[2:]], 0)
    asked = {
        "by": {"platform": rows},
        "pass_at": {1: (0.25, None, None)},
        "cut": 2,
        "solved": "click >= 1",
    }
    text = "\n".join(table(summary | asked))
    assert "by platform, right image:" in text
    assert "by source" not in text, "the columns that are asked for stand in its place"
    assert "pass@1  0.250 [too few items]  (an answer is right with click >= 1)" in text
    assert "2 answers were cut" in text
