"""Embedders: any server with the OpenAI interface, or counts of words without a model."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Sequence
from typing import Any

import httpx
from pydantic import Field

from rayloop.config.settings import SettingsModel
from rayloop.core.failures import ConfigError
from rayloop.recipes.chart_rvr.rewards.similarity import Unavailable

_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_WORD = re.compile(r"\w+|[^\w\s]")


class OpenAiEmbedder:
    """``POST {url}/embeddings`` of any server with that interface: vLLM, text-embeddings-inference, infinity, the cloud's.

    The published runs used ``sentence-transformers/all-MiniLM-L6-v2``.
    """

    class Settings(SettingsModel):
        url: str = "http://127.0.0.1:8000/v1"
        """Address of the server up to and with ``/v1``; set it to where your embedding server listens."""
        model: str = "sentence-transformers/all-MiniLM-L6-v2"
        """The name by which the server knows the embedding model; change it for another model."""
        api_key_env: str = ""
        """Name of the environment variable that holds the key; empty for a server that asks for none."""
        timeout: float = Field(60.0, gt=0)
        """Seconds for the answer to one batch of texts; raise it for a server that runs on a CPU."""

    def __init__(self, settings: OpenAiEmbedder.Settings) -> None:
        url = httpx.URL(settings.url.rstrip("/"))
        if url.scheme not in ("http", "https") or not url.host:
            raise ConfigError(f"embedder url {settings.url!r}: expected http://host:port/v1")
        headers = {}
        if name := settings.api_key_env:
            if not os.environ.get(name):
                raise ConfigError(f"embedder: the environment variable {name} (api_key_env) is not set")
            headers["Authorization"] = f"Bearer {os.environ[name]}"
        self._url, self._model = f"{url}/embeddings", settings.model
        self._http = httpx.Client(headers=headers, timeout=settings.timeout, trust_env=url.host not in _LOCAL)

    def embed(self, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        """Raises httpx.HTTPError, and Unavailable when the answer is no list of embeddings."""
        answer = self._http.post(self._url, json={"model": self._model, "input": list(texts)})
        if answer.is_error:
            raise Unavailable(f"{self._url} answered {answer.status_code}: {answer.text[:300]}")
        try:
            data: list[dict[str, Any]] = sorted(answer.json()["data"], key=lambda entry: entry["index"])
            return [entry["embedding"] for entry in data]
        except (ValueError, KeyError, TypeError) as error:
            raise Unavailable(f"{self._url} answered no list of embeddings: {answer.text[:300]}") from error


class WordEmbedder:
    """Counts of words in ``size`` places: no model, no network, no meaning. For tests, dry runs and machines without a server.

    Equal texts have cosine 1, texts without a common word about 0.
    """

    class Settings(SettingsModel):
        size: int = Field(4096, ge=16)
        """Places of the vector: two words may share one, more seldom the more places there are."""

    def __init__(self, settings: WordEmbedder.Settings) -> None:
        self._size = settings.size

    def embed(self, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        """Counts of hashed words, one vector for each text."""
        return [self._counts(text) for text in texts]

    def _counts(self, text: str) -> list[float]:
        counts = [0.0] * self._size
        for word in _WORD.findall(text.lower()):
            counts[zlib.crc32(word.encode()) % self._size] += 1.0
        return counts
