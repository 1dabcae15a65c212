"""Plays the dialogues with an engine, outside of any run and without Ray."""

import asyncio
import gc
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rayloop.chat.rendering import Renderer
from rayloop.core.failures import DeadlineExceeded
from rayloop.core.protocols import GenerationEngine
from rayloop.core.types import (
    EndReason,
    Sampling,
    TokenPrompt,
    Trajectory,
    TrajectoryId,
    Turn,
    Version,
    derive,
)
from rayloop.engines.models import DTYPES, hf_state, load_model
from rayloop.engines.settings import EngineChoice, EnginePlace, ModelSettings, build_engine
from rayloop.measure.parity import Axis, Play
from rayloop.parity.conversations import Coverage, Dialogue, conversations
from rayloop.transports.manifest import manifest

PLAY_TIMEOUT_S = 3600.0
"""Seconds for an engine that is started to take the weights and to play everything."""


@dataclass(frozen=True)
class Episode:
    """A dialogue that was played, with the engine's log-probs in its sampled turns.

    ``missing``: how many turns did not fit.
    """

    axis: Axis
    play: Play
    missing: int
    trajectory: Trajectory


@dataclass(frozen=True)
class Played:
    """The result of an engine.

    ``attention``: its kernel, or "" where it does not say. ``seconds``: of sampling, after loading.
    """

    episodes: Sequence[Episode]
    attention: str
    seconds: float


@dataclass(frozen=True)
class Player:
    """Plays every dialogue of ``coverage`` with an engine."""

    model: ModelSettings
    settings: EngineChoice
    renderer: Renderer
    coverage: Coverage
    sampling: Sampling

    def play(self) -> Played:
        """Start the engine, play, and end the engine.

        Raises what the engine raises, and DeadlineExceeded.
        """
        with tempfile.TemporaryDirectory(prefix="parity-") as folder:
            result = asyncio.run(self._play(EnginePlace(folder, scratch=lambda: folder)))
        # The trainer needs the memory.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return result

    async def _play(self, place: EnginePlace) -> Played:
        engine = build_engine(self.model, self.settings, place)
        episodes: list[Episode] = []
        try:
            async with asyncio.timeout(PLAY_TIMEOUT_S):
                if self.settings.holds_model:
                    await self._load(engine)
                began = time.monotonic()
                # The repeat comes after the first play: a cache of prefixes then knows its tokens.
                for play in Play:
                    dialogues = conversations(self.coverage, play, self.renderer)
                    tasks = [self._episode(engine, dialogue, play) for dialogue in dialogues]
                    episodes += await asyncio.gather(*tasks)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the engine did not play everything in {PLAY_TIMEOUT_S:.0f} s; play less: --turns,"
                " --images, --depth"
            ) from error
        finally:
            close = getattr(engine, "close", None)
            if close is not None:
                close()
        return Played(episodes, getattr(engine, "attention", ""), time.monotonic() - began)

    async def _load(self, engine: GenerationEngine) -> None:
        """Give the engine the folder's weights, as a weight sync does."""
        weights = hf_state(load_model(self.model, dtype=DTYPES[self.settings.dtype]))
        await engine.pause()
        try:
            await engine.load(manifest(Version(0, 0), weights), weights)
        finally:
            await engine.resume()

    async def _episode(self, engine: GenerationEngine, dialogue: Dialogue, play: Play) -> Episode:
        """Play one dialogue until its end, or until its room is used up."""
        sampling = self.sampling
        if play is Play.GREEDY:
            sampling = replace(sampling, temperature=0.0)
        turns: list[Turn] = []
        prompt = TokenPrompt((), seed=derive(0, dialogue.name, play))
        for message in dialogue.messages:
            if turns:
                rendered = self.renderer.observation([message], turns[-1].token_ids)
            else:
                rendered = self.renderer.prompt([message])
            token_ids = prompt.token_ids + rendered.token_ids
            if len(token_ids) + sampling.max_tokens > self.coverage.room:
                break
            images = prompt.images + rendered.images
            prompt = replace(prompt, token_ids=token_ids, images=images)
            completion = await engine.generate(prompt, sampling)
            turns += [Turn("user", rendered.token_ids, rendered.refs), completion.turn]
            prompt = replace(prompt, token_ids=token_ids + completion.token_ids)
        trajectory = Trajectory(
            TrajectoryId(0, 0),
            attempt=0,
            task_id=dialogue.name,
            seed=prompt.seed,
            turns=tuple(turns),
            sampling=sampling,
            end_reason=EndReason.DONE,
            image_bytes={image.ref.sha256: image.data or b"" for image in prompt.images},
        )
        missing = len(dialogue.messages) - len(turns) // 2
        return Episode(dialogue.axis, play, missing, trajectory)
