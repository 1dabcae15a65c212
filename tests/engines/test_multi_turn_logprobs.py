"""Multi-turn episodes with images from tools, played by real engines: what is trained is what was
sampled, bit for bit in tokens and within 1e-3 in log-probs (float32).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rayloop.chat.calls import written
from rayloop.chat.rendering import Renderer
from rayloop.core.protocols import StepResult
from rayloop.core.types import (
    Completion,
    EndReason,
    ImageSource,
    Message,
    RolloutRequest,
    Sampling,
    Task,
    TokenPrompt,
    Trajectory,
    TrajectoryId,
)
from rayloop.engines.settings import ModelSettings
from rayloop.envs.episode import run_episode
from rayloop.envs.image_tools import ImageTools
from rayloop.envs.instance import InThread
from rayloop.envs.settings import EpisodeSettings
from tests.contracts.test_engine import Served
from tests.engines.prompts import image
from tests.engines.training import engine as trainer

pytestmark = pytest.mark.timeout(300)

TURNS, EPISODES = 3, 6
LIMIT = 1e-3
BOXES = ([0.0, 0.0, 0.5, 1.0], [0.25, 0.25, 1.0, 0.75], [0.1, 0.0, 0.9, 0.6])


class Looking(ImageTools):
    """A policy of random weights calls no tool: whatever it writes, its k-th turn zooms into the
    k-th box.
    """

    def step(self, text: str) -> StepResult:
        self.turns = getattr(self, "turns", 0) + 1
        return super().step(
            written("zoom", {"box": BOXES[self.turns % len(BOXES)], "factor": 1.5, "image": 0})
        )


class Recording:
    """The engine, and what it was asked and answered at each turn."""

    def __init__(self, served: Served) -> None:
        self.served, self.turns = served, list[tuple[TokenPrompt, Completion]]()

    async def generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        completion: Completion = await self.served.engine.generate(prompt, sampling)
        self.turns.append((prompt, completion))
        return completion


@pytest.fixture(
    scope="module", params=["transformers", pytest.param("vllm", marks=pytest.mark.vllm)]
)
def served(request: pytest.FixtureRequest, tiny_vlm: Path) -> Iterator[Served]:
    engine = Served(request.param, tiny_vlm)
    engine.run(engine.load(engine.start))
    try:
        yield engine
    finally:
        engine.close()


def played(served: Served, number: int, **settings: object) -> tuple[Trajectory, Recording]:
    shown = image(56 + 28 * (number % 3), 84, seed=number)
    task = Task(f"t{number}", (Message("user", ("What is there? ", ImageSource(data=shown.data))),))
    asked = RolloutRequest(
        task, TrajectoryId(number, 0), 0, number, Sampling(temperature=0.9, max_tokens=12 + number)
    )
    tools = ImageTools.Settings(image_tools=("zoom",), min_side=14, role="user")
    recording = Recording(served)
    chosen = EpisodeSettings.model_validate({"max_turns": TURNS, **settings})
    owned = InThread("Looking", lambda: Looking(tools))
    renderer = Renderer(ModelSettings(path=str(served.folder)))
    return served.run(run_episode(asked, owned, renderer, chosen, recording.generate)), recording


def test_three_turns_with_images_are_trained_as_they_were_sampled(served: Served) -> None:
    episodes = [played(served, number) for number in range(EPISODES)]
    for trajectory, recording in episodes:
        assert trajectory.end_reason is EndReason.MAX_TURNS
        assert len(trajectory.images) == len(recording.turns) == TURNS
        flat = trajectory.flatten()
        sampled = np.zeros(len(flat.token_ids), np.bool_)
        for prompt, completion in recording.turns:
            end = len(prompt.token_ids) + len(completion.token_ids)
            assert tuple(flat.token_ids[:end]) == (*prompt.token_ids, *completion.token_ids)
            assert tuple(flat.rollout_logprobs[len(prompt.token_ids) : end]) == tuple(
                np.float32(completion.logprobs)
            )
            assert [shown.ref for shown in prompt.images] == list(
                trajectory.images[: len(prompt.images)]
            )
            sampled[len(prompt.token_ids) : end] = True
        assert (flat.loss_mask == sampled).all()
    logprob_check(served, [trajectory for trajectory, _ in episodes])


def test_what_is_left_after_forgetting_images_is_trained_as_it_was_sampled(served: Served) -> None:
    """Each new context is a sequence of its own, whose sampled tokens are trained once."""
    episodes = [
        played(served, number, max_turns=7, max_images=4, when_full="forget")
        for number in range(EPISODES)
    ]
    for trajectory, recording in episodes:
        assert trajectory.end_reason is EndReason.MAX_TURNS
        segments = trajectory.segments
        assert len(segments) > 2
        asked = iter(recording.turns)
        for segment in segments:
            flat = segment.flatten()
            sampled = np.zeros(len(flat.token_ids), np.bool_)
            for _ in segment.sampled_turns:
                prompt, completion = next(asked)
                end = len(prompt.token_ids) + len(completion.token_ids)
                assert tuple(flat.token_ids[:end]) == (*prompt.token_ids, *completion.token_ids)
                assert [shown.ref for shown in prompt.images] == list(
                    segment.images[: len(prompt.images)]
                )
                assert len(prompt.images) <= 4
                sampled[len(prompt.token_ids) : end] = True
            assert (flat.loss_mask == sampled).all()
        assert next(asked, None) is None
    logprob_check(served, [trajectory for trajectory, _ in episodes])


def logprob_check(served: Served, trajectories: list[Trajectory]) -> None:
    """The trainer's log-probs are the engine's; swapping the images shows that they were looked at."""
    with trainer(served.folder) as engine:
        ours = engine.logprobs(trajectories)
        swapped = engine.logprobs(trajectories, swap_images=True)
    theirs = [flat.rollout_logprobs[flat.loss_mask] for flat in (t.flatten() for t in trajectories)]
    gaps = np.concatenate([abs(a - b) for a, b in zip(ours, theirs, strict=True)])
    unseen = np.concatenate([abs(a - b) for a, b in zip(ours, swapped, strict=True)])
    print(
        f"\n{served.kind}: {len(gaps)} sampled tokens of {len(trajectories)} episodes: |log-prob"
        f" gap| mean {gaps.mean():.1e}, max {gaps.max():.1e}; with other images {unseen.mean():.1e}"
    )
    assert gaps.max() < LIMIT
    assert unseen.mean() > 10 * LIMIT
