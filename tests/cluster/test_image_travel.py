"""A group plays several turns with pictures through real environment and rollout actors: what is
forgotten changes no bit.
"""

from __future__ import annotations

import asyncio
import io
import zlib
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

from rayloop.actors.environment import EnvironmentActor
from rayloop.actors.handles import Handle
from rayloop.actors.images import KEPT_IMAGE_BYTES, ImageCache
from rayloop.actors.lease import Engine, Lease
from rayloop.actors.rollout import RolloutActor
from rayloop.config.model import ModelSettings
from rayloop.config.settings import SettingsModel
from rayloop.core.protocols import Observation, StepResult
from rayloop.core.types import (
    ImageSource,
    Message,
    RolloutRequest,
    Sampling,
    Summary,
    Task,
    Trajectory,
    TrajectoryId,
    Version,
)
from rayloop.engines.models import hf_state, load_model
from rayloop.engines.settings import TransformersEngineSettings
from rayloop.envs.settings import EpisodeSettings
from rayloop.transports.manifest import manifest
from rayloop.transports.settings import ObjectStoreTransport
from tests.support.local import LocalActor

pytestmark = pytest.mark.timeout(200)
MEMBERS, TURNS = 4, 5


def noise(seed: str) -> ImageSource:
    pixels = np.random.default_rng(zlib.crc32(seed.encode())).integers(
        0, 256, (56, 56, 3), np.uint8
    )
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "PNG")
    return ImageSource(data=encoded.getvalue())


class Echo:
    """Begins with the task's picture and answers each turn with one that follows from what was said
    so far.
    """

    Settings = SettingsModel

    def __init__(self, settings: SettingsModel) -> None:
        self._said = ""

    def reset(self, task: Task) -> Observation:
        return Observation((Message("user", ("What next?", noise(task.id))),))

    def step(self, text: str) -> StepResult:
        self._said += text
        return StepResult(Observation((Message("user", (noise(self._said),)),)))

    def evaluate(self) -> None: ...
    def close(self) -> None: ...


Played = list[tuple[Summary, Trajectory]]


def played(folder: Path, limit: int) -> Played:
    """A group in deterministic mode on one engine, with a cache of ``limit`` bytes, and two
    environment actors.
    """
    model = ModelSettings(path=str(folder))
    episode = {"environment": {"use": f"{__name__}:Echo"}, "max_turns": TURNS, "max_tokens": 500}
    players = [EnvironmentActor(model, EpisodeSettings.model_validate(episode)) for _ in range(2)]
    sampling = Sampling(max_tokens=6, min_tokens=6)
    asked = [
        RolloutRequest(Task("t", ()), TrajectoryId(1, i), 0, 100 + i, sampling, cohort=MEMBERS)
        for i in range(MEMBERS)
    ]

    async def go() -> Any:
        rollout = RolloutActor(
            model, TransformersEngineSettings(threads=1), ObjectStoreTransport(), ""
        )
        rollout.images = ImageCache(limit)
        tensors = hf_state(load_model(model))
        await rollout.engine.load(manifest(Version(0, 0), tensors), tensors)
        lease = Lease(1, cast(Handle[Engine], LocalActor(rollout)))
        nobody = cast(Any, None)
        try:
            halves = await asyncio.gather(
                *(players[i].run_episodes(asked[i::2], lease, nobody) for i in range(2))
            )
            return [
                one
                for summaries, *payloads in halves
                for one in zip(summaries, payloads, strict=True)
            ]
        finally:
            cast(Any, rollout.engine).close()
            assert rollout.images.used <= limit

    return cast(Played, asyncio.run(go()))


def test_an_engine_that_forgets_its_images_says_the_same(picture_model: Path) -> None:
    forgetful, remembering = played(picture_model, 15_000), played(picture_model, KEPT_IMAGE_BYTES)
    assert [trajectory for _, trajectory in forgetful] == [
        trajectory for _, trajectory in remembering
    ]
    assert [summary.turns for summary, _ in forgetful] == [TURNS] * MEMBERS
    again = [sum(summary.sent.again for summary, _ in group) for group in (forgetful, remembering)]
    assert again[0] > 0
    assert again[1] == 0
    images = {
        sha: data for _, trajectory in remembering for sha, data in trajectory.image_bytes.items()
    }
    assert len(images) > MEMBERS, "members that sample differently see different pictures"
    moved = sum(summary.sent.bytes for summary, _ in remembering)
    distinct = sum(map(len, images.values()))
    first = remembering[0][1].turns[0].images[0].sha256
    assert moved == distinct + len(images[first]), (
        "two processes ask: each sends the group's first picture"
    )
