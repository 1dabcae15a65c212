"""The reference actor: log-probs of the sampled tokens under a frozen model, off the training path."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rayloop.actors.base import Actor
from rayloop.actors.failures import fetch
from rayloop.core.failures import WorkerLost
from rayloop.core.files import appears
from rayloop.core.types import Ref, Trajectory
from rayloop.engines.settings import FsdpSettings, ModelSettings

Annotation = tuple[list[int], *tuple[Any, ...]]
"""Positions of lost payloads, then for each payload its log-probs [sampled_tokens] float32, or
None.
"""
SEEN = 60.0
"""Seconds within which weights that a rank wrote must be seen here."""


class ReferenceActor(Actor):
    """One thread computes, one request after the other; the event loop goes on answering
    ``health``. ``server``: computes in place of this actor, with the tokenizer of ``model``.
    """

    def __init__(
        self, model: ModelSettings, engine: FsdpSettings, server: str | None = None
    ) -> None:
        self._model, self._engine, self._server = model, engine, server
        self._worker = ThreadPoolExecutor(1, "score")
        self._worker.submit(self._hold, None).result()

    async def profile(self, path: str | None) -> None:
        """As ``PolicyRank.profile``."""
        from rayloop.engines.profiling import profile

        await asyncio.to_thread(profile, path)

    def health(self) -> None:
        """That it answers is all that is asked."""

    async def annotate(
        self, payloads: Sequence[Ref[Trajectory]], folder: str | None = None
    ) -> Annotation:
        """(lost, array, ...): one float32 array [sampled_tokens] per payload; the driver awaits
        ``lost`` only. Payloads are references to trajectories. ``lost`` are the positions of those
        that are gone; their arrays are None. ``folder``: of the weights that the policy had at the
        last refresh. Raises WorkerLost when they are not seen.
        """
        return await asyncio.get_running_loop().run_in_executor(
            self._worker, self._annotate, payloads, folder
        )

    def _annotate(self, payloads: Sequence[Ref[Trajectory]], folder: str | None) -> Annotation:
        if folder != self._held:
            self._hold(folder)
        found, gone = fetch(payloads)
        arrays = (
            dict(zip(found, self.scorer.logprobs(list(found.values())), strict=True))
            if found
            else {}
        )
        return [i for i, ref in enumerate(payloads) if ref in gone], *(
            arrays.get(ref) for ref in payloads
        )

    def _hold(self, folder: str | None) -> None:
        """Score with the model in ``folder`` from now on; None: with that of the settings."""
        self.scorer: Any = None  # let go of before the next one is loaded
        if self._server is not None:
            from rayloop.engines.generation.openai_scorer import OpenAiScorer

            self.scorer = OpenAiScorer(self._model, self._server)
        else:
            from rayloop.engines.training.scorer import FrozenScorer

            if folder is not None and not appears(Path(folder), SEEN):
                raise WorkerLost(f"{folder} was not seen on {self.host()} within {SEEN:g} s")
            model = (
                self._model.model_copy(update={"path": folder, "revision": None})
                if folder
                else self._model
            )
            self.scorer = FrozenScorer(model, self._engine)
        self._held = folder
