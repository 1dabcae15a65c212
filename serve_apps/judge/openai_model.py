"""A model behind an OpenAI-compatible URL.

It gives verdicts in a schema, and passes chat completions through.
"""

import asyncio
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import httpx

from rayloop.core.failures import DataFailure, DeadlineExceeded, InfrastructureFailure
from rayloop.judge.discovery import read_key
from rayloop.judge.grader import Reply
from rayloop.serve_apps.settings import OpenAIBackendSettings

TOP_LOGPROBS = 5
"""Alternatives of each token that the server is asked to return."""
_TOO_LONG = re.compile(
    r"context_length_exceeded|(maximum|max) (context|model|sequence)[ _]?len|context"
    r" (length|window|size)"
    r"|longer than the (maximum )?(model|context)|too (long|many tokens)|max_model_len",
    re.IGNORECASE,
)
"""Messages for a prompt that does not fit.

OpenAI's code, and the texts of vLLM, SGLang, llama.cpp and TGI.
"""
_MALFORMED_ERRORS = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""Errors of the code that reads a body in another form than expected."""
_VERDICT_KEY = re.compile(r'"verdict"\s*:\s*"')
_MODEL_CARD_KEYS = ("root", "parent", "owned_by", "max_model_len")


class ChatAnswer(NamedTuple):
    """HTTP status and JSON body, both in OpenAI's form.

    ``retry_after``: the header of this name, "" without it.
    """

    status: int
    body: Any
    retry_after: str = ""


class CompletionModel(ABC):
    """A ``rayloop.judge.grader.ChatModel`` over chat completions.

    ``extra`` are further keys of a request for a verdict; ``about`` is everything that a verdict
    depends on, except the model's name.
    """

    def __init__(
        self, name: str, max_tokens: int, extra: Mapping[str, Any], about: Mapping[str, Any]
    ) -> None:
        self.name = name
        sampling = {"temperature": 0, "seed": 0, "max_tokens": max_tokens}
        self.settings: Mapping[str, Any] = {**sampling, **about}
        self._keys = {**sampling, **extra}

    @abstractmethod
    async def complete(self, body: Mapping[str, Any]) -> ChatAnswer:
        """A chat completion. Raises DeadlineExceeded, InfrastructureFailure."""

    @abstractmethod
    async def identity(self) -> Mapping[str, Any]:
        """A description of the model that now has the name. Raises InfrastructureFailure."""

    # Not abstract: another server's state does not depend on this process.
    def alive(self) -> None:  # noqa: B027
        """Raise InfrastructureFailure when only a new process can help."""

    @abstractmethod
    async def close(self) -> None:
        """Free the engine or the connections."""

    async def reply(
        self, messages: Sequence[Mapping[str, Any]], schema: Mapping[str, Any]
    ) -> Reply:
        """The model's reply to a request for a verdict, without retries.

        Raises like ``complete``, DataFailure for a too long prompt, and InfrastructureFailure for
        another refusal and a cut reply: the judge's configuration causes those.
        """
        form = {
            "type": "json_schema",
            "json_schema": {"name": "verdict", "strict": True, "schema": schema},
        }
        status, answer, _ = await self.complete(
            {"model": self.name, "messages": messages, "response_format": form, **self._keys}
        )
        if status in (400, 413, 422) and _TOO_LONG.search(json.dumps(answer)):
            raise DataFailure(self.name, f"refused with {status}: {str(answer)[:200]}")
        if status != 200:
            raise InfrastructureFailure(f"{self.name} answered {status}: {str(answer)[:200]}")
        try:
            return self._read(answer)
        except _MALFORMED_ERRORS as error:
            raise InfrastructureFailure(
                f"{self.name}: no chat completion: {str(answer)[:200]}"
            ) from error

    def _read(self, answer: Any) -> Reply:
        """The reply in a chat completion. Raises InfrastructureFailure for a cut reply."""
        choice = answer["choices"][0]
        if choice.get("finish_reason") == "length":
            raise InfrastructureFailure(
                f"{self.name}: the reply was cut off after max_tokens {self._keys['max_tokens']}"
            )
        text = choice["message"]["content"] or ""
        # Mistral's form, in which the model's thoughts are parts of another type.
        if isinstance(text, list):
            text = "".join(part["text"] for part in text if part["type"] == "text")
        tokens = (choice.get("logprobs") or {}).get("content") or ()
        return Reply(str(text), correct_probability(tokens))


class OpenAIModel(CompletionModel):
    """A model on a server that speaks OpenAI's API. Its errors name the URL."""

    def __init__(
        self, settings: OpenAIBackendSettings, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        extra = {"logprobs": True, "top_logprobs": TOP_LOGPROBS} if settings.logprobs else {}
        about = {"url": settings.url, "logprobs": settings.logprobs}
        super().__init__(settings.model, settings.max_tokens, extra, about)
        key = read_key(settings.key_file)
        self._client = httpx.AsyncClient(
            base_url=settings.url.rstrip("/") + "/",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(settings.timeout, connect=settings.connect),
            limits=httpx.Limits(max_connections=settings.concurrency),
            trust_env=False,
            transport=transport,
        )
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._timeout = settings.timeout

    async def complete(self, body: Mapping[str, Any]) -> ChatAnswer:
        """A chat completion. Raises DeadlineExceeded too when no connection is free in time."""
        try:
            # The wait for a slot has its own deadline, so that httpx counts only the reply.
            async with asyncio.timeout(self._timeout):
                await self._slots.acquire()
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{self._client.base_url}: no free slot within {self._timeout:g} s"
            ) from error
        try:
            answer = await self._client.post("chat/completions", json=body)
            retry_after = answer.headers.get("retry-after", "")
            return ChatAnswer(answer.status_code, answer.json(), retry_after)
        except httpx.TimeoutException as error:
            raise DeadlineExceeded(f"{self._client.base_url}: {type(error).__name__}") from error
        except (httpx.HTTPError, ValueError, RecursionError) as error:
            raise InfrastructureFailure(
                f"{self._client.base_url}: {type(error).__name__}: {error}"
            ) from error
        finally:
            self._slots.release()

    async def identity(self) -> Mapping[str, Any]:
        """The model's entry in the server's list of models, without ``created``.

        {} for a server without such a list.
        """
        url = f"{self._client.base_url}models"
        try:
            answer = await self._client.get("models")
        except httpx.HTTPError as error:
            raise InfrastructureFailure(f"{url}: {type(error).__name__}: {error}") from error
        except ValueError:
            return {}
        if answer.status_code == 429 or answer.status_code >= 500:
            raise InfrastructureFailure(f"{url} answered {answer.status_code}")
        try:
            (card,) = [card for card in answer.json()["data"] if card["id"] == self.name]
            return {key: card.get(key) for key in _MODEL_CARD_KEYS}
        except _MALFORMED_ERRORS:
            return {}

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def correct_probability(tokens: Sequence[Mapping[str, Any]]) -> float | None:
    """P(correct) / (P(correct) + P(incorrect)) at the first token of the verdict's value.

    None when neither word occurs. ``tokens`` are OpenAI's ``logprobs.content``. A token counts for
    the word that it begins.
    """
    text = "".join(token["token"] for token in tokens)
    key = _VERDICT_KEY.search(text)
    if key is None:
        return None
    start, token = _token_at(tokens, key.end())
    if token is None:
        return None

    key_characters = max(0, key.end() - start)
    sums = {"correct": 0.0, "incorrect": 0.0}
    for alternative in token["top_logprobs"]:
        beginning = alternative["token"][key_characters:]
        for word in sums:
            if beginning and (word.startswith(beginning) or beginning.startswith(f'{word}"')):
                # Some servers round a log-probability to a value above 0.
                sums[word] += math.exp(min(alternative["logprob"], 0.0))
    total = sum(sums.values())
    return sums["correct"] / total if total > 0 else None


def _token_at(
    tokens: Sequence[Mapping[str, Any]], position: int
) -> tuple[int, Mapping[str, Any] | None]:
    """The token with the character at a position of the text, and the position of its start."""
    start = 0
    for token in tokens:
        end = start + len(token["token"])
        if end > position:
            return start, token
        start = end
    return start, None
