"""The recipes' rows and rewards, on the rows that are in the repository."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloop.config.settings import Component
from rayloop.core.failures import DataFailure
from rayloop.core.groups import Outcome, Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import EndReason, ImageSource, Sampling, Task, Trajectory, TrajectoryId
from rayloop.data.dataset import Dataset
from rayloop.data.images import probe
from rayloop.recipes import write_rows
from rayloop.recipes.arc_vision.boxes import click_hits, iou, parse_box
from rayloop.recipes.arc_vision.data import Box, GroundingRows
from rayloop.recipes.arc_vision.reward import IoUReward
from rayloop.recipes.digits.data import DigitRows, SortReward, rows
from rayloop.recipes.digits.prepare import main
from tests.support.storage import full

ROOT = Path(__file__).parents[3]
GROUNDING = Path(__file__).parents[2] / "data" / "grounding"
EMPTY_TRAJECTORY = Trajectory(TrajectoryId(0, 0), 0, "t", 0, (), Sampling(), EndReason.DONE)


def grounding(split: str, **settings: Any) -> Dataset:
    reader = Component.model_validate(
        {"use": "rayloop.recipes.arc_vision.data:GroundingRows", "with": settings}
    ).build()
    return Dataset(GROUNDING / f"{split}.jsonl", reader, True, lambda failure: None)


def test_rows_on_a_full_disk_leave_the_former_ones(tmp_path: Path) -> None:
    """Half of a file of rows would be a smaller data set."""
    file = write_rows(tmp_path, "train", [{"id": 1}])
    with full(file.stat().st_size), pytest.raises(OSError, match="File too large"):
        write_rows(tmp_path, "train", [{"id": 2}, {"id": 3}])
    assert file.read_text(encoding="utf-8") == '{"id": 1}\n'


@pytest.mark.parametrize(("split", "count"), [("train", 24), ("test", 8)])
def test_grounding_rows_are_tasks_with_intact_images(split: str, count: int) -> None:
    dataset = grounding(split)
    assert len(dataset) == count
    for task in dataset:
        text, image = task.messages[0].parts
        assert isinstance(text, str)
        assert text.startswith(f"{task.extra['instruction']}\n")
        assert isinstance(image, ImageSource)
        assert probe(image, 100_000)[1:] == (160, 210)
        assert task.id.split("-")[1:-1] == task.source.split("-")


def test_the_prompt_is_a_setting() -> None:
    task = grounding("test", prompt="Find: {instruction}", image_first=True)[0]
    image, text = task.messages[0].parts
    assert isinstance(image, ImageSource)
    assert text == 'Find: Click on the "next" button.'


@pytest.mark.parametrize(
    "bbox",
    [
        None,
        [0.1, 0.2, 0.3],
        [0.1, 0.2, 0.1, 0.4],
        [0.3, 0.2, 0.1, 0.4],
        [10, 20, 300, 400],
        "0.1,0.2,0.3,0.4",
        [0.1, 0.2, 0.3, float("nan")],
        [False, 0.2, True, 0.4],
    ],
)
def test_a_row_without_a_proper_box_is_refused(bbox: Any) -> None:
    row = {"id": "a", "image": "a.png", "instruction": "Click.", "bbox": bbox}
    with pytest.raises(DataFailure, match="rows:1"):
        GroundingRows(GroundingRows.Settings()).task(row, "rows:1", Path())


TRUTH: Box = (0.2, 0.2, 0.6, 0.6)


def graded(text: str) -> Outcome:
    task = Task("t", (), ground_truth=TRUTH)
    return IoUReward().score(
        EMPTY_TRAJECTORY, task, ScoreContext(0, ["<bbox>[0.2,0.2,0.6,0.6]</bbox>", text])
    )


@pytest.mark.parametrize(
    ("text", "value", "click"),
    [
        ("<bbox>[0.2,0.2,0.6,0.6]</bbox>", 1.0, 1.0),
        ("It is <bbox> [ 0.20, 0.2 ,0.6,0.60] </bbox>.", 1.0, 1.0),
        ("<bbox>[0,0,1,1]</bbox>", 0.16, 1.0),
        ("<bbox>[0.3,0.3,0.7,0.7]</bbox>", 9 / 23, 1.0),
        ("<bbox>[0.4,0.4,0.9,0.9]</bbox>", 4 / 37, 0.0),
        ("<bbox>[0.7,0.7,0.9,0.9]</bbox>", 0.0, 0.0),
        ("<bbox>[0.7,0.7,0.9,0.9]</bbox><bbox>[0.2,0.2,0.6,0.6]</bbox>", 1.0, 1.0),
    ],
)
def test_a_box_is_paid_its_overlap(text: str, value: float, click: float) -> None:
    outcome = graded(text)
    assert isinstance(outcome, Scored)
    assert outcome.value == outcome.components["iou"] == pytest.approx(value)
    assert (outcome.components["click"], outcome.components["format"], outcome.flags) == (
        click,
        1.0,
        (),
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0.2,0.2,0.6,0.6",
        "<bbox>[0.2,0.2,0.6]</bbox>",
        "<bbox>[20,20,60,60]</bbox>",
        "<bbox>[0.6,0.2,0.2,0.6]</bbox>",
        "<bbox>[0.2,0.2,0.2,0.6]</bbox>",
        "<bbox>[0.2,0.2,0.6,0.6",
        "<bbox>[-0.2,0.2,0.6,0.6]</bbox>",
        "<bbox>[nan,0,1,1]</bbox>",
    ],
)
def test_an_answer_without_a_box_scores_nothing(text: str) -> None:
    assert graded(text) == Scored(0.0, {"iou": 0.0, "click": 0.0, "format": 0.0}, ("unparsable",))


def boxes() -> st.SearchStrategy[Box]:
    edges = st.lists(st.integers(0, 100), min_size=2, max_size=2, unique=True).map(sorted)
    return st.tuples(edges, edges).map(
        lambda e: (e[0][0] / 100, e[1][0] / 100, e[0][1] / 100, e[1][1] / 100)
    )


@pytest.mark.parametrize("loose", [0.0, 0.4])
def test_the_boxes_of_a_hasty_annotator_lie_outside_the_true_one_and_vary(loose: float) -> None:
    answers = Component.model_validate(
        {"use": "rayloop.recipes.arc_vision.data:BoxAnswers", "with": {"loose": loose}}
    ).build()
    for task in grounding("test"):
        x1, y1, x2, y2 = task.ground_truth
        said = [parse_box(answers.answer(task, random.Random(seed))) for seed in range(20)]
        assert len(set(said)) > 5 if loose else len(set(said)) == 1
        for box in said:
            assert box is not None
            outside = (x1 - box[0], y1 - box[1], box[2] - x2, box[3] - y2)
            sides = (x2 - x1, y2 - y1) * 2
            assert all(
                -0.0051 <= out <= loose * side + 0.0051
                for out, side in zip(outside, sides, strict=True)
            )


@given(a=boxes(), b=boxes())
def test_overlap_is_symmetric_bounded_and_one_for_equals(a: Box, b: Box) -> None:
    assert 0 <= iou(a, b) <= 1
    assert iou(a, b) == pytest.approx(iou(b, a))
    assert iou(a, a) == pytest.approx(1)
    assert click_hits(a, a)
    assert parse_box(f"<bbox>{list(a)}</bbox>".replace(" ", "")) == a


def sorted_digits(text: str) -> Outcome:
    task = Task("t", (), ground_truth=[1, 2, 3, 3])
    return SortReward().score(EMPTY_TRAJECTORY, task, ScoreContext(0, [text]))


@pytest.mark.parametrize(
    ("text", "value", "exact"),
    [
        ("1 2 3 3", 1.0, 1.0),
        (" 1,2,3,3\n", 1.0, 1.0),
        ("1233", 1.0, 1.0),
        ("1 3 2 3", 0.5, 0.0),
        ("1 2", 0.5, 0.0),
        ("1 2 3 3 3 3 3 3", 0.5, 0.0),
        ("9", 0.0, 0.0),
    ],
)
def test_sorting_is_paid_by_right_positions(text: str, value: float, exact: float) -> None:
    assert sorted_digits(text) == Scored(value, {"exact": exact, "format": 1.0})


@pytest.mark.parametrize("text", ["", " ", "one", "1 2 three", "1 2 3 3!", "١٢٣٣"])
def test_anything_but_digits_scores_nothing(text: str) -> None:
    assert sorted_digits(text) == Scored(0.0, {"exact": 0.0, "format": 0.0}, ("unparsable",))


def test_digit_rows_are_disjoint_and_repeatable() -> None:
    train, evaluation = rows(300, 50, 2, 3, seed=1)
    assert (len(train), len(evaluation)) == (300, 50)
    drawn = {tuple(row["digits"]) for row in train + evaluation}
    assert len(drawn) == 350
    assert {len(digits) for digits in drawn} == {2, 3}
    assert rows(300, 50, 2, 3, seed=1) == (train, evaluation)
    assert rows(300, 50, 2, 3, seed=2)[0] != train
    assert len(rows(9, 1, 1, 1, seed=0)[0]) == 9
    with pytest.raises(ValueError, match="only 10"):
        rows(10, 1, 1, 1, seed=0)


def test_prepare_writes_rows_that_the_reader_reads(tmp_path: Path) -> None:
    main(["--out", str(tmp_path / "digits"), "--train", "20", "--eval", "5"])
    reader = DigitRows(DigitRows.Settings(prompt="{digits} ->"))
    for split, count in (("train", 20), ("eval", 5)):
        path = tmp_path / "digits" / f"{split}.jsonl"
        dataset = Dataset(path, reader, True, lambda failure: None)
        digits = json.loads(path.read_text(encoding="utf-8").splitlines()[0])["digits"]
        assert (len(dataset), dataset[0].ground_truth) == (count, sorted(digits))
        assert dataset[0].messages[0].parts == (" ".join(map(str, digits)) + " ->",)


@pytest.mark.parametrize("digits", [None, [], "123", [1, 12], [1.0], [True]])
def test_rows_without_digits_are_refused(digits: Any) -> None:
    with pytest.raises(DataFailure, match="rows:1"):
        DigitRows(DigitRows.Settings()).task({"id": "a", "digits": digits}, "rows:1", Path())
