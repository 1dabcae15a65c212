"""Embedders, and cosines of texts that are embedded in batches.

An embedder is any server with the OpenAI interface, or counts words.
"""

import asyncio
import os
import re
import zlib
from collections.abc import Sequence
from itertools import chain
from typing import Any, Protocol, TypeAlias

import httpx
import numpy as np
from pydantic import Field

from rayloop.config.settings import SettingsModel
from rayloop.core.failures import ConfigError, InfrastructureFailure
from rayloop.core.threads import in_thread
from rayloop.recipes.chart_rvr.rewards.reading import Pair

MIN_NORM = 1e-8
"""The least value that a norm counts as, as in torch's ``cosine_similarity``.

A vector of zeros therefore resembles nothing.
"""
Vector: TypeAlias = "np.ndarray"


class Embedder(Protocol):
    """Makes vectors of texts.

    It is called in a thread and may block; its errors leave the trajectories unscored.
    """

    def embed(self, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        """One vector for each text, all of one length."""


class Unavailable(InfrastructureFailure):
    """The embedder gave no usable vectors."""


class Similarity:
    """Cosines of pairs.

    Texts of calls within ``wait`` seconds are embedded together, each once, at most ``batch`` at a
    time.
    """

    def __init__(self, embedder: Embedder, batch: int, wait: float, timeout: float) -> None:
        self._embedder = embedder
        self._batch = batch
        self._wait = wait
        self._timeout = timeout
        self._pending: dict[str, asyncio.Future[Vector]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def cosines(self, pairs: Sequence[Pair], *, empty: bool = False) -> list[float]:
        """Cosines of the pairs; 0 with one empty text, 1 with two (embedded with ``empty``).

        Raises the embedder's errors.
        """
        texts = {text for text in chain.from_iterable(pairs) if text or empty}
        futures = {text: self._ask(text) for text in texts}
        if futures:
            # Unlike gather, it leaves the futures to others when this caller is cancelled.
            await asyncio.wait(futures.values())
        vectors = {text: future.result() for text, future in futures.items()}
        cosines = []
        for said, true in pairs:
            if empty or (said and true):
                cosines.append(cosine(vectors[said], vectors[true]))
            else:
                cosines.append(float(not said and not true))
        return cosines

    def _ask(self, text: str) -> asyncio.Future[Vector]:
        """The future of a text's vector, which shares a call with others."""
        loop = asyncio.get_running_loop()
        # A future wakes only callers on its event loop.
        if loop is not self._loop:
            self._loop = loop
            self._pending = {}
        if text in self._pending:
            return self._pending[text]
        if not self._pending:
            loop.call_later(self._wait, self._send)
        future = self._pending[text] = loop.create_future()
        if len(self._pending) >= self._batch:
            self._send()
        return future

    def _send(self) -> None:
        """Start the call for the pending texts."""
        batch = self._pending
        self._pending = {}
        if batch:
            task = asyncio.ensure_future(self._embed(batch))
            # asyncio itself holds a task by a weak reference only.
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _embed(self, batch: dict[str, asyncio.Future[Vector]]) -> None:
        """Answer every future, except one whose caller has left (a timeout)."""
        try:
            answer = await in_thread(self._embedder.embed, list(batch), timeout=self._timeout)
            vectors = checked(answer, len(batch))
        except Exception as error:
            for future in batch.values():
                if not future.done():
                    future.set_exception(error)
                    # Marks it as retrieved, since its caller may have left.
                    future.exception()
            return
        for future, vector in zip(batch.values(), vectors, strict=True):
            if not future.done():
                future.set_result(vector)


def checked(vectors: Sequence[Sequence[float]], count: int) -> list[Vector]:
    """[count] vectors of one length, all finite. Raises Unavailable."""
    arrays = [np.asarray(vector, np.float64) for vector in vectors]
    if len(arrays) != count:
        raise Unavailable(f"the embedder returned {len(arrays)} vectors for {count} texts")
    if len({array.shape for array in arrays}) != 1 or arrays[0].ndim != 1:
        raise Unavailable("the embedder's vectors differ in length, or are not vectors")
    if not all(np.isfinite(array).all() for array in arrays):
        raise Unavailable("the embedder returned a vector with NaN or infinity in it")
    return arrays


def cosine(a: Vector, b: Vector) -> float:
    """The cosine of two vectors, -1..1."""
    norms = max(float(np.linalg.norm(a)), MIN_NORM) * max(float(np.linalg.norm(b)), MIN_NORM)
    return float(a @ b) / norms


_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_WORD = re.compile(r"\w+|[^\w\s]")


def openai_client(
    url: str, key: str, timeout: float, names: tuple[str, str] = ("url", "api_key_env")
) -> httpx.Client:
    """A client of the server at ``url`` (up to and with ``/v1``).

    It uses no proxy when the server is on this machine. ``key``: the environment variable with its
    key, or empty. Raises ConfigError, with the settings' ``names``.
    """
    address = httpx.URL(url)
    if address.scheme not in ("http", "https") or not address.host:
        raise ConfigError(f"{names[0]} {url}: expected http://HOST:PORT/v1")
    if key and not os.environ.get(key):
        raise ConfigError(f"{names[1]} {key}: this environment variable is not set")
    headers = {"Authorization": f"Bearer {os.environ[key]}"} if key else {}
    return httpx.Client(
        base_url=address, headers=headers, timeout=timeout, trust_env=address.host not in _LOCAL
    )


class OpenAiEmbedder:
    """``POST {url}/embeddings`` of any server with that interface.

    Such are vLLM, text-embeddings-inference, infinity and the cloud's.
    """

    class Settings(SettingsModel):
        url: str = "http://127.0.0.1:8000/v1"
        """Address of the server up to and with ``/v1``.

        Set it to where your embedding server listens.
        """
        model: str = "sentence-transformers/all-MiniLM-L6-v2"
        """The name by which the server knows the embedding model; change it for another model."""
        api_key_env: str = ""
        """Name of the environment variable that holds the key.

        Empty for a server that asks for none.
        """
        timeout: float = Field(60.0, gt=0)
        """Seconds for the answer to one batch of texts.

        Raise it for a server that runs on a CPU.
        """

    def __init__(self, settings: Settings) -> None:
        self._http = openai_client(settings.url, settings.api_key_env, settings.timeout)
        self._model = settings.model

    def embed(self, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        """The server's vectors.

        Raises httpx.HTTPError, and Unavailable when the answer is not a list of embeddings.
        """
        answer = self._http.post("embeddings", json={"model": self._model, "input": list(texts)})
        if answer.is_error:
            raise Unavailable(f"{answer.url} answered {answer.status_code}: {answer.text[:300]}")
        try:
            data: list[dict[str, Any]] = sorted(
                answer.json()["data"], key=lambda entry: entry["index"]
            )
            return [entry["embedding"] for entry in data]
        except (ValueError, KeyError, TypeError) as error:
            raise Unavailable(
                f"{answer.url} did not answer with a list of embeddings: {answer.text[:300]}"
            ) from error


class WordEmbedder:
    """Counts of words in ``size`` places, without a model.

    Texts without a common word have a cosine of about 0.
    """

    class Settings(SettingsModel):
        size: int = Field(4096, ge=16)
        """Places of the vector.

        Two words may share one, more seldom the more places there are.
        """

    def __init__(self, settings: Settings) -> None:
        self._size = settings.size

    def embed(self, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        """Counts of hashed words, one vector for each text."""
        return [self._counts(text) for text in texts]

    def _counts(self, text: str) -> list[float]:
        words = _WORD.findall(text.lower())
        places = np.array([zlib.crc32(word.encode()) % self._size for word in words], np.int64)
        counts: list[float] = np.bincount(places, minlength=self._size).tolist()
        return counts
