"""Log-probs of sampled tokens under a model that vLLM serves: the reference of a run that has no
room for a large teacher.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from rayloop.chat.tokenizer import load_tokenizer
from rayloop.core.failures import ConfigError, DataFailure, WorkerLost
from rayloop.core.model_files import resolve
from rayloop.core.types import Trajectory
from rayloop.engines.generation.openai_requests import client, request
from rayloop.engines.settings import ModelSettings
from rayloop.grpo.batch import by_segment

KEY = "reference.path"
BLOCK = 1024
"""Tokens whose text the server tokenises at a time, to compare."""
MASKED, ROUNDING = -9999.0, 1e-3
"""vLLM's stand-in for a log-prob of minus infinity; what a log-prob may lie above 0."""


class OpenAiScorer:
    """What ``FrozenScorer`` computes, by the ``prompt_logprobs`` of the server at ``url``,
    http://host:port/v1. Raises ConfigError unless it serves one model, returns log-probs of token
    ids, and has the tokenizer of ``model``; WorkerLost without an answer.
    """

    def __init__(self, model: ModelSettings, url: str) -> None:
        self._url, self._path = url.rstrip("/"), model.path
        self._tokenizer = load_tokenizer(resolve(model.path, model.revision).folder)
        self._served = asyncio.run(self._examined())

    def logprobs(self, trajectories: Sequence[Trajectory]) -> list[npt.NDArray[np.float32]]:
        """One array [sampled_tokens] per trajectory.

        Raises WorkerLost for an answer without the log-prob of a sampled token, ConfigError for
        images and for what the server refuses.
        """
        return by_segment(trajectories, lambda segments: asyncio.run(self._all(segments)))

    async def _all(self, segments: Sequence[Trajectory]) -> list[npt.NDArray[np.float32]]:
        async with client(self._url) as http:
            return await asyncio.gather(*(self._one(http, segment) for segment in segments))

    async def _one(self, http: httpx.AsyncClient, segment: Trajectory) -> npt.NDArray[np.float32]:
        if segment.images:
            raise ConfigError(
                f"{KEY}: {self._url} gets token ids alone, and trajectory {segment.id} has images."
                " Name a folder"
            )
        flat = segment.flatten()
        ids = flat.token_ids.tolist()
        found = await self._asked(http, ids)
        try:
            if len(found) != len(ids):
                raise ValueError(f"{len(found)} entries for {len(ids)} tokens")
            values = [
                float(found[i][str(ids[i])]["logprob"]) for i in np.flatnonzero(flat.loss_mask)
            ]
            # The comparison has ``not``, so that a NaN is found as well.
            if wrong := [value for value in values if not MASKED < value <= ROUNDING]:
                raise ValueError(f"{wrong[0]} is no log-prob")
        except (KeyError, TypeError, ValueError) as error:
            raise WorkerLost(
                f"{KEY}: {self._url} gave no log-prob for each of {len(ids)} tokens: {error!r}"
            ) from error
        return np.array(values, np.float32)

    async def _asked(self, http: httpx.AsyncClient, ids: list[int]) -> Any:
        """The log-probs of the prompt ``ids``; None: the answer has none."""
        # The interface wants at least one new token, which is not used.
        body = {
            "model": self._served,
            "prompt": ids,
            "prompt_logprobs": 0,
            "max_tokens": 1,
            "temperature": 0.0,
        }
        try:
            _, answer = await request([(f"{self._url}/completions", http)], body, KEY)
        except DataFailure as error:
            raise ConfigError(f"{KEY}: {error}") from error
        choice = answer["choices"][0] if isinstance(answer, dict) and answer.get("choices") else {}
        return choice.get("prompt_logprobs")

    async def _examined(self) -> str:
        """The name of the model that the server has."""
        async with client(self._url) as http:
            _, models = await request([(f"{self._url}/models", http)], None, KEY)
            try:
                [self._served] = [model["id"] for model in models["data"]]
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"{KEY}: {self._url}/models does not name one model: {str(models)[:200]}"
                ) from error
            # The first token has no context, so a log-prob needs two.
            if await self._asked(http, [0, 0]) is None:
                raise ConfigError(
                    f"{KEY}: {self._url} returns no prompt_logprobs, as vLLM's server does. Name a"
                    " folder"
                )
            at = str(httpx.URL(self._url).copy_with(path="/tokenize"))
            for first in range(0, size := self._tokenizer.get_vocab_size(), BLOCK):
                text = self._tokenizer.decode(
                    list(range(first, min(first + BLOCK, size))), skip_special_tokens=False
                )
                _, answer = await request(
                    [(at, http)],
                    {"model": self._served, "prompt": text, "add_special_tokens": False},
                    KEY,
                )
                self._compare(
                    self._tokenizer.encode(text, add_special_tokens=False).ids, answer["tokens"]
                )
        return self._served

    def _compare(self, ours: list[int], theirs: list[int]) -> None:
        # None at both ends shows a text that has more tokens on one side.
        for one, other in zip([*ours, None], [*theirs, None], strict=False):
            if one != other:
                shown = [
                    None if token is None else (token, self._tokenizer.id_to_token(token))
                    for token in (one, other)
                ]
                raise ConfigError(
                    f"{KEY}: {self._url} has another tokenizer than model.path {self._path}: of one"
                    f" text a token is {shown[1]} there and {shown[0]} here. Name a model with the"
                    " same tokenizer"
                )
