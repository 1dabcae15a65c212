"""A model behind an OpenAI-compatible URL: verdicts in a schema, and chat completions passed through."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from judge.backend import Reply
from judge.discovery import read_key
from rayloop.core.failures import DeadlineExceeded, InfrastructureFailure
from serve_apps.judge_settings import OpenAIBackendSettings

TOP = 5
"""Alternatives of each token that the server is asked for."""
_VALUE = re.compile(r'"verdict"\s*:\s*"')


class OpenAIModel:
    """``judge.backend.ChatModel`` and ``serve_apps.judge_service.Chat``. Nothing is retried here: clients do that."""

    def __init__(self, settings: OpenAIBackendSettings, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.name = settings.model
        self.settings: Mapping[str, Any] = {"temperature": 0, "seed": 0, "max_tokens": settings.max_tokens}
        self._logprobs = {"logprobs": True, "top_logprobs": TOP} if settings.logprobs else {}
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

    async def reply(self, messages: Sequence[Mapping[str, Any]], schema: Mapping[str, Any]) -> Reply:
        form = {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": schema}}
        body = {"model": self.name, "messages": messages, "response_format": form, **self.settings, **self._logprobs}
        status, answer = await self.complete(body)
        if status != 200:
            raise InfrastructureFailure(f"{self._client.base_url} answered {status}: {_message(answer)}")
        try:
            choice = answer["choices"][0]
            text = choice["message"]["content"] or ""
            tokens = (choice.get("logprobs") or {}).get("content") or ()
            return Reply(str(text), correct_probability(tokens))
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise InfrastructureFailure(f"{self._client.base_url}: no chat completion: {str(answer)[:200]}") from error

    async def complete(self, body: Mapping[str, Any]) -> tuple[int, Any]:
        """Status and JSON body of POST chat/completions. Raises DeadlineExceeded, InfrastructureFailure."""
        async with self._slots:
            try:
                answer = await self._client.post("chat/completions", json=body)
                return answer.status_code, answer.json()
            except httpx.TimeoutException as error:
                raise DeadlineExceeded(f"{self._client.base_url}: {type(error).__name__}") from error
            except (httpx.HTTPError, ValueError) as error:
                raise InfrastructureFailure(f"{self._client.base_url}: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        await self._client.aclose()


def correct_probability(tokens: Sequence[Mapping[str, Any]]) -> float | None:
    """P(correct) / (P(correct) + P(incorrect)) at the first token of the verdict's value; None when it is not among them.

    ``tokens`` as in OpenAI's ``logprobs.content``. A token counts for the word that it begins.
    """
    text = "".join(token["token"] for token in tokens)
    if (found := _VALUE.search(text)) is None:
        return None
    end = 0
    for token in tokens:
        begin, end = end, end + len(token["token"])
        if end > found.end():
            break
    else:
        return None
    skip = max(0, found.end() - begin)
    sums = {"correct": 0.0, "incorrect": 0.0}
    for option in token["top_logprobs"]:
        beginning = option["token"][skip:]
        for word in sums:
            if beginning and (word.startswith(beginning) or beginning.startswith(f'{word}"')):
                sums[word] += math.exp(option["logprob"])
    total = sum(sums.values())
    return sums["correct"] / total if total > 0 else None


def _message(answer: Any) -> str:
    return str(answer)[:200]
