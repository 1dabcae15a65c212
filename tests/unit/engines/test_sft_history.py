"""The supervised stage trains each answer of a conversation in the context that the history gives it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from rayloop.chat.rendering import Renderer
from rayloop.core.types import ImageSource, Message, Task, Trajectory
from rayloop.sft.stage import Examples, SftConfig
from tests.support.pictures import picture

ANSWERS = [f"thought {number}</think>press {number}" for number in range(4)]


def conversation(task: Task, rng: random.Random) -> list[Message]:
    """Four answers, with a screen between two of them."""
    messages = []
    for number, answer in enumerate(ANSWERS):
        screen = ImageSource(data=picture(56, 28 * (number + 2)))
        messages += [Message("assistant", (answer,)), Message("user", (screen,))]
    return messages[:-1]


def last_answer(task: Task, rng: random.Random) -> str:
    """The last answer of the conversation, for a row with the others in its prompt."""
    return ANSWERS[-1]


def examples(folder: Path, history: Any, answers: str = "conversation") -> Examples:
    config = SftConfig.model_validate(
        {
            "output": "unused",
            "steps": 1,
            "batch_size": 1,
            "model": {"path": str(folder)},
            "data": {"train": "unused"},
            "answers": {"use": f"{__name__}:{answers}"},
            "history": history,
        }
    )
    return Examples(config)


def example(folder: Path, history: Any) -> tuple[Trajectory, Renderer]:
    task = Task("t", (Message("user", ("Send the form.", ImageSource(data=picture(28, 28)))),))
    made = examples(folder, history)
    return made.item(task, random.Random(0)).trajectory, made.renderer


@pytest.mark.parametrize(
    ("history", "contexts"),
    [("full", 1), ("drop_thoughts", 4), ({"last_images": 1}, 3), ({"last_turns": 2}, 3)],
)
def test_every_answer_is_trained_once(vision_folder: Path, history: Any, contexts: int) -> None:
    trajectory, renderer = example(vision_folder, history)
    whole, _ = example(vision_folder, "full")
    assert len(trajectory.segments) == contexts
    answers = [renderer.answer(text, opening=True) for text in ANSWERS]
    assert [turn.token_ids for turn in trajectory.sampled_turns] == answers
    assert trajectory.sampled_tokens == whole.sampled_tokens
    for segment in trajectory.segments:
        assert not segment.flatten().loss_mask[0]


def test_what_the_history_leaves_out_is_not_in_a_context(vision_folder: Path) -> None:
    trajectory, renderer = example(vision_folder, {"last_turns": 1})
    *_, last = trajectory.segments
    text = renderer.decode([token for turn in last.turns for token in turn.token_ids])
    assert "Previous actions:\nStep 1: press 0\nStep 2: press 1\nStep 3: press 2\n" in text
    assert "thought 2" not in text
    # The image of the task's row, and the screen before the last answer.
    assert [image.height for image in last.images] == [28, 112]


@pytest.mark.parametrize(
    ("history", "heights"),
    [
        ("full", [56, 84, 112]),
        ("drop_thoughts", [56, 84, 112]),
        ({"last_images": 1}, [112]),
        ({"last_turns": 2}, [84, 112]),
    ],
)
def test_a_row_with_earlier_answers_in_its_prompt_shows_what_the_episode_did(
    vision_folder: Path, history: Any, heights: list[int]
) -> None:
    begin = Message("user", ("Send the form.",))
    rng = random.Random(0)
    *before, _ = conversation(Task("t", ()), rng)
    episode = examples(vision_folder, history).item(Task("t", (begin,)), rng).trajectory
    row_of_the_last_turn = Task("t:4", (begin, *before))
    row = examples(vision_folder, history, "last_answer").item(row_of_the_last_turn, rng)

    *_, in_episode = episode.segments
    (in_row,) = row.trajectory.segments
    assert in_row.flatten().token_ids.tolist() == in_episode.flatten().token_ids.tolist()
    assert [image.height for image in in_row.images] == heights
    assert row.trajectory.sampled_turns == episode.sampled_turns[-1:]
