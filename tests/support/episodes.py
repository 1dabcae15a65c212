"""Run folders of real episodes: the episode loop, a tokenizer and the project's own writers; only
the texts are given.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from rayloop.chat.rendering import Renderer
from rayloop.chat.tokenizer import load_tokenizer, shown
from rayloop.config.model import ModelSettings
from rayloop.core.groups import Credit, Group, Member, Scored
from rayloop.core.types import (
    Completion,
    FinishReason,
    RolloutRequest,
    Sampling,
    Task,
    TokenPrompt,
    Trajectory,
    TrajectoryId,
)
from rayloop.envs.episode import run_episode, summarize
from rayloop.envs.instance import InThread
from rayloop.envs.settings import EpisodeSettings
from rayloop.run.folder import RunFolder
from rayloop.run.records.rollouts import RolloutRecord, rollout_record
from tests.support.scripted_engine import ScriptedEngine

TINY = Path(__file__).parents[2] / "recipes/arpo/tiny"
TINT = 0.3


class Unsure(ScriptedEngine):
    """Its tokens get less likely, each by a nat."""

    async def generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        completion = await super().generate(prompt, sampling)
        return dataclasses.replace(
            completion, logprobs=tuple(-float(n) for n in range(len(completion.token_ids)))
        )


def renderer() -> Renderer:
    return Renderer(
        ModelSettings(path=str(TINY), min_pixels=37632, max_pixels=37632, position_tint=TINT)
    )


def played(
    of: Renderer, environment: Callable[[], Any], task: Task, sample: int, said: Sequence[str]
) -> Trajectory:
    """One episode in which the policy says these texts."""
    engine = Unsure(of, [(text, FinishReason.END_TOKEN) for text in said])
    request = RolloutRequest(task, TrajectoryId(1, sample), 0, 7, Sampling(max_tokens=400))
    settings = EpisodeSettings.model_validate({"max_turns": len(said), "max_tokens": 8000})
    owned = InThread("environment", environment)
    return asyncio.run(run_episode(request, owned, of, settings, engine.generate))


def recorded(
    root: Path,
    name: str,
    environment: Callable[[], Any],
    task: Task,
    said: Sequence[Sequence[str]],
    reason: str = "",
    **settings: Any,
) -> RunFolder:
    """A run of one step with one group, whose k-th member says the k-th texts.

    ``settings``: the environment's, for config.yaml.
    """
    records, images = group(environment, task, said, reason)
    with RunFolder(root, name).acquired() as folder:
        config = {
            "model": {"position_tint": TINT},
            "environment": {"episode": {"environment": {"use": "a:B", "with": settings}}},
        }
        folder.write_config(yaml.safe_dump(config))
        folder.rollouts.write(1, records, images)
    return folder


def group(
    environment: Callable[[], Any], task: Task, said: Sequence[Sequence[str]], reason: str = ""
) -> tuple[list[RolloutRecord], dict[str, bytes]]:
    """The records of a group whose k-th member says the k-th texts, and their images."""
    of, tokenizer = renderer(), load_tokenizer(TINY)
    trajectories = [
        played(of, environment, task, sample, texts) for sample, texts in enumerate(said)
    ]
    members = tuple(
        Member(
            summarize(one, task, 1.0, of.image_token),
            Scored(float(sample), {"result": 1.0}, reason=reason),
            credit=Credit(0.5),
        )
        for sample, one in enumerate(trajectories)
    )
    members_group = Group(1, task, members)
    texts: tuple[Any, Any] = (
        lambda ids: tokenizer.decode(list(ids)),
        lambda ids: shown(tokenizer, ids),
    )
    records = [
        rollout_record(members_group, member, one, *texts)
        for member, one in zip(members, trajectories, strict=True)
    ]
    return records, {sha: data for one in trajectories for sha, data in one.image_bytes.items()}
