"""Does the policy look? Swapped images, the blind prior, intervals, and what is made of them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from rayloop.config.settings import load
from rayloop.core.types import ImageSource, Message, Task
from rayloop.measure.controls import (
    BLIND,
    OTHER,
    RIGHT,
    SAME,
    SAMPLED,
    Item,
    against_controls,
    gains,
    looks,
    summarise,
    swapped,
)
from rayloop.measure.intervals import MIN_ITEMS, interval, paired_interval
from rayloop.measure.report import table, verdict
from rayloop.recipes.arc_vision.boxes import BlindBox
from rayloop.run.config import RunConfig
from rayloop.run.held_out import answer_requests, gain, metrics
from rayloop.run.records.metrics import validate
from tests.support.runs import ROOT


def task(
    name: str,
    source: str,
    image: bytes,
    box: tuple[float, ...] = (0, 0, 1, 1),
    instruction: str = "Go.",
) -> Task:
    return Task(
        name,
        (Message("user", (instruction, ImageSource(data=image))),),
        box,
        source,
        {"instruction": instruction},
    )


TASKS = [
    task(f"{page}{i}", page, f"{page}{i}".encode()) for page in ("a", "b", "c") for i in range(4)
]


def image(of: Task) -> bytes | None:
    (found,) = (part.data for part in of.messages[0].parts if isinstance(part, ImageSource))
    return found


@pytest.mark.parametrize("same", [True, False])
def test_swapped_images_come_from_the_right_kind_of_page_and_questions_stay(same: bool) -> None:
    swaps = swapped(TASKS, 0, same=same)
    originals = {t.id: t for t in TASKS}
    assert {t.id for t in swaps} == originals.keys()
    for t in swaps:
        original = originals[t.id]
        assert image(t) != image(original)
        assert (image(t)[:1] == t.source.encode()) is same  # type: ignore[index]
        assert (t.ground_truth, t.messages[0].parts[0]) == (
            original.ground_truth,
            original.messages[0].parts[0],
        )
    assert swaps == swapped(TASKS, 0, same=same)
    assert swaps != swapped(TASKS, 1, same=same)


def test_tasks_without_another_image_are_left_out() -> None:
    twins = [task("x", "a", b"1"), task("y", "a", b"1")]
    assert swapped(twins, 0, same=True) == []
    assert swapped(twins, 0, same=False) == []


def test_an_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    draws = np.random.default_rng(0).normal(1.0, 1.0, (200, 40))
    covered = sum(low <= 1.0 <= high for _, low, high in (interval(row) for row in draws))
    assert 180 <= covered <= 200


@pytest.mark.parametrize("count", [1, 2, MIN_ITEMS - 1])
def test_too_few_items_have_no_interval(count: int) -> None:
    """Of one item all resamples are the same: an interval of width zero would claim certainty."""
    assert interval([0.4] * count) == (pytest.approx(0.4), None, None)
    assert interval([0.4] * MIN_ITEMS)[1:] == pytest.approx((0.4, 0.4))
    draws = np.random.default_rng(0).normal(1.0, 1.0, (400, MIN_ITEMS))
    covered = sum(low <= 1.0 <= high for _, low, high in (interval(row) for row in draws))
    assert covered >= 0.85 * len(draws)


def test_pairing_removes_what_items_have_in_common() -> None:
    base = [i / 10 for i in range(100)]
    difference, low, high = paired_interval([b + 0.5 for b in base], base)
    assert (difference, low, high) == pytest.approx((0.5, 0.5, 0.5))
    with pytest.raises(ValueError, match="paired"):
        paired_interval([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="no values"):
        interval([])


def items(arm: str, values: list[float | None]) -> list[Item]:
    return [
        Item(arm, str(i), "page", reward=v, components={} if v is None else {"iou": v})
        for i, v in enumerate(values)
    ]


def test_a_policy_looks_only_if_every_control_is_worse() -> None:
    rng = random.Random(0)
    right = [0.6 + rng.random() / 4 for _ in range(50)]
    worse = [value - 0.2 + rng.random() / 10 for value in right]
    seeing = items(RIGHT, right) + items(SAME, worse) + items(OTHER, worse) + items(BLIND, worse)
    assert looks(against_controls(seeing))
    blind_as_good = (
        items(RIGHT, right) + items(SAME, worse) + items(OTHER, worse) + items(BLIND, right)
    )
    assert not looks(against_controls(blind_as_good))
    assert "not above the best answer without an image." in verdict(summarise(blind_as_good, 0))
    assert not looks(against_controls(items(RIGHT, right) + items(BLIND, worse)))
    few = items(RIGHT, right) + items(SAME, worse[:5]) + items(OTHER, worse)
    assert not looks(against_controls(few))
    assert (
        "Too few items to say whether the policy looks: fewer than 8 for another image of the same"
        " source." in verdict(summarise(few, 0))
    )
    assert against_controls(items(RIGHT, right) + items(SAME, [None])) == {}


SEES, FLAT = 0.6, 0.2


def source(
    name: str, right: list[float], wrong: list[float], texts: list[str] | None = None
) -> list[Item]:
    """Right, swapped and blind answers to the tasks of one source."""
    made = []
    for arm, values in ((RIGHT, right), (SAME, wrong), (OTHER, wrong), (BLIND, wrong)):
        for number, value in enumerate(values):
            text = texts[number] if texts else f"answer {number}"
            made.append(
                Item(
                    arm,
                    f"{name}-{number}",
                    name,
                    reward=value,
                    text=text,
                    images=({"sha256": name},),
                )
            )
    return made


def spread(mean: float, count: int = 20) -> list[float]:
    return [mean + 0.01 * (number % 3) for number in range(count)]


def test_a_source_on_which_the_policy_does_not_look_is_named_although_the_mean_is_above_all_controls() -> (
    None
):
    sees = [one for name in "abc" for one in source(name, spread(SEES), spread(FLAT))]
    constant = source("color", spread(FLAT), spread(FLAT), ["the same box"] * 20)
    summary = summarise(
        [*sees, *constant], 0, [Item(RIGHT, f"color-{n}", "color", reward=0.5) for n in range(20)]
    )
    assert looks(summary["differences"]), "the mean over sources hides it"
    assert summary["looks"] is False
    assert {name: one["looks"] for name, one in summary["by_source"].items()} == {
        "a": True,
        "b": True,
        "c": True,
        "color": False,
    }
    about = summary["by_source"]["color"]
    assert (about["items"], about["answers"], about["commonest"]) == (20, 1, 20)
    assert about["change"] == pytest.approx((-0.2905, -0.294, -0.287), abs=2e-3)
    said = verdict(summary)
    assert "looks on 3 of 4 sources" in said
    assert "Not shown to look: color (" in said
    assert "1 distinct answers to 20 tasks" in said
    assert "Worse than at the first evaluation: color -0.29" in said
    lines = "\n".join(table(summary))
    assert "color  not shown to look" in lines
    assert "a      looks" in lines


def test_a_source_of_few_tasks_is_undecided() -> None:
    summary = summarise(
        [
            *source("a", spread(SEES), spread(FLAT)),
            *source("b", spread(SEES, MIN_ITEMS - 1), spread(FLAT, MIN_ITEMS - 1)),
        ],
        0,
    )
    assert {name: one["looks"] for name, one in summary["by_source"].items()} == {
        "a": True,
        "b": None,
    }
    assert summary["looks"] is None
    assert "looks on 1 of 2 sources" in verdict(summary)
    assert "Undecided (fewer than 8 tasks, or no other image of the source): b." in verdict(summary)


def test_many_small_sources_are_judged_on_average_and_that_is_said() -> None:
    tiny = [one for n in range(6) for one in source(f"kind {n}", spread(SEES, 2), spread(FLAT, 2))]
    said = verdict(summary := summarise(tiny, 0))
    assert summary["looks"] is None
    assert "That is a mean over 6 sources; on which it holds is undecided" in said


def test_a_fall_that_may_be_chance_is_told_apart_from_one_that_is_not() -> None:
    now = [*source("a", [0.5] * 20, [0.0] * 20), *source("b", spread(SEES), spread(FLAT))]
    before = [Item(RIGHT, f"a-{n}", "a", reward=1.04 * (n % 2)) for n in range(20)]
    said = verdict(summarise(now, 0, before))
    assert "Lower than at the first evaluation, which may be chance: a -0.020 [" in said
    assert "Worse" not in said


def test_what_could_not_be_played_is_named_with_its_reason() -> None:
    one = [item for item in source("dots", spread(SEES), spread(FLAT)) if item.arm in (RIGHT, SAME)]
    said = verdict(summarise(one, 0))
    assert said.startswith(
        "The policy looks: the right image scores above another image of the same source"
    )
    assert "evaluation.blind names none" in said
    assert "a column data_source names kinds" in said


def test_sources_without_images_are_not_asked_whether_they_look() -> None:
    text = [Item(RIGHT, f"t{n}", "text", reward=1.0) for n in range(20)]
    assert list(summarise([*source("a", spread(SEES), spread(FLAT)), *text], 0)["by_source"]) == [
        "a"
    ]


def test_answers_without_a_reward_are_left_out_and_counted() -> None:
    found = items(RIGHT, [1.0, None, 0.0])
    recorded = metrics(found, summarise(found, 0)["arms"])
    assert recorded == {
        "val/reward/mean": 0.5,
        "val/iou/mean": 0.5,
        "val/page/reward/mean": 0.5,
        "val/scored": 2.0,
        "val/unscored": 1.0,
    }
    controlled = metrics(
        found + items(SAME, [0.0, 0.0, 0.0]),
        summarise(found + items(SAME, [0.0, 0.0, 0.0]), 0)["arms"],
    )
    assert validate(controlled) == ()
    assert controlled["val/control/same source/reward/mean"] == 0.0


def test_sampled_answers_have_a_curve_of_their_own_with_bounds() -> None:
    drawn = [
        Item(SAMPLED, str(task), "page", k, reward=task / 10 + k / 10)
        for task in range(MIN_ITEMS)
        for k in range(2)
    ]
    found = items(RIGHT, [0.5] * MIN_ITEMS) + drawn + [Item(SAMPLED, "0", "page", 2)]
    recorded = metrics(found, summarise(found, 0)["arms"])
    assert validate(recorded) == ()
    assert recorded["val_sampled/reward/mean"] == pytest.approx(0.4), (
        "the mean over tasks of their answers' mean"
    )
    assert recorded["val_sampled/reward/low"] < 0.4 < recorded["val_sampled/reward/high"]
    assert (recorded["val_sampled/scored"], recorded["val_sampled/unscored"]) == (2 * MIN_ITEMS, 1)
    assert (recorded["val/reward/mean"], recorded["val/scored"]) == (0.5, MIN_ITEMS)
    assert not [name for name in recorded if name.startswith("val/control/")]


def test_the_gain_is_over_the_tasks_that_both_evaluations_have() -> None:
    before = items(RIGHT, [0.1] * 10) + [
        Item(SAMPLED, str(n), "page", k, reward=0.2) for n in range(10) for k in range(4)
    ]
    after = items(RIGHT, [0.4] * 9) + [
        Item(SAMPLED, str(n), "page", k, reward=0.1 * k) for n in range(10) for k in range(4)
    ]
    found = gain(after, before, greedy=True)
    assert (found["greedy"]["tasks"], found["sampled"]["tasks"]) == (9, 10)
    assert (found["greedy"]["before"], found["greedy"]["after"]) == pytest.approx((0.1, 0.4))
    assert found["greedy"]["gain"] == pytest.approx((0.3, 0.3, 0.3))
    assert found["sampled"]["gain"] == pytest.approx((-0.05, -0.05, -0.05))
    assert list(gain(after, before, greedy=False)) == ["sampled"], (
        "then the right arm is what is sampled"
    )
    assert gain(after, [], greedy=True) == {}


@pytest.mark.parametrize(
    ("greedy", "samples", "asked"),
    [
        (True, 0, {RIGHT: [(0, 0.0)]}),
        (True, 2, {RIGHT: [(0, 0.0)], SAMPLED: [(0, 1.0), (1, 1.0)]}),
        (False, 0, {RIGHT: [(0, 1.0)]}),
        (False, 3, {RIGHT: [(0, 1.0), (1, 1.0), (2, 1.0)]}),
    ],
)
def test_samples_are_asked_for_besides_the_greedy_answer(
    greedy: bool, samples: int, asked: dict[str, Any]
) -> None:
    config = load(
        ROOT / "recipes/arc_vision/quickstart.yaml",
        [f"evaluation.greedy={str(greedy).lower()}"],
        RunConfig,
    )
    found: dict[str, list[tuple[int, float]]] = {}
    for play in answer_requests(config, TASKS[:1], controls=False, samples=samples):
        found.setdefault(play.arm, []).append((play.sample, play.sampling.temperature))
    assert found == asked


def test_several_samples_of_a_task_count_as_one_item() -> None:
    twice = [Item(RIGHT, "a", "p", s, reward=float(s)) for s in range(2)]
    assert gains(twice, [Item(RIGHT, "a", "p", reward=0.0)])["reward"] == (0.5, None, None)


def test_the_table_shows_arms_sources_and_differences() -> None:
    found = (
        items(RIGHT, [1.0, 0.8]) + items(SAME, [0.1, 0.2]) + [Item(RIGHT, "9", "other", reward=0.5)]
    )
    summary = summarise(found, 1)
    text = "\n".join(table(summary))
    assert "same source" in text
    assert "reward 0.750 [too few items]" in text
    assert "1 answers have no score" in text


def test_the_blind_prior_is_the_best_constant_box_of_an_instruction() -> None:
    prior = BlindBox(BlindBox.Settings())
    left, right = (0.0, 0.0, 0.5, 1.0), (0.5, 0.0, 1.0, 1.0)
    rows = [task(f"l{i}", "a", b"", left, "Left.") for i in range(3)] + [
        task(f"r{i}", "a", b"", right, "Right.") for i in range(5)
    ]
    with pytest.raises(ValueError, match="fit"):
        prior.score(rows[0])
    prior.fit(rows)
    assert prior.score(task("x", "a", b"", left, "Left.")).components["iou"] == 1.0
    assert prior.score(task("x", "a", b"", left, "Right.")).components == {
        "iou": 0.0,
        "click": 0.0,
        "format": 1.0,
    }
    assert (
        prior.score(task("x", "a", b"", right, "Never seen.")).value == 1.0
    )  # most rows of the page are on the right
    assert prior.score(task("x", "z", b"", right, "Never seen.")).value == 1.0
