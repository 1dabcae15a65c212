"""Generation by servers with the OpenAI interface, over HTTP.

It serves evaluation, and training with a server that returns token ids with log-probs and loads the
synced weights. Samples of other weights are off-policy from the second step on.
"""

import asyncio
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from itertools import groupby, product
from pathlib import Path
from typing import Any
from zlib import crc32

import httpx
from torch import Tensor

from rayloop.chat.tokenizer import load_tokenizer
from rayloop.core.failures import ConfigError, WeightSyncError, WorkerLost
from rayloop.core.protocols import EngineHealth, Manifest
from rayloop.core.types import (
    Completion,
    FinishReason,
    ImageSource,
    PromptImage,
    Sampling,
    TokenPrompt,
    Version,
)
from rayloop.data.images import data_url, portable, read
from rayloop.engines.generation.openai_requests import client, request
from rayloop.engines.models.saving import save_model
from rayloop.engines.settings import EnginePlace, ModelSettings, OpenAiHttpEngineSettings
from rayloop.transports.manifest import verify

IMAGE = "<|image_pad|>"


class OpenAiHttpEngine:
    """A ``GenerationEngine``.

    ``place.weights`` is where synced weights are written for the server to load.
    """

    def __init__(
        self, model: ModelSettings, settings: OpenAiHttpEngineSettings, place: EnginePlace
    ) -> None:
        self._model = model
        self._settings = settings
        self._folder = Path(place.weights) / "server"
        self._tokenizer = load_tokenizer(Path(model.path))
        self._start = self._tokenizer.token_to_id("<|im_start|>")
        self._end = self._tokenizer.token_to_id("<|im_end|>")
        if settings.interface == "chat" and (self._start is None or self._end is None):
            raise ConfigError(
                f"rollout.engine.interface: chat needs a ChatML template; {model.path} has no"
                " <|im_start|>"
            )
        self._image = self._tokenizer.token_to_id(IMAGE)
        self._version: Version | None = None
        self._running = 0
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._servers = [(url, client(url, headers)) for url in settings.addresses]

    async def generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        """Sample one turn.

        Raises DataFailure for a prompt that the server refuses, ConfigError, WorkerLost.
        """
        # It may have been closed again before this call runs.
        while not self._open.is_set():
            await self._open.wait()
        version = self._version if self._settings.update else Version(0, 0)
        if version is None:
            raise WorkerLost(
                "the server has no synced weights: the last load failed, or none has succeeded yet"
            )

        self._running += 1
        self._idle.clear()
        try:
            if self._settings.interface == "chat":
                return await self._chat(prompt, sampling, version)
            return await self._tokens(prompt, sampling, version)
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def leave(self, cohort: str) -> None:
        """Does nothing: the server batches."""

    async def pause(self) -> None:
        """Start no request; return when none is running."""
        self._open.clear()
        await self._idle.wait()

    async def resume(self) -> None:
        """Start requests again."""
        self._open.set()

    async def load(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """Write a model folder and have every server load it.

        Raises WeightSyncError, ConfigError before the first one. ``tensors`` [name] are whole and
        on the CPU.
        """
        if not self._settings.update:
            raise ConfigError(
                f"rollout.engine: {self._servers[0][0]} takes no weights (rollout.engine.update is"
                " empty)"
            )
        is_first = self._version is None
        self._version = None
        # A request raises ConfigError when the server's answers cannot be trained on.
        if is_first:
            await self._tokens(TokenPrompt((0,)), Sampling(max_tokens=1), Version(0, 0))
        target = self._folder / f"weights-{manifest.version}"
        # A server reads the folder later, so it must be whole before any is asked.
        await asyncio.to_thread(self._write, manifest, tensors, target)
        for (url, http), (path, body) in product(self._servers, self._settings.update.items()):
            address = str(httpx.URL(url).copy_with(path=path))
            _, answer = await request([(address, http)], _filled(body, str(target.resolve())))
            # Some servers answer 200 and put the failure into the body.
            if isinstance(answer, dict) and answer.get("success") is False:
                raise WeightSyncError(f"version {manifest.version}: {address} answered {answer}")
        self._version = manifest.version

    def health(self) -> EngineHealth:
        """Version and running requests."""
        return EngineHealth(self._version, self._running, 0)

    def _write(self, manifest: Manifest, tensors: Mapping[str, Tensor], target: Path) -> None:
        verify(manifest, tensors)
        # No server needs the folder of the last version any more, and each has a model's size.
        # The next load tries again where one cannot be removed.
        for old in self._folder.glob("weights-*"):
            shutil.rmtree(old, ignore_errors=True)
        save_model(self._model.path, target, tensors, limits=self._model)

    async def _tokens(
        self, prompt: TokenPrompt, sampling: Sampling, version: Version
    ) -> Completion:
        if prompt.images:
            raise ConfigError(
                "rollout.engine.interface: tokens sends no images; use chat (evaluation only), or"
                " kind: vllm"
            )
        url, answer = await request(
            self._addresses("/completions", prompt),
            {
                "model": self._settings.model,
                "prompt": list(prompt.token_ids),
                "seed": prompt.seed,
                # All truncation is switched off by name: servers
                # take other defaults from generation_config.json.
                "temperature": sampling.temperature,
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "max_tokens": sampling.max_tokens,
                "min_tokens": min(sampling.min_tokens, sampling.max_tokens),
                "stop": list(sampling.stop),
                "stop_token_ids": list(sampling.end_tokens),
                "include_stop_str_in_output": True,
                # -100 is the lowest bias that OpenAI's interface allows, and bans a token.
                "logit_bias": {str(token): -100 for token in sampling.banned_tokens},
                "logprobs": 1,
                "return_token_ids": True,
                "skip_special_tokens": False,
            },
        )
        try:
            [choice] = answer["choices"]
            token_ids = tuple(choice["token_ids"])
            logprobs = tuple(choice["logprobs"]["token_logprobs"])
            if len(token_ids) != len(logprobs):
                raise ValueError(f"{len(logprobs)} log-probs for {len(token_ids)} tokens")
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{url} does not return token ids with their log-probs ({error!r}), which training"
                " needs. vLLM's server does (return_token_ids); for evaluation use"
                " rollout.engine.interface: chat"
            ) from error
        return Completion(token_ids, logprobs, _finish_reason(choice), version)

    async def _chat(self, prompt: TokenPrompt, sampling: Sampling, version: Version) -> Completion:
        """Return the answer's text in our tokens, with NaN as log-probs.

        Stop strings are looked for here: servers would cut them off.
        """
        url, answer = await request(
            self._addresses("/chat/completions", prompt),
            {
                "model": self._settings.model,
                "messages": self.messages(prompt),
                "max_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "seed": prompt.seed,
            },
        )
        try:
            choice = answer["choices"][0]
            text = choice["message"]["content"] or ""
        except (KeyError, TypeError, IndexError) as error:
            raise ConfigError(
                f"{url} answered {str(answer)[:200]}, which has no message"
            ) from error
        reason = FinishReason.END_TOKEN
        if choice["finish_reason"] == "length":
            reason = FinishReason.LENGTH
        # The earliest stop string ends the turn, whichever comes first in the list.
        ends = [text.index(stop) + len(stop) for stop in sampling.stop if stop in text]
        if ends:
            text = text[: min(ends)]
            reason = FinishReason.STOP_STRING
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if reason is FinishReason.END_TOKEN and self._end is not None:
            ids.append(self._end)
        if len(ids) > sampling.max_tokens:
            ids = ids[: sampling.max_tokens]
            reason = FinishReason.LENGTH
        return Completion(tuple(ids), (math.nan,) * len(ids), reason, version)

    def messages(self, prompt: TokenPrompt) -> list[dict[str, Any]]:
        """Return the conversation that the prompt's ChatML tokens spell.

        The header of the turn to sample is left out.
        """
        images = iter(prompt.images)
        messages = []
        for is_start, tokens in groupby(prompt.token_ids, lambda token: token == self._start):
            if is_start:
                continue
            parts: list[dict[str, Any]] = []
            for is_image, run in groupby(tokens, lambda token: token == self._image):
                if is_image:
                    parts += _image_parts(len(list(run)), images)
                else:
                    parts.append({"type": "text", "text": self._text(list(run))})
            role, _, parts[0]["text"] = parts[0]["text"].partition("\n")
            content = [part for part in parts if part.get("text") != ""]
            messages.append({"role": role, "content": content})
        return [message for message in messages if message["content"]]

    def _text(self, ids: list[int]) -> str:
        """Return the text of the tokens before the end of the message."""
        if self._end in ids:
            ids = ids[: ids.index(self._end)]
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _addresses(self, path: str, prompt: TokenPrompt) -> list[tuple[str, httpx.AsyncClient]]:
        """Return the addresses to ask, in turn.

        The first server has seen the prompt's group, whose prefix it keeps.
        """
        # Python's own hash differs between processes, and each would choose another server.
        first = crc32(prompt.affinity.encode()) % len(self._servers)
        servers = (*self._servers[first:], *self._servers[:first])
        return [(url + path, http) for url, http in servers]


def _finish_reason(choice: Mapping[str, Any]) -> FinishReason:
    if choice["finish_reason"] == "length":
        return FinishReason.LENGTH
    # A server names a stop string; of an end token it gives the number, or nothing.
    if isinstance(choice.get("stop_reason"), str):
        return FinishReason.STOP_STRING
    return FinishReason.END_TOKEN


def _image_parts(tokens: int, images: Iterator[PromptImage]) -> list[dict[str, Any]]:
    """Return message parts of the next images, which fill ``tokens`` without text between them."""
    parts: list[dict[str, Any]] = []
    while tokens > 0:
        image = next(images)
        tokens -= image.ref.tokens
        parts.append({"type": "image_url", "image_url": {"url": _data_url(image)}})
    return parts


def _filled(value: Any, folder: str) -> Any:
    """Return ``value`` with the folder's path in its texts."""
    if isinstance(value, str):
        return value.replace("{folder}", folder)
    if isinstance(value, Mapping):
        return {key: _filled(part, folder) for key, part in value.items()}
    if isinstance(value, list):
        return [_filled(part, folder) for part in value]
    return value


def _data_url(image: PromptImage) -> str:
    data = image.data
    if data is None:
        data = read(ImageSource(path=image.ref.path))
    return data_url(portable(data))
