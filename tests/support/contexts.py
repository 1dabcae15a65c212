"""Episodes of several contexts for tests of the trainer, and how many of their tokens are distinct."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rayloop.chat.rendering import Renderer
from rayloop.config.model import ModelSettings
from rayloop.core.protocols import Observation, StepResult
from rayloop.core.types import (
    FinishReason,
    ImageSource,
    Message,
    RolloutRequest,
    Sampling,
    Task,
    Trajectory,
    TrajectoryId,
)
from rayloop.envs.episode import run_episode
from rayloop.envs.history.policies import EpisodeHistory, Window
from rayloop.envs.instance import InThread
from rayloop.envs.settings import EpisodeSettings
from rayloop.grpo.batch import TrainSample
from tests.support.scripted_engine import ScriptedEngine

HISTORIES: dict[str, dict[str, Any]] = {
    "full": {},
    "drop_thoughts": {"answers": "{action}"},
    "last_images(2)": {"last_images": 2},
    "last_turns(4)": {"last_turns": 4},
    "last_turns(1)": {"last_turns": 1},
    "thoughts and images": {"last_images": 2, "answers": "{action}"},
}
PROMPT = "You see the screen of a computer, and press its buttons until the form is sent. " * 4


def screenshot(number: int, width: int, height: int, seed: int = 0) -> ImageSource:
    """Noise: a picture that no other number or seed has."""
    rng = np.random.default_rng((seed, number))
    pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return ImageSource(data=buffer.getvalue())


class Screens:
    """A screenshot after each turn, and one at the beginning."""

    def __init__(self, size: tuple[int, int], seed: int) -> None:
        self._size, self._seed, self._turn = size, seed, 0

    def _shown(self) -> ImageSource:
        return screenshot(self._turn, *self._size, self._seed)

    def reset(self, task: Task) -> Observation:
        return Observation((Message("user", (PROMPT, self._shown())),))

    def step(self, text: str) -> StepResult:
        self._turn += 1
        return StepResult(Observation((Message("user", (self._shown(),)),)))

    def evaluate(self) -> float:
        return 1.0

    def close(self) -> None:
        pass


def contexts_of(
    folder: Path,
    history: dict[str, Any],
    turns: int,
    seed: int = 0,
    size: tuple[int, int] = (84, 56),
) -> Trajectory:
    """The episode of a policy that thinks and presses, under a history."""
    renderer = Renderer(ModelSettings(path=str(folder)))
    said = [
        (f"this is the thought number {turn}</think>press {turn}", FinishReason.END_TOKEN)
        for turn in range(turns)
    ]
    settings = EpisodeSettings(max_turns=turns, max_tokens=1 << 20, max_images=turns + 1)
    chosen = EpisodeHistory(Window(Window.Settings.model_validate(history)))
    episode = run_episode(
        RolloutRequest(Task("t", ()), TrajectoryId(seed, 0), 0, seed, Sampling(max_tokens=200)),
        InThread("Screens", lambda: Screens(size, seed)),
        renderer,
        settings,
        ScriptedEngine(renderer, said).generate,
        history=chosen,
    )
    return asyncio.run(episode)


def distinct_tokens(samples: Sequence[TrainSample], image_token: int) -> int:
    """The tokens of all samples when each beginning counts once: the nodes of their prefix tree."""
    nodes: dict[tuple[int, Any], int] = {}
    for sample in samples:
        images = iter(
            [
                id(pixels)
                for pixels, count in zip(sample.pixels, sample.image_tokens, strict=True)
                for _ in range(count)
            ]
        )
        node = 0
        for token in sample.token_ids.tolist():
            content = ("image", next(images)) if token == image_token else token
            node = nodes.setdefault((node, content), len(nodes) + 1)
    return len(nodes)
