"""The recipe of PyVision: scenes, rows, and demonstrations as the supervised stage learns them."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rayloop.core.failures import DataFailure
from rayloop.core.types import ImageSource, Message, Task
from rayloop.recipes.pyvision.data import QuestionRows, answered
from rayloop.recipes.pyvision.prepare import (
    CARDS,
    COLOURED_DOT_PIXELS,
    COUNTED_DOT_PIXELS,
    DOTS,
    PAGE_SIDE_PIXELS,
    scene,
)
from rayloop.sft.stage import Examples, SftConfig
from tools.makers.code_demonstrations import CluedRows, CodeDemonstrations, code

SHOWN = 112
"""Pixels of a page's side as the tiny model sees it."""


@pytest.mark.parametrize("seed", range(20))
def test_the_code_of_an_expert_finds_the_answer(seed: int) -> None:
    made = scene("count", seed)
    (found,) = re.findall(
        r"^<code>\n```python\n(.*)\n```\n</code>$", code("count", made.box), re.DOTALL
    )
    said: list[Any] = []
    exec(found, {"image_clue_0": made.image, "print": said.append})
    assert [str(value) for value in said] == [made.answer]
    dot = scene("dot", seed)
    colours = {tuple(pixel) for row in np.asarray(dot.image.crop(dot.box)) for pixel in row}
    assert colours & set(DOTS.values()) == {DOTS[dot.answer]}
    assert len(colours & set(CARDS.values())) == 1


def test_scenes_are_those_of_their_seed_and_too_small_to_read() -> None:
    first, again, other = scene("dot", 5), scene("dot", 5), scene("dot", 6)
    assert first.image.tobytes() == again.image.tobytes() != other.image.tobytes()
    assert (first.question, first.answer) == (again.question, again.answer)
    assert first.image.size == (PAGE_SIDE_PIXELS, PAGE_SIDE_PIXELS)
    assert max(COUNTED_DOT_PIXELS, COLOURED_DOT_PIXELS) * SHOWN / PAGE_SIDE_PIXELS < 1


def test_rows_of_pyvision_and_flat_ones_give_the_same_task(tmp_path: Path) -> None:
    flat = {
        "id": "7",
        "image": "a.png",
        "question": "How many?",
        "answer": 3,
        "kind": "de_visual_search",
    }
    original = {
        "prompt": [{"role": "user", "content": "<image>How many?"}],
        "data_source": "de_visual_search",
        "reward_model": {"ground_truth": 3, "style": "model"},
        "extra_info": {"index": 7, "question": "How many?"},
        "mm_hint": {"hint_path": "a.png", "hint_type": "image"},
    }
    reader = QuestionRows(QuestionRows.Settings())
    first, second = (reader.task(row, "rows:1", tmp_path) for row in (flat, original))
    assert (first.id, first.messages, first.ground_truth, first.source) == (
        "7",
        second.messages,
        "3",
        second.source,
    )
    assert first.messages == (Message("user", (ImageSource(str(tmp_path / "a.png")), "How many?")),)
    with pytest.raises(DataFailure, match="only hints that are images"):
        reader.task(
            {**original, "mm_hint": {"hint_path": "a.mp4", "hint_type": "video"}},
            "rows:1",
            tmp_path,
        )


def demonstration(folder: Path) -> Task:
    for name, side in (("page", 56), ("seen", 84)):
        Image.new("RGB", (side, 56), "red").save(folder / f"{name}.png")
    row = {
        "id": "d",
        "image": "page.png",
        "question": "How many dots?",
        "answer": "4",
        "kind": "count",
        "code": "<code>\n```python\nlook()\n```\n</code>",
        "seen": {
            "role": "user",
            "parts": ["Text Result:\n4", {"image": "seen.png"}, "that is all"],
        },
    }
    return CluedRows(CluedRows.Settings()).task(row, "rows:1", folder)


def examples(vision_folder: Path, **settings: Any) -> Examples:
    use = {"use": "tools.makers.code_demonstrations:CodeDemonstrations", "with": settings}
    rows = {"train": "x.jsonl", "reader": {"use": "rayloop.recipes.pyvision.data:QuestionRows"}}
    given = {
        "output": "x",
        "steps": 1,
        "model": {"path": str(vision_folder)},
        "data": rows,
        "answers": use,
    }
    return Examples(SftConfig.model_validate(given))


def test_a_demonstration_is_trained_where_the_policy_speaks(
    vision_folder: Path, tmp_path: Path
) -> None:
    made = examples(vision_folder, hesitant=0)
    trajectory = made.item(demonstration(tmp_path), random.Random(0)).trajectory
    assert [turn.sampled for turn in trajectory.turns] == [False, True, False, True]
    said = [made.renderer.shown(turn.token_ids) for turn in trajectory.turns]
    assert said[0].startswith("<|im_start|>user\n<image_clue_0><|vision_start|>")
    assert said[1] == "<code>\n```python\nlook()\n```\n</code><|im_end|>"
    assert said[2].startswith("\n<|im_start|>user\nText Result:\n4<|vision_start|>")
    assert said[2].endswith("that is all<|im_end|>\n<|im_start|>assistant\n")
    assert said[3] == answered("4") + "<|im_end|>"
    assert [(image.width, image.height) for image in trajectory.images] == [(56, 56), (84, 56)]
    assert [len(turn.images) for turn in trajectory.turns] == [1, 0, 1, 0]


def test_who_hesitates_guesses(vision_folder: Path, tmp_path: Path) -> None:
    task = demonstration(tmp_path)
    guesses = {
        examples(vision_folder, hesitant=1, unsure=1).answers.answer(task, random.Random(s))
        for s in range(50)
    }
    assert guesses == {answered(str(number)) for number in range(1, 6)}
    answers = CodeDemonstrations(CodeDemonstrations.Settings(hesitant=0.25))
    direct = [isinstance(answers.answer(task, random.Random(seed)), str) for seed in range(400)]
    assert 70 < sum(direct) < 130
    bare = QuestionRows(QuestionRows.Settings()).task(
        {"id": "1", "image": "page.png", "question": "?", "answer": "4"}, "rows:1", tmp_path
    )
    with pytest.raises(DataFailure, match="seen"):
        CodeDemonstrations(CodeDemonstrations.Settings(hesitant=0)).answer(bare, random.Random(0))
