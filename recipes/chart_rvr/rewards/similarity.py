"""Cosines of embedded texts; texts that are scored at the same time are embedded in one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np

from rayloop.core.failures import InfrastructureFailure
from rayloop.core.threads import in_thread
from rayloop.recipes.chart_rvr.rewards.sample import Pair

SMALLEST = 1e-8
"""A norm counts at least this, as in torch's ``cosine_similarity``: a vector of zeros resembles nothing."""
Vector: TypeAlias = "np.ndarray"


class Embedder(Protocol):
    """Makes vectors of texts: ``embed`` returns one per text, in their order, all of one length. It is called in a thread and may
    block. Whatever it raises leaves the trajectories unscored, never paid 0."""

    def embed(self, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        """One vector for each text, all of one length."""
        ...


class Unavailable(InfrastructureFailure):
    """The embedder gave no usable vectors."""


class Similarity:
    """Cosines of pairs. Texts of calls that are made within ``wait`` seconds are embedded together, each once, at most ``batch`` at
    a time. One event loop at a time; an empty text is not sent."""

    def __init__(self, embedder: Embedder, batch: int, wait: float, timeout: float) -> None:
        self._embedder, self._batch, self._wait, self._timeout = embedder, batch, wait, timeout
        self._asked: dict[str, asyncio.Future[Vector]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def cosines(self, pairs: Sequence[Pair]) -> list[float]:
        """Cosines of the pairs, -1..1; 0 with one empty text, 1 with two.

        Raises the embedder's errors, Unavailable, DeadlineExceeded.
        """
        texts = {text for pair in pairs for text in pair if text}
        futures = {text: self._ask(text) for text in texts}
        if futures:
            await asyncio.wait(futures.values())  # unlike gather, it leaves them to others when this caller is cancelled
        vectors = {text: future.result() for text, future in futures.items()}
        return [cosine(vectors[said], vectors[true]) if said and true else float(not said and not true) for said, true in pairs]

    def _ask(self, text: str) -> asyncio.Future[Vector]:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._asked = loop, {}
        if text not in self._asked:
            if not self._asked:
                loop.call_later(self._wait, self._send)
            self._asked[text] = loop.create_future()
            if len(self._asked) >= self._batch:
                found = self._asked[text]
                self._send()
                return found
        return self._asked[text]

    def _send(self) -> None:
        asked, self._asked = self._asked, {}
        if asked:
            task = asyncio.ensure_future(self._embed(asked))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _embed(self, asked: dict[str, asyncio.Future[Vector]]) -> None:
        """Answers every future. One whose caller has gone (a timeout) is left alone."""
        try:
            vectors = checked(await in_thread(self._embedder.embed, list(asked), timeout=self._timeout), len(asked))
        except Exception as error:
            for future in asked.values():
                if not future.done():
                    future.set_exception(error)
                    future.exception()  # seen: its caller may have gone
            return
        for future, vector in zip(asked.values(), vectors, strict=True):
            if not future.done():
                future.set_result(vector)


def checked(vectors: Sequence[Sequence[float]], count: int) -> list[Vector]:
    """[count] vectors of one length, all finite. Raises Unavailable."""
    made = [np.asarray(vector, np.float64) for vector in vectors]
    if len(made) != count:
        raise Unavailable(f"the embedder returned {len(made)} vectors for {count} texts")
    if len({vector.shape for vector in made}) != 1 or made[0].ndim != 1:
        raise Unavailable("the embedder's vectors differ in length, or are no vectors")
    if not all(np.isfinite(vector).all() for vector in made):
        raise Unavailable("the embedder returned a vector with NaN or infinity in it")
    return made


def cosine(a: Vector, b: Vector) -> float:
    """The cosine of two vectors, -1..1."""
    norms = max(float(np.linalg.norm(a)), SMALLEST) * max(float(np.linalg.norm(b)), SMALLEST)
    return float(a @ b) / norms
