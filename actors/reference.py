"""The reference actor: log-probs of the sampled tokens under the frozen start model, off the training path."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from actors.base import Actor
from rayloop.core.types import Trajectory
from rayloop.engines.settings import FsdpSettings, ModelSettings


class ReferenceActor(Actor):
    """One thread computes, one request after the other; the event loop goes on answering ``health``."""

    def __init__(self, model: ModelSettings, engine: FsdpSettings) -> None:
        from rayloop.engines.scorer import FrozenScorer

        self._worker = ThreadPoolExecutor(1, "score")
        self.scorer = self._worker.submit(FrozenScorer, model, engine).result()

    def health(self) -> None:
        return None

    async def annotate(self, *trajectories: Trajectory) -> tuple[Any, ...]:
        """(None, array, ...): one float32 array [sampled_tokens] per trajectory; the driver awaits the None only."""
        found = await asyncio.get_running_loop().run_in_executor(self._worker, self.scorer.logprobs, trajectories)
        return (None, *found)
