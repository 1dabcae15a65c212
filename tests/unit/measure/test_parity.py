"""The comparison of log-probs: its figures by hand, and where a difference begins."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import numpy as np
import pytest

from rayloop.measure.parity import (
    Axis,
    Floats,
    Gap,
    LogprobSource,
    Play,
    Row,
    SampledTurn,
    agreement,
    gap,
    rows,
)

LIMIT = 1e-3


def floats(*values: float) -> Floats:
    return np.array(values, np.float32)


def pair(engine: Floats, trainer: Floats) -> SampledTurn:
    logprobs = {LogprobSource.ENGINE: engine, LogprobSource.TRAINER: trainer}
    return SampledTurn(Axis.TEXT, "text", Play.FIRST, 1, 0, 10, logprobs)


def turn(
    axis: Axis,
    number: int,
    images: int,
    *,
    off: float = 0.0,
    play: Play = Play.FIRST,
    depth: int = 10,
    changed: float = 0.5,
    picture: str = "",
) -> SampledTurn:
    """Two tokens, on which the trainer is ``off`` from the engine."""
    engine = floats(-1.0, -2.0)
    trainer = engine + np.float32(off)
    logprobs = {
        LogprobSource.ENGINE: engine,
        LogprobSource.TRAINER: trainer,
        LogprobSource.WRONG_IMAGES: trainer + np.float32(changed if images else 0.0),
    }
    name = {Axis.IMAGES: f"{images} images", Axis.DEPTH: f"depth {depth}"}.get(axis, axis)
    return SampledTurn(axis, name, play, number, images, depth, logprobs, picture)


def difference(*turns: SampledTurn) -> Gap:
    found = gap(turns)
    assert found is not None
    return found


def test_the_figures_of_a_gap() -> None:
    found = difference(
        pair(floats(-1.0, -2.0), floats(-1.1, -1.7)), pair(floats(-0.5), floats(-0.5))
    )
    d = [-0.1, 0.3, 0.0]
    assert found.mean == pytest.approx(0.4 / 3, rel=1e-5)
    assert found.largest == pytest.approx(0.3, rel=1e-5)
    assert found.k3 == pytest.approx(sum(math.exp(x) - x - 1 for x in d) / 3, rel=1e-5)
    assert found.outside == pytest.approx(1 / 3)
    assert found.tokens == 3


def test_a_ratio_beyond_the_clip_range_counts_on_both_sides() -> None:
    first = floats(-1.0, -1.0, -1.0, -1.0)
    second = first + np.log(np.float32([0.79, 0.81, 1.19, 1.21]))
    assert difference(pair(first, second)).outside == 0.5


def test_a_token_that_the_engine_called_impossible_is_no_infinity() -> None:
    assert math.isfinite(difference(pair(floats(-1000.0), floats(-1.0))).k3)


def test_a_log_prob_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="a log-prob of engine or trainer is not a number"):
        gap([pair(floats(math.nan), floats(-1.0))])


def test_without_a_source_there_is_no_gap() -> None:
    one = pair(floats(-1.0), floats(-1.0))
    assert gap([]) is None
    assert gap([one], LogprobSource.THEIRS) is None


def test_rows_are_in_the_order_in_which_turns_come_first() -> None:
    places = [
        (Axis.TEXT, 1, 0, 10),
        (Axis.TEXT, 2, 0, 20),
        (Axis.IMAGES, 1, 2, 10),
        (Axis.IMAGES, 1, 4, 10),
        (Axis.SCREENS, 1, 1, 10),
        (Axis.SCREENS, 2, 2, 20),
        (Axis.DEPTH, 1, 1, 500),
        (Axis.DEPTH, 1, 1, 2000),
    ]
    turns = []
    for play in Play:
        for axis, number, images, depth in places:
            turns.append(turn(axis, number, images, depth=depth, play=play))
    found = rows(turns)
    assert [(row.axis, row.turn, row.images, row.depth) for row in found] == places
    assert {row.gap.tokens for row in found} == {6}


def test_a_row_has_its_plays_and_is_plain_json() -> None:
    (row,) = rows(
        [
            turn(Axis.IMAGES, 1, 1),
            turn(Axis.IMAGES, 1, 1, off=0.5, play=Play.REPEAT),
            turn(Axis.IMAGES, 1, 1, play=Play.GREEDY),
        ]
    )
    assert row.plays == {Play.FIRST: 0, Play.REPEAT: 0.5, Play.GREEDY: 0}
    assert row.failing(LIMIT) == [Play.REPEAT]
    assert row.gap.tokens == 6
    assert row.greedy_tokens == 2
    assert json.loads(json.dumps(asdict(row)))["plays"]["repeat"] == 0.5


def table(*wrong: tuple[Axis, int, int], blind: bool = False) -> list[Row]:
    """Three turns of text, one to four images, three screens, two depths; ``wrong``: rows that
    differ.
    """
    places = [
        *((Axis.TEXT, number, 0, 10) for number in (1, 2, 3)),
        *((Axis.IMAGES, 1, images, 10) for images in (1, 2, 4)),
        *((Axis.SCREENS, number, number, 10) for number in (1, 2, 3)),
        *((Axis.DEPTH, 1, 1, depth) for depth in (500, 2000)),
    ]
    turns = []
    for axis, number, images, depth in places:
        key = (axis, depth if axis is Axis.DEPTH else number, images)
        off = 0.1 if key in wrong else 0.0
        turns.append(
            turn(axis, number, images, off=off, depth=depth, changed=0.0 if blind else 0.5)
        )
    return rows(turns)


LATER_SCREENS = [(Axis.SCREENS, 2, 2), (Axis.SCREENS, 3, 3)]


@pytest.mark.parametrize(
    ("wrong", "begins", "number", "sentence"),
    [
        ([], "", 0, "they agree in every row"),
        ([(Axis.TEXT, 1, 0), (Axis.IMAGES, 1, 1)], "turn", 1, "text differs"),
        ([(Axis.TEXT, 3, 0)], "turn", 3, "earlier turns agree"),
        ([(Axis.IMAGES, 1, 1), (Axis.SCREENS, 1, 1)], "image", 1, "M-RoPE"),
        ([(Axis.IMAGES, 1, 2), *LATER_SCREENS], "image", 2, "the order of images"),
        # Prompts with 2 and 4 images leave the third open, which the third screen is.
        ([(Axis.IMAGES, 1, 4), (Axis.SCREENS, 3, 3)], "image", 3, "the order of images"),
        ([(Axis.IMAGES, 1, 4)], "image", 4, "the order of images"),
        (LATER_SCREENS, "turn", 2, "positions behind an image"),
        ([(Axis.DEPTH, 2000, 1)], "depth", 2000, "shorter prompts agree"),
    ],
)
def test_a_difference_begins_where_the_first_row_differs(
    wrong: list[tuple[Axis, int, int]], begins: str, number: int, sentence: str
) -> None:
    found = agreement(table(*wrong), LIMIT)
    assert found.agrees == (not wrong)
    assert (found.begins, found.number) == (begins, number)
    assert sentence in found.sentence


def test_a_resized_image_is_named_with_its_size() -> None:
    turns = [
        turn(Axis.IMAGES, 1, 1, picture="224x224 pixels"),
        turn(Axis.IMAGES, 1, 2, off=1.0, picture="150x100 pixels, resized to 140x112"),
    ]
    found = agreement(rows(turns), LIMIT)
    assert "image 2 (150x100 pixels, resized to 140x112)" in found.sentence
    assert "look at the resize" in found.sentence


@pytest.mark.parametrize(
    ("plays", "cause"),
    [
        ([Play.REPEAT], "the cache of prefixes"),
        ([Play.FIRST, Play.REPEAT], "the temperature"),
        ([Play.FIRST, Play.REPEAT, Play.GREEDY], "M-RoPE"),
    ],
)
def test_the_plays_that_differ_narrow_the_cause(plays: list[Play], cause: str) -> None:
    turns = [turn(Axis.IMAGES, 1, 1, off=0.5 if play in plays else 0.0, play=play) for play in Play]
    found = agreement(rows(turns), LIMIT)
    assert found.plays == plays
    assert cause in found.sentence


def test_a_model_that_does_not_react_to_other_images_is_blind() -> None:
    assert agreement(table(), LIMIT).blind == []
    found = agreement(table(blind=True), LIMIT)
    assert found.agrees
    assert len(found.blind) == 8


def test_another_trainer_is_compared_with_the_engine() -> None:
    engine = floats(-1.0, -2.0)
    logprobs = {
        LogprobSource.ENGINE: engine,
        LogprobSource.TRAINER: engine + 1,
        LogprobSource.THEIRS: engine + np.float32(0.5),
    }
    (row,) = rows([SampledTurn(Axis.TEXT, "text", Play.FIRST, 1, 0, 10, logprobs)])
    assert row.theirs is not None
    assert row.theirs.mean == 0.5
    assert row.wrong_images is None
