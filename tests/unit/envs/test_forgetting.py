"""Long episodes: the oldest images leave the context, in a context that begins anew."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayloop.chat.rendering import Renderer
from rayloop.config.model import ModelSettings
from rayloop.core.protocols import TrainItem
from rayloop.core.types import EndReason, Trajectory
from rayloop.envs.context import FORGOTTEN
from rayloop.envs.episode import summarize
from rayloop.grpo.batch import by_segment, segmented
from rayloop.rollout.plain import plain_trajectory, trajectory_from_plain
from tests.support.scripted_engine import ScriptedEngine
from tests.unit.envs.test_episode import END, TASK, run, scripted


@pytest.fixture(scope="module")
def renderer(vision_folder: Path) -> Renderer:
    return Renderer(ModelSettings(path=str(vision_folder)), 1_000_000)


def screen(number: int) -> dict[str, Any]:
    return {"text": f"screen {number}", "images": [{"width": 56, "height": 28 * (number + 1)}]}


def long(renderer: Renderer, turns: int = 6, **settings: Any) -> tuple[Trajectory, ScriptedEngine]:
    chosen = {
        "max_turns": 20,
        "max_tokens": 2000,
        "max_images": 4,
        "when_full": "forget",
        **settings,
    }
    said = [(f"look {number}", END) for number in range(turns + 1)]
    return run(renderer, scripted(*map(screen, range(turns))), said, **chosen)


def test_the_oldest_images_become_words_and_the_policys_turns_stay(renderer: Renderer) -> None:
    trajectory, engine = long(renderer)
    assert trajectory.end_reason is EndReason.DONE
    assert [len(prompt.images) for prompt, _ in engine.requests] == [1, 2, 3, 4, 3, 4, 3]
    heights = [[shown.ref.height for shown in prompt.images] for prompt, _ in engine.requests]
    assert heights[4:] == [[56, 84, 112], [56, 84, 112, 140], [56, 140, 168]]
    text = renderer.decode(engine.requests[4][0].token_ids)
    order = [
        "Click the button",
        "look 0",
        "screen 0" + FORGOTTEN,
        "look 1",
        "screen 1" + FORGOTTEN,
        "look 2",
        "screen 2",
    ]
    assert [text.index(part) for part in order] == sorted(text.index(part) for part in order)
    assert text.count(FORGOTTEN) == 2


def test_every_sampled_token_is_one_of_exactly_one_segment(renderer: Renderer) -> None:
    trajectory, engine = long(renderer)
    segments = trajectory.segments
    assert [len(segment.sampled_turns) for segment in segments] == [4, 2, 1]
    assert [turn for segment in segments for turn in segment.turns] == list(trajectory.turns)
    seen = iter(engine.requests)
    for segment in segments:
        flat = segment.flatten()
        assert not flat.loss_mask[0]
        for turn in segment.sampled_turns:
            prompt, _ = next(seen)
            whole = (*prompt.token_ids, *turn.token_ids)
            assert tuple(flat.token_ids[: len(whole)]) == whole
            assert flat.loss_mask[len(prompt.token_ids) : len(whole)].all()
    assert set(trajectory.image_bytes) == {image.sha256 for image in trajectory.images}


def test_what_the_driver_knows_counts_an_image_once(renderer: Renderer) -> None:
    summary = summarize(long(renderer)[0], TASK, 1.0, renderer.image_token)
    assert (summary.images, summary.observation_images, summary.images_consistent) == (7, 6, True)


def test_states_are_those_of_an_episode_that_forgets_nothing(renderer: Renderer) -> None:
    trajectory, _ = long(renderer)
    whole, _ = long(renderer, max_images=20)
    assert (len(trajectory.segments), len(whole.segments)) == (3, 1)
    assert trajectory.states == whole.states
    assert len(set(trajectory.states)) == 7
    assert summarize(trajectory, TASK, 1.0, renderer.image_token).turn_rewards == (0.0,) * 7


@pytest.mark.parametrize(
    ("settings", "reason", "turns"),
    [
        ({"when_full": "end"}, EndReason.MAX_IMAGES, 4),
        ({"max_images": 1}, EndReason.MAX_IMAGES, 1),
        ({"max_images": 2}, EndReason.DONE, 7),
        ({"max_tokens": 100}, EndReason.OVER_LENGTH, 2),
    ],
)
def test_how_it_ends(
    renderer: Renderer, settings: dict[str, Any], reason: EndReason, turns: int
) -> None:
    trajectory, engine = long(renderer, **settings)
    assert (trajectory.end_reason, len(engine.requests)) == (reason, turns)


def test_it_survives_a_checkpoint(renderer: Renderer) -> None:
    trajectory, _ = long(renderer)
    assert trajectory_from_plain(plain_trajectory(trajectory)) == trajectory


def test_a_segment_is_trained_with_its_part_of_the_reference(renderer: Renderer) -> None:
    trajectory, _ = long(renderer)
    n = sum(len(turn.token_ids) for turn in trajectory.sampled_turns)
    item = TrainItem(trajectory, 0.5, np.arange(n), lag=2)
    first, second = segmented([[item], [item]])
    assert [part.trajectory for part in first] == list(trajectory.segments)
    assert all(a.trajectory is b.trajectory for a, b in zip(first, second, strict=True))
    assert np.concatenate([part.ref_logprobs for part in first]).tolist() == list(range(n))
    for part in first:
        assert len(part.ref_logprobs) == part.trajectory.flatten().loss_mask.sum()
        assert (part.advantage, part.lag) == (0.5, 2)
    with pytest.raises(ValueError, match=f"3 reference log-probs for {n} sampled tokens"):
        segmented([[dataclasses.replace(item, ref_logprobs=[0, 0, 0])]])
    scored = by_segment(
        [trajectory, trajectory],
        lambda parts: [p.flatten().rollout_logprobs[p.flatten().loss_mask] for p in parts],
    )
    assert [len(array) for array in scored] == [n, n]
