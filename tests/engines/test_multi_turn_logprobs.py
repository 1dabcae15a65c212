"""Multi-turn episodes with images from tools, played by real engines: what is trained is what was
sampled, bit for bit in tokens and within 1e-3 in log-probs (float32).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

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
from rayloop.envs.history import contexts
from rayloop.envs.history.past import AnswerReader, PastAnswer
from rayloop.envs.history.policies import FULL, EpisodeHistory, Window
from rayloop.envs.image_tools import ImageTools
from rayloop.envs.instance import InThread
from rayloop.envs.settings import EpisodeSettings
from tests.contracts.test_engine import Served
from tests.engines.prompts import image
from tests.engines.training import engine as trainer

pytestmark = pytest.mark.timeout(900)

TURNS, EPISODES = 3, 6
LIMIT = 1e-3
LONG = 8
"""Turns of an episode, each with an image, under every history."""
EXACT = 1e-5
"""Nats between engine and trainer for a token in float32."""
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


def played(
    served: Served, number: int, history: EpisodeHistory = FULL, **settings: object
) -> tuple[Trajectory, Recording]:
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
    episode = run_episode(asked, owned, renderer, chosen, recording.generate, history=history)
    return served.run(episode), recording


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


class HalfAThought(AnswerReader):
    """A policy of random weights has no thought: the first half of what it writes counts as one."""

    def answer(self, number: int, text: str) -> PastAnswer:
        half = text[len(text) // 2 :]
        return PastAnswer(number, text, half, half)


HISTORIES: dict[str, dict[str, Any]] = {
    "full": {},
    "drop_thoughts": {"answers": "{action}"},
    "last_images(3)": {"last_images": 3},
    "last_turns(4)": {"last_turns": 4},
    "last_turns(1)": {"last_turns": 1},
    "OpenCUA": {"last_images": 3, "answers": "# Step {number}:\n## Action:\n{summary}\n"},
}


@pytest.mark.parametrize("name", HISTORIES)
def test_every_context_is_trained_as_it_was_sampled(
    served: Served, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each new context is a separate sequence, whose sampled tokens are trained once."""
    monkeypatch.setattr(contexts, "AnswerReader", HalfAThought)
    history = EpisodeHistory(Window(Window.Settings.model_validate(HISTORIES[name])))
    episodes = [
        played(served, number, history, max_turns=LONG, max_images=LONG)
        for number in range(EPISODES)
    ]
    for trajectory, recording in episodes:
        assert trajectory.end_reason is EndReason.MAX_TURNS
        segments = trajectory.segments
        assert (len(segments) == 1) == (name == "full")
        asked = iter(recording.turns)
        trained = 0
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
                sampled[len(prompt.token_ids) : end] = True
            assert (flat.loss_mask == sampled).all()
            trained += int(flat.loss_mask.sum())
        assert next(asked, None) is None
        written = [len(completion.token_ids) for _, completion in recording.turns]
        assert trained == sum(written)
        assert len(written) == LONG
    logprob_check(served, [trajectory for trajectory, _ in episodes], EXACT, name)


def logprob_check(
    served: Served, trajectories: list[Trajectory], limit: float = LIMIT, name: str = "full"
) -> None:
    """The trainer's log-probs are the engine's; swapping the images shows that they were looked at."""
    segments = list(chain.from_iterable(trajectory.segments for trajectory in trajectories))
    with trainer(served.folder) as engine:
        ours = engine.logprobs(segments)
        swapped = engine.logprobs(segments, swap_images=True)
    theirs = [flat.rollout_logprobs[flat.loss_mask] for flat in (t.flatten() for t in segments)]
    gaps = np.concatenate([abs(a - b) for a, b in zip(ours, theirs, strict=True)])
    unseen = np.concatenate([abs(a - b) for a, b in zip(ours, swapped, strict=True)])
    print(
        f"\n{served.kind}, {name}: {len(gaps)} sampled tokens of {len(trajectories)} episodes: |log-prob"
        f" gap| mean {gaps.mean():.1e}, max {gaps.max():.1e}; with other images {unseen.mean():.1e}"
    )
    assert gaps.max() < limit
    assert unseen.mean() > 10 * LIMIT
