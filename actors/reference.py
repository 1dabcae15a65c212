"""The reference actor: log-probs of the sampled tokens under the frozen start model, off the training path."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rayloop.actors.base import Actor
from rayloop.actors.failures import fetch
from rayloop.core.types import Ref, Trajectory
from rayloop.engines.settings import FsdpSettings, ModelSettings

Annotation = tuple[list[int], *tuple[Any, ...]]
"""Positions of lost payloads, then for each payload its log-probs [sampled_tokens] float32, or None."""


class ReferenceActor(Actor):
    """One thread computes, one request after the other; the event loop goes on answering ``health``."""

    def __init__(self, model: ModelSettings, engine: FsdpSettings) -> None:
        from rayloop.engines.training.scorer import FrozenScorer

        self._worker = ThreadPoolExecutor(1, "score")
        self.scorer = self._worker.submit(FrozenScorer, model, engine).result()

    def health(self) -> None:
        """That it answers is all that is asked."""

    async def annotate(self, payloads: Sequence[Ref[Trajectory]]) -> Annotation:
        """(lost, array, ...): one float32 array [sampled_tokens] per payload; the driver awaits ``lost`` only. Payloads are
        references to trajectories. ``lost`` are the positions of those that are gone; their arrays are None."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, self._annotate, payloads)

    def _annotate(self, payloads: Sequence[Ref[Trajectory]]) -> Annotation:
        found, gone = fetch(payloads)
        arrays = dict(zip(found, self.scorer.logprobs(list(found.values())), strict=True)) if found else {}
        return [i for i, ref in enumerate(payloads) if ref in gone], *(arrays.get(ref) for ref in payloads)
