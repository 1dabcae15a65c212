"""Embedders (any server with the OpenAI interface, or counts of words), and cosines of texts
embedded in batches.
"""

import asyncio
import os
import re
import zlib
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import httpx
import numpy as np
from pydantic import Field

from rayloop.config.settings import SettingsModel
from rayloop.core.failures import ConfigError, InfrastructureFailure
from rayloop.core.threads import in_thread
from rayloop.recipes.chart_rvr.rewards.reading import Pair

SMALLEST = 1e-8
"""A norm counts at least this, as in torch's ``cosine_similarity``: a vector of zeros resembles
nothing.
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
        self._embedder, self._batch, self._wait, self._timeout = embedder, batch, wait, timeout
        self._asked: dict[str, asyncio.Future[Vector]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def cosines(self, pairs: Sequence[Pair], *, empty: bool = False) -> list[float]:
        """Cosines of the pairs; 0 with one empty text, 1 with two (embedded with ``empty``).

        Raises the embedder's errors.
        """
        texts = {text for pair in pairs for text in pair if text or empty}
        futures = {text: self._ask(text) for text in texts}
        if futures:
            await asyncio.wait(
                futures.values()
            )  # unlike gather, it leaves them to others when this caller is cancelled
        vectors = {text: future.result() for text, future in futures.items()}
        return [
            (
                cosine(vectors[said], vectors[true])
                if empty or (said and true)
                else float(not said and not true)
            )
            for said, true in pairs
        ]

    def _ask(self, text: str) -> asyncio.Future[Vector]:
        loop = asyncio.get_running_loop()
        # A future wakes nobody on another event loop than its own.
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
            # asyncio itself holds a task by a weak reference only.
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _embed(self, asked: dict[str, asyncio.Future[Vector]]) -> None:
        """Answers every future. One whose caller has gone (a timeout) is left alone."""
        try:
            vectors = checked(
                await in_thread(self._embedder.embed, list(asked), timeout=self._timeout),
                len(asked),
            )
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


_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_WORD = re.compile(r"\w+|[^\w\s]")


def openai_client(
    url: str, key: str, timeout: float, names: tuple[str, str] = ("url", "api_key_env")
) -> httpx.Client:
    """A client of the server at ``url`` (up to and with ``/v1``), asked without a proxy when it is
    on this machine. ``key``: the environment variable with its key, or empty. Raises ConfigError,
    with the settings' ``names``.
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
    """``POST {url}/embeddings`` of any server with that interface: vLLM, text-embeddings-inference,
    infinity, the cloud's.
    """

    class Settings(SettingsModel):
        url: str = "http://127.0.0.1:8000/v1"
        """Address of the server up to and with ``/v1``; set it to where your embedding server
        listens.
        """
        model: str = "sentence-transformers/all-MiniLM-L6-v2"
        """The name by which the server knows the embedding model; change it for another model."""
        api_key_env: str = ""
        """Name of the environment variable that holds the key; empty for a server that asks for
        none.
        """
        timeout: float = Field(60.0, gt=0)
        """Seconds for the answer to one batch of texts; raise it for a server that runs on a CPU.
        """

    def __init__(self, settings: Settings) -> None:
        self._http, self._model = (
            openai_client(settings.url, settings.api_key_env, settings.timeout),
            settings.model,
        )

    def embed(self, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        """Raises httpx.HTTPError, and Unavailable when the answer is no list of embeddings."""
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
                f"{answer.url} answered no list of embeddings: {answer.text[:300]}"
            ) from error


class WordEmbedder:
    """Counts of words in ``size`` places, without a model: texts without a common word have a
    cosine of about 0.
    """

    class Settings(SettingsModel):
        size: int = Field(4096, ge=16)
        """Places of the vector: two words may share one, more seldom the more places there are."""

    def __init__(self, settings: Settings) -> None:
        self._size = settings.size

    def embed(self, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        """Counts of hashed words, one vector for each text."""
        places = (
            [zlib.crc32(word.encode()) % self._size for word in _WORD.findall(text.lower())]
            for text in texts
        )
        return [
            np.bincount(np.array(of_text, np.int64), minlength=self._size).tolist()
            for of_text in places
        ]
