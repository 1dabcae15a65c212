"""Log-probs of sampled tokens under a model that vLLM serves.

It is the reference of a run that has no room for a large teacher.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
from transformers import AutoConfig

from rayloop.chat.tokenizer import load_tokenizer
from rayloop.core.failures import ConfigError, DataFailure, WorkerLost
from rayloop.core.model_families import family
from rayloop.core.model_files import resolve
from rayloop.core.types import PromptImage, TokenPrompt, Trajectory
from rayloop.data.images import data_url, png
from rayloop.engines.generation.openai_requests import client, request, served_model
from rayloop.engines.models import collapsed, has_vision, picture
from rayloop.engines.settings import ModelSettings
from rayloop.grpo.batch import by_segment

KEY = "reference.path"
GENERATE = "/inference/v1/generate"
"""Path at which vLLM takes token ids with images, if it was started with ``--enable-scale-out``."""
TEXT_BLOCK_TOKENS = 1024
"""Tokens whose text the server tokenises at a time, to compare."""
MASKED_LOGPROB = -9999.0
"""vLLM's stand-in for a log-prob of minus infinity."""
LOGPROB_ROUNDING = 1e-3
"""How much a log-prob may be above 0."""


class OpenAiScorer:
    """Scores as ``FrozenScorer``, by the ``prompt_logprobs`` of the server at ``url``.

    ``url`` is http://host:port/v1. Raises ConfigError unless the server has one model, returns
    log-probs of token ids, and has the tokenizer of ``model``; WorkerLost without an answer.
    ``key``: the key or option of the address, which errors name. ``takes_images``: whether the
    server takes token ids with images.
    """

    takes_images: bool = False

    def __init__(self, model: ModelSettings, url: str, key: str = KEY) -> None:
        self._key = key
        self._url = url.rstrip("/")
        self._path = model.path
        folder = resolve(model.path, model.revision).folder
        self._tokenizer = load_tokenizer(folder)
        self._config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        self._served = asyncio.run(self._examine())

    def logprobs(self, trajectories: Sequence[Trajectory]) -> list[npt.NDArray[np.float32]]:
        """Return one array [sampled_tokens] per trajectory.

        Raises WorkerLost for an answer without the log-prob of a sampled token, ConfigError for
        images that the server does not take or expands to other tokens, and for a request that it
        refuses.
        """
        return by_segment(trajectories, lambda segments: asyncio.run(self._all(segments)))

    async def _all(self, segments: Sequence[Trajectory]) -> list[npt.NDArray[np.float32]]:
        async with client(self._url) as http:
            return await asyncio.gather(*(self._score(http, segment) for segment in segments))

    async def _score(self, http: httpx.AsyncClient, segment: Trajectory) -> npt.NDArray[np.float32]:
        flat = segment.flatten()
        ids = flat.token_ids.tolist()
        if segment.images:
            entries = await self._with_images(http, segment, ids)
        else:
            entries = await self._prompt_logprobs(http, ids)
        try:
            if len(entries) != len(ids):
                raise ValueError(f"{len(entries)} entries for {len(ids)} tokens")
            sampled = np.flatnonzero(flat.loss_mask)
            values = [float(entries[i][str(ids[i])]["logprob"]) for i in sampled]
            # The comparison has ``not``, so that a NaN is found as well.
            invalid = [value for value in values if not MASKED_LOGPROB < value <= LOGPROB_ROUNDING]
            if invalid:
                raise ValueError(f"{invalid[0]} is not a log-prob")
        except (KeyError, TypeError, ValueError) as error:
            raise WorkerLost(
                f"{self._key}: {self._url} gave no log-prob for each of {len(ids)} tokens:"
                f" {error!r}"
            ) from error
        return np.array(values, np.float32)

    async def _prompt_logprobs(self, http: httpx.AsyncClient, ids: list[int]) -> Any:
        """Return the log-probs of the prompt ``ids``; None: the answer has none."""
        # The interface wants at least one new token, which is not used.
        body = {
            "model": self._served,
            "prompt": ids,
            "prompt_logprobs": 0,
            "max_tokens": 1,
            "temperature": 0.0,
        }
        answer = await self._ask(http, f"{self._url}/completions", body)
        if not isinstance(answer, dict) or not answer.get("choices"):
            return None
        return answer["choices"][0].get("prompt_logprobs")

    async def _with_images(
        self, http: httpx.AsyncClient, segment: Trajectory, ids: list[int]
    ) -> Any:
        """Return the log-probs of the prompt ``ids``, which has the segment's images."""
        if not self.takes_images:
            raise ConfigError(
                f"{self._key}: {self._url} takes no images with token ids, and trajectory"
                f" {segment.id} has images. Start vLLM with --enable-scale-out, or name a folder"
            )
        images = [PromptImage(ref, segment.image_bytes.get(ref.sha256)) for ref in segment.images]
        parts = await asyncio.gather(*(asyncio.to_thread(self._part, image) for image in images))
        is_around = bool(family(self._config.model_type).around)
        prompt = TokenPrompt(tuple(ids), tuple(images))
        body = {
            "model": self._served,
            # The server expands the one token of each image.
            "token_ids": collapsed(prompt, self._config.image_token_id, around=is_around),
            "content_parts": parts,
            "sampling_params": {"prompt_logprobs": 0, "max_tokens": 1, "temperature": 0.0},
            "return_token_ids": True,
        }
        answer = await self._ask(http, self._generate, body)
        expanded = answer.get("prompt_token_ids")
        if expanded != ids:
            raise ConfigError(
                f"{self._key}: {self._url} expands images to other tokens than {self._path}:"
                f" {len(expanded or ())} tokens there and {len(ids)} here. Serve it with the"
                " min_pixels and max_pixels of the model section (--mm-processor-kwargs)"
            )
        return answer.get("prompt_logprobs")

    def _part(self, image: PromptImage) -> dict[str, str]:
        """An image in the size that the model sees, so that the server does not resize it."""
        is_grid = family(self._config.model_type).images == "patches"
        patch = self._config.vision_config.patch_size if is_grid else 0
        return {"type": "image_url", "url": data_url(png(picture(image, patch)))}

    @property
    def _generate(self) -> str:
        return str(httpx.URL(self._url).copy_with(path=GENERATE))

    async def _ask(self, http: httpx.AsyncClient, url: str, body: dict[str, Any]) -> Any:
        """Return the answer. Raises ConfigError for a request that the server refuses."""
        try:
            _, answer = await request([(url, http)], body, self._key)
        except DataFailure as error:
            raise ConfigError(f"{self._key}: {error}") from error
        return answer

    async def _examine(self) -> str:
        """Return the name of the model that the server has, after all checks."""
        async with client(self._url) as http:
            self._served = await served_model(self._url, self._key)
            refusal = (
                f"{self._key}: {self._url} returns no prompt_logprobs, as vLLM's server does. Name"
                " another server"
            )
            try:
                # The first token has no context, so a log-prob needs two.
                entries = await self._prompt_logprobs(http, [0, 0])
            except ConfigError as error:
                raise ConfigError(f"{refusal} ({error})") from error
            if entries is None:
                raise ConfigError(refusal)
            await self._compare_tokenizers(http)
            if has_vision(self._config):
                self.takes_images = await self._has_generate(http)
        return self._served

    async def _has_generate(self, http: httpx.AsyncClient) -> bool:
        try:
            await request([(self._generate, http)], {}, self._key)
        except DataFailure:
            # The path exists and refuses an empty request.
            return True
        except ConfigError:
            return False
        return True

    async def _compare_tokenizers(self, http: httpx.AsyncClient) -> None:
        """Raise ConfigError unless both tokenize the text of every token in the same way."""
        url = str(httpx.URL(self._url).copy_with(path="/tokenize"))
        size = self._tokenizer.get_vocab_size()
        for first in range(0, size, TEXT_BLOCK_TOKENS):
            tokens = list(range(first, min(first + TEXT_BLOCK_TOKENS, size)))
            text = self._tokenizer.decode(tokens, skip_special_tokens=False)
            body = {"model": self._served, "prompt": text, "add_special_tokens": False}
            _, answer = await request([(url, http)], body, self._key)
            ours = self._tokenizer.encode(text, add_special_tokens=False).ids
            self._compare(ours, answer["tokens"])

    def _compare(self, ours: list[int], theirs: list[int]) -> None:
        # None at both ends shows a text that has more tokens on one side.
        for our_token, their_token in zip([*ours, None], [*theirs, None], strict=False):
            if our_token != their_token:
                raise ConfigError(
                    f"{self._key}: {self._url} has another tokenizer than model.path {self._path}:"
                    f" of one text a token is {self._shown(their_token)} there and"
                    f" {self._shown(our_token)} here. Name a model with the same tokenizer"
                )

    def _shown(self, token: int | None) -> tuple[int, str | None] | None:
        return None if token is None else (token, self._tokenizer.id_to_token(token))
