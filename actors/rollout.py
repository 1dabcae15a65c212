"""The rollout actor: hosts a generation engine and keeps it on the synced weights."""

import asyncio
import dataclasses
import math
import tempfile
from collections.abc import Sequence
from typing import Any, cast

import ray
from ray.exceptions import RayTaskError

from rayloop.actors.base import Actor
from rayloop.actors.failures import as_value
from rayloop.actors.images import ImageCache, MissingImages
from rayloop.config.model import Dtype
from rayloop.core.failures import Diverged
from rayloop.core.protocols import (
    EngineHealth,
    GenerationEngine,
    Level,
    Manifest,
    ProfiledEngine,
    SleepingEngine,
)
from rayloop.core.types import Completion, Sampling, TokenPrompt, Version
from rayloop.engines.settings import EngineChoice, EnginePlace, ModelSettings, build_engine
from rayloop.transports.plain import Arrays, ArraySender
from rayloop.transports.seam import WeightUpdate
from rayloop.transports.seam import transport as choose
from rayloop.transports.settings import TransportSettings


def scratch() -> str:
    """A new folder within Ray's own, which Ray removes: an actor that is killed cannot."""
    parent = ray.get_runtime_context().get_temp_dir() if ray.is_initialized() else None
    return tempfile.mkdtemp(prefix="rollout-", dir=parent)


def start_weights(model: ModelSettings, dtype: Dtype) -> WeightUpdate[Arrays]:
    """The weights of ``model.path`` as version 0.0, for engines without a trainer.

    They are serialized as ``ObjectStoreTransport`` sends them.
    """
    from rayloop.engines.models import hf_state, load_model
    from rayloop.transports.manifest import DTYPES

    loaded = load_model(model, dtype=DTYPES[dtype])
    return ArraySender().serialize(Version(0, 0), hf_state(loaded))


class RolloutActor(Actor):
    """Hosts a generation engine.

    Many ``generate`` calls run at once on the actor's event loop; the engine batches them.
    """

    def __init__(
        self,
        model: ModelSettings,
        settings: EngineChoice,
        transport: TransportSettings,
        folder: str,
    ) -> None:
        name = ray.get_runtime_context().get_actor_name() if ray.is_initialized() else None
        place = EnginePlace(folder, scratch, name)
        self.engine: GenerationEngine = build_engine(model, settings, place)
        self.images = ImageCache()
        self.receiver = choose(transport, folder).receiver()
        self._order = 0
        self._loading = asyncio.Lock()
        self._level: Level = "level1"
        self._without_logprobs = bool(settings.untrainable())

    def health(self) -> EngineHealth:
        """The load of the engine. Raises the error that ended it."""
        return self.engine.health()

    async def generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion | MissingImages:
        """Sample one turn, or return the images that are missing. Raises what the engine raises."""
        async with self.images.whole(prompt) as complete_prompt:
            if isinstance(complete_prompt, MissingImages):
                return complete_prompt
            return await self._turn(complete_prompt, sampling)

    async def generate_each(
        self, prompt: TokenPrompt, seeds: Sequence[int], sampling: Sampling
    ) -> list[Completion | RayTaskError] | MissingImages:
        """Sample one turn for each seed, all at once, or return the missing images.

        The error of a turn that fails is returned by ``as_value``.
        """
        async with self.images.whole(prompt) as complete_prompt:
            if isinstance(complete_prompt, MissingImages):
                return complete_prompt
            prompts = [dataclasses.replace(complete_prompt, seed=seed) for seed in seeds]
            answers = await asyncio.gather(
                *(self._turn(prompt, sampling) for prompt in prompts), return_exceptions=True
            )
            return [
                answer if isinstance(answer, Completion) else as_value(answer) for answer in answers
            ]

    async def _turn(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        """Sample one turn. Raises Diverged for log-probs that are not finite.

        Another engine with the same weights would have the same log-probs.
        """
        completion = await self.engine.generate(prompt, sampling)
        if self._without_logprobs:
            return completion
        logprobs = completion.logprobs
        not_finite = sum(not math.isfinite(logprob) for logprob in logprobs)
        if not_finite:
            raise Diverged(
                f"the engine's log-probs are not finite for {not_finite} of {len(logprobs)} sampled"
                f" tokens, with the weights of version {completion.version}: NaN in the logits. The"
                " weights or their activations are out of range: lower policy.optimizer.lr, or"
                " look at model.path and rollout.engine.dtype"
            )
        return completion

    async def leave(self, cohort: str) -> None:
        """One episode of a cohort has ended."""
        await self.engine.leave(cohort)

    async def profile(self, path: str | None) -> None:
        """As ``PolicyRank.profile``; nothing for an engine that cannot."""
        if isinstance(self.engine, ProfiledEngine):
            await self.engine.profile(path)

    async def sleep(self, level: Level) -> None:
        """Leave the GPU to others; requests wait."""
        # Paused first: no request may compute while weights and cache leave the GPU.
        await self.engine.pause()
        await cast(SleepingEngine, self.engine).sleep(level)
        self._level = level

    async def wake_up(self) -> None:
        """Take the GPU back.

        Requests continue; after a sleep of level2, when weights are loaded.
        """
        await cast(SleepingEngine, self.engine).wake_up()
        if self._level == "level1":
            await self.engine.resume()

    async def load(self, manifest: Manifest, source: Any, order: int = 0) -> None:
        """Load a weight update, whose ``source`` is the transport's.

        Raises WeightSyncError. ``order`` grows with each update of a run: an update before the last
        that was loaded is left out, since its source arrived when the driver had given the call up.
        """
        # An older load that is under way must not end after a newer one.
        async with self._loading:
            if order < self._order:
                return
            self._order = order
            await self.receiver.take(self.engine, manifest, source)
