"""Episodes for tests: the episode loop plays an environment, the policy says what the test gives,
and a reward actor pays.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayloop.actors.reward import RewardActor
from rayloop.chat.rendering import Renderer
from rayloop.config.model import ModelSettings
from rayloop.config.settings import Component
from rayloop.core.groups import Scored
from rayloop.core.types import (
    Completion,
    EndReason,
    FinishReason,
    RolloutRequest,
    Sampling,
    Task,
    TokenPrompt,
    Trajectory,
    TrajectoryId,
    Version,
)
from rayloop.envs.episode import run_episode
from rayloop.envs.instance import Environments
from rayloop.envs.settings import EnvironmentKind, EpisodeSettings
from rayloop.rewards.settings import RewardSettings
from tests.support.runs import ROOT

MODEL = ModelSettings(path=str(ROOT / "recipes/arc_vision/loose"))
RENDERER = Renderer(MODEL)
RESULT = "rayloop.rewards.environment_result:EnvironmentResult"
USUAL = Sampling()

Says = Callable[[TokenPrompt], str]
"""What the policy sees -> the text of its turn."""


def episode_settings(kind: Mapping[str, Any], **limits: Any) -> EpisodeSettings:
    """``kind``: an entry of ``environment.episode.environment``, such as ``{"use": ..., "with":
    ...}``.
    """
    return EpisodeSettings(environment=EnvironmentKind.model_validate(kind), **limits)


async def episode(
    environments: Environments,
    task: Task,
    says: Says,
    settings: EpisodeSettings,
    sampling: Sampling,
    number: int = 0,
) -> Trajectory:
    """Play one episode. Raises what the episode loop raises for one that is left out."""

    async def generate(prompt: TokenPrompt, sampling: Sampling) -> Completion:
        await asyncio.sleep(
            0.001
        )  # an engine takes its time: requests that an agent makes at once overlap
        tokens = RENDERER.encode(says(prompt))
        return Completion(tokens, (-0.5,) * len(tokens), FinishReason.END_TOKEN, Version(0, 1))

    request = RolloutRequest(task, TrajectoryId(0, number), 0, 5, sampling)
    return await run_episode(request, environments.of(task), RENDERER, settings, generate)


def play_one(
    task: Task, says: Says, settings: EpisodeSettings, sampling: Sampling = USUAL
) -> Trajectory:
    """``episode`` in an environment that nothing else uses."""

    async def alone() -> Trajectory:
        environments = Environments(settings.environment, {})
        try:
            return await episode(environments, task, says, settings, sampling)
        finally:
            environments.end()

    return asyncio.run(alone())


@dataclass(frozen=True)
class Paid:
    """How an episode ended, and its reward."""

    end: EndReason
    value: float


def all_scored(
    task: Task,
    texts: Sequence[str],
    settings: EpisodeSettings,
    sampling: Sampling = USUAL,
    reward: str = RESULT,
) -> list[Paid]:
    """Play episodes in which the policy says ``texts`` one after the other, until all are said.

    Raises AssertionError for an episode that is left out, that has no finite reward, or that does
    not ask the policy.
    """
    return asyncio.run(_all_scored(task, texts, settings, sampling, reward))


async def _all_scored(
    task: Task, texts: Sequence[str], settings: EpisodeSettings, sampling: Sampling, reward: str
) -> list[Paid]:
    payer = RewardActor(MODEL, RewardSettings(source=Component(use=reward)))
    left = list(reversed(texts))
    paid: list[Paid] = []
    environments = Environments(settings.environment, {})
    try:
        while left:
            saying = left[-settings.max_turns :][::-1]
            before = len(left)
            try:
                made = await episode(
                    environments,
                    task,
                    lambda _: left.pop() if left else "done",
                    settings,
                    sampling,
                    len(paid),
                )
                [outcome] = await payer.score_together([made], task, 1)
            except Exception as error:
                shown = [text[:300] for text in saying]
                raise AssertionError(
                    f"left out: {type(error).__name__}: {error}\n after one of {shown}"
                ) from error
            assert len(left) < before, "the policy was not asked"
            assert isinstance(outcome, Scored), f"unscored: {outcome}\n after one of {saying}"
            assert math.isfinite(outcome.value), outcome
            paid.append(Paid(made.end_reason, outcome.value))
    finally:
        environments.end()
    return paid
