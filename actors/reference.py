"""The reference actor: log-probs of the sampled tokens under a frozen model.

Training does not wait for it.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rayloop.actors.base import Actor
from rayloop.actors.failures import fetch
from rayloop.core.failures import WorkerLost
from rayloop.core.files import appears
from rayloop.core.groups import Ref
from rayloop.core.types import Trajectory
from rayloop.engines.settings import FsdpSettings, ModelSettings

Annotation = tuple[list[int], *tuple[Any, ...]]
"""Positions of lost payloads, then the log-probs of each payload.

They are [sampled_tokens] float32, or None.
"""
VISIBLE_WITHIN_S = 60.0
"""Seconds within which weights that a rank wrote must be visible here."""


class ReferenceActor(Actor):
    """Computes log-probs in one thread, one request after the other.

    The event loop answers ``health`` in that time. ``server``: computes in place of this actor,
    with the tokenizer of ``model``.
    """

    def __init__(
        self, model: ModelSettings, engine: FsdpSettings, server: str | None = None
    ) -> None:
        self._model = model
        self._engine = engine
        self._server = server
        self._worker = ThreadPoolExecutor(1, "score")
        self._worker.submit(self._hold, None).result()

    async def profile(self, path: str | None) -> None:
        """As ``PolicyRank.profile``."""
        from rayloop.engines.profiling import profile

        await asyncio.to_thread(profile, path)

    def health(self) -> None:
        """Answer, which shows that the actor works."""

    async def annotate(
        self, payloads: Sequence[Ref[Trajectory]], folder: str | None = None
    ) -> Annotation:
        """Return (lost, array, ...), with one float32 array [sampled_tokens] per payload.

        The driver awaits ``lost`` only. Payloads are references to trajectories. ``lost`` are the
        positions of lost payloads; their arrays are None. ``folder`` has the weights of the policy
        at the last refresh. Raises WorkerLost when it is not visible.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._worker, self._annotate, payloads, folder)

    def _annotate(self, payloads: Sequence[Ref[Trajectory]], folder: str | None) -> Annotation:
        if folder != self._held:
            self._hold(folder)
        trajectories, missing = fetch(payloads)
        arrays: dict[Ref[Trajectory], Any] = {}
        if trajectories:
            logprobs = self.scorer.logprobs(list(trajectories.values()))
            arrays = dict(zip(trajectories, logprobs, strict=True))
        lost = [index for index, payload in enumerate(payloads) if payload in missing]
        return lost, *(arrays.get(payload) for payload in payloads)

    def _hold(self, folder: str | None) -> None:
        """Score all later calls with the model in ``folder``; None: the model of the settings."""
        # Released before the next one is loaded.
        self.scorer: Any = None
        if self._server is not None:
            from rayloop.engines.generation.openai_scorer import OpenAiScorer

            self.scorer = OpenAiScorer(self._model, self._server)
        else:
            from rayloop.engines.training.scorer import FrozenScorer

            if folder is not None and not appears(Path(folder), VISIBLE_WITHIN_S):
                raise WorkerLost(
                    f"{folder} was not seen on {self.host()} within {VISIBLE_WITHIN_S:g} s"
                )
            model = self._model
            if folder:
                model = model.model_copy(update={"path": folder, "revision": None})
            self.scorer = FrozenScorer(model, self._engine)
        self._held = folder
