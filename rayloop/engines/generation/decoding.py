"""Decodes one batch of sequences with a transformers model.

Each distinct prompt is prefilled once; then decoding goes token by token. Shapes: U distinct
prompts, B sequences, P padded prompt length, R position rows (1 for text models, 4 with M-RoPE).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from rayloop.core.failures import DataFailure
from rayloop.core.model_families import family
from rayloop.core.token_mask import TokenMask
from rayloop.core.types import FinishReason, PromptImage, Sampling, TokenIds, TokenPrompt
from rayloop.engines.attention import use_grouped_decoding
from rayloop.engines.generation.sampler import Sampler, StopStrings, packed, uniforms
from rayloop.engines.models import Vision, image_features, positions, tensor_cache


@dataclass(frozen=True)
class Prompt:
    """A prompt as tensors: ``token_ids`` [T], ``positions`` [R, T], ``grids`` [n, 3], and images.

    An image is its features [tokens, hidden], or its pixels [patches, dim] for a model that mixes
    features into many layers.
    """

    token_ids: Tensor
    positions: Tensor
    grids: Tensor
    images: tuple[Tensor, ...]


@dataclass(frozen=True)
class DecodeRequest:
    """One sequence to decode.

    ``finish`` takes the turn when it ends; ``abandoned`` is True when the caller no longer waits.
    """

    prompt: TokenPrompt
    sampling: Sampling
    finish: Callable[[TokenIds, tuple[float, ...], FinishReason, TokenMask | None], None]
    fail: Callable[[Exception], None]
    abandoned: Callable[[], bool]


class Decoder:
    """Decodes batches; not thread-safe."""

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer, vision: Vision | None) -> None:
        use_grouped_decoding(model)
        self._model = model
        self._tokenizer = tokenizer
        self._vision = vision
        self._vocabulary: int = model.config.get_text_config().vocab_size
        self._features = tensor_cache()

    def forget(self) -> None:
        """Drop cached image features, which the old weights made."""
        self._features.clear()

    @torch.inference_mode()
    def decode(self, rows: Sequence[DecodeRequest]) -> None:
        """Decode ``rows`` as one batch, and call each one's ``finish``.

        A broken prompt's ``fail`` is called instead.
        """
        rows, prompts, index = self._prompts(rows)
        if rows:
            _Batch(self._model, self._tokenizer, self._vocabulary, rows).run(prompts, index)

    def _prompts(
        self, rows: Sequence[DecodeRequest]
    ) -> tuple[list[DecodeRequest], list[Prompt], list[int]]:
        """Return the rows that can be decoded, the distinct prompts, and each row's prompt."""
        valid_rows: list[DecodeRequest] = []
        index: list[int] = []
        prompts: list[Prompt] = []
        numbers: dict[tuple[TokenIds, tuple[str, ...]], int] = {}
        for row in rows:
            # Equal tokens can show other images, so these belong to the key.
            key = (row.prompt.token_ids, tuple(image.ref.sha256 for image in row.prompt.images))
            if key not in numbers:
                try:
                    prompts.append(self._prompt(row.prompt))
                except DataFailure as error:
                    # A broken prompt fails alone: the rest of the batch is decoded.
                    row.fail(error)
                    continue
                numbers[key] = len(prompts) - 1
            valid_rows.append(row)
            index.append(numbers[key])
        return valid_rows, prompts, index

    def _prompt(self, prompt: TokenPrompt) -> Prompt:
        if not prompt.token_ids:
            raise DataFailure("prompt", "it has no tokens")
        if prompt.images and self._vision is None:
            raise DataFailure(
                "prompt", f"it has {len(prompt.images)} images, but the model is text-only"
            )
        token_ids = torch.tensor(prompt.token_ids)
        grid_rows = [image.ref.grid for image in prompt.images]
        grids = torch.tensor(grid_rows, dtype=torch.int64).reshape(-1, 3)
        position_ids = positions(self._model, token_ids, grids)
        images: tuple[Tensor, ...] = ()
        if self._vision:
            images = tuple(self._image(self._vision, image) for image in prompt.images)
        return Prompt(token_ids, position_ids, grids, images)

    def _image(self, vision: Vision, image: PromptImage) -> Tensor:
        """Return the image's features [tokens, hidden], or its pixels.

        Each image is encoded alone: the rest of the batch does not change its features.
        """
        if not family(self._model.config.model_type).pooled:
            return vision.pixels(image.ref, image.data)

        def features() -> Tensor:
            pixels = vision.pixels(image.ref, image.data).to(self._model.device, self._model.dtype)
            return image_features(self._model, pixels, torch.tensor([image.ref.grid]))[0]

        return self._features.made(image.ref.sha256, features)


CACHE_HEADROOM = 128
"""Free tokens of a cache after it was copied."""


class _AppendedLayer(DynamicLayer):
    """Keys and values [B, heads, T, d] in tensors with room for more tokens.

    transformers' own layer copies them at every token.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, *arguments: object, **options: object
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values; returns all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._roomy: dict[str, Tensor] = {}
            self.keys: Tensor
            self.values: Tensor
        self.keys = self._append("keys", self.keys, key_states)
        self.values = self._append("values", self.values, value_states)
        return self.keys, self.values

    def _append(self, name: str, past: Tensor, new: Tensor) -> Tensor:
        """Return ``past`` and ``new`` [B, heads, n, d] as one tensor.

        It is a view of a larger one, whose room the next call uses.
        """
        if not past.numel():
            return new
        start = past.shape[-2]
        end = start + new.shape[-2]
        buffer = self._roomy.get(name)
        # After a selection of rows the past is another
        # tensor, and the old room does not continue it.
        continues = buffer is not None and buffer.data_ptr() == past.data_ptr()
        if buffer is None or not continues or end > buffer.shape[-2]:
            buffer = past.new_empty(*past.shape[:2], end + CACHE_HEADROOM, past.shape[-1])
            buffer[:, :, :start] = past
            self._roomy[name] = buffer
        buffer[:, :, start:end] = new
        return buffer[:, :, :end]


class _Batch:
    """The state of one batch.

    Finished sequences stay in it until half are finished; then it is compacted.
    """

    _positions: Tensor
    """Positions of the next tokens, as the model counts them: [3 or 1, U, 1]."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        vocabulary: int,
        rows: Sequence[DecodeRequest],
    ) -> None:
        self._model = model
        self._device = model.device
        self._rows = rows
        samplings = [row.sampling for row in rows]
        self._budget = np.array([sampling.max_tokens for sampling in samplings])
        self._longest = int(self._budget.max())

        # All draws are made here: a sequence's numbers then do not depend on who shares the batch.
        draws = [
            uniforms(row.prompt.seed, len(row.prompt.token_ids), self._longest) for row in rows
        ]
        self._sampler = Sampler(samplings, np.stack(draws), vocabulary, self._device)
        self._stop = StopStrings(tokenizer, samplings)
        self._tokens: npt.NDArray[np.int64] = np.zeros((len(rows), self._longest), np.int64)
        self._logprobs: npt.NDArray[np.float32] = np.zeros((len(rows), self._longest), np.float32)
        self._kept_tokens: list[list[npt.NDArray[np.int64]]] = [[] for _ in rows]
        self._members = np.arange(len(rows))
        """Which row each sequence of the batch is [B]."""
        self._live: npt.NDArray[np.bool_] = np.ones(len(rows), np.bool_)
        """Which sequences of the batch are unfinished [B]."""

    def run(self, prompts: Sequence[Prompt], index: Sequence[int]) -> None:
        """Prefill ``prompts``, and decode until all sequences are finished.

        Sequence i gets the cache of prompt ``index[i]``.
        """
        # Each prompt runs once; its cache is then copied to every sequence that begins with it.
        logits = self._prefill(prompts)
        select = torch.tensor(index, device=self._device)
        logits = logits[select]
        self._select(select)
        for position in range(self._longest):
            tokens, logprobs, ends, kept_tokens = self._sampler.sample(logits, position)
            self._tokens[self._members, position] = tokens.numpy(force=True)
            self._logprobs[self._members, position] = logprobs.numpy(force=True)
            if kept_tokens.numel():
                self._record_kept(kept_tokens.numpy(force=True))
            self._finish(position + 1, ends.numpy(force=True))
            if not self._live.any():
                return
            # Compacting copies the cache, so it waits until that halves the work of each step.
            if 2 * self._live.sum() <= len(self._live):
                tokens = self._compact(tokens)
            logits = self._forward(self._positions, input_ids=tokens[:, None])
            self._positions = self._positions + 1

    def _record_kept(self, kept_tokens: npt.NDArray[np.int64]) -> None:
        """Note the tokens [B, k] that top_p and top_k kept; -1 fills rows with fewer."""
        for member, row in zip(self._members.tolist(), kept_tokens, strict=True):
            self._kept_tokens[member].append(row[row >= 0])

    def _prefill(self, prompts: Sequence[Prompt]) -> Tensor:
        """Return the logits [U, V] after the prompts, and set cache, mask and next positions.

        The prompts are left-padded to one length.
        """
        length = max(len(prompt.token_ids) for prompt in prompts)
        token_ids = torch.zeros(len(prompts), length, dtype=torch.int64)
        position_rows = len(prompts[0].positions)
        position_ids = torch.zeros(position_rows, len(prompts), length, dtype=torch.int64)
        # The mask has room for all new tokens, so that it need not grow with each of them.
        mask = torch.ones(len(prompts), length + self._longest, dtype=torch.bool)
        for i, prompt in enumerate(prompts):
            padding = length - len(prompt.token_ids)
            token_ids[i, padding:] = prompt.token_ids
            position_ids[:, i, padding:] = prompt.positions
            mask[i, :padding] = False
        # Prompts of one length need no mask, and SDPA is faster without.
        self._mask = None if mask.all() else mask.to(self._device)
        self._cache = DynamicCache(config=self._model.config)
        self._cache.layers = [
            _AppendedLayer() if type(layer) is DynamicLayer else layer
            for layer in self._cache.layers
        ]
        self._length = 0
        self._positions = self._next_positions(position_ids).to(self._device)
        inputs = self._inputs(prompts, token_ids.to(self._device))
        return self._forward(position_ids.to(self._device), **inputs)

    def _inputs(self, prompts: Sequence[Prompt], token_ids: Tensor) -> dict[str, Tensor]:
        """Return the model's arguments for the padded prompts [U, P] and their images."""
        images = [image for prompt in prompts for image in prompt.images]
        if not images:
            return {"input_ids": token_ids}
        stacked = torch.cat(images).to(self._device, self._model.dtype)
        if not family(self._model.config.model_type).pooled:
            grids = torch.cat([prompt.grids for prompt in prompts]).to(self._device)
            return {"input_ids": token_ids, "pixel_values": stacked, "image_grid_thw": grids}
        embeddings = self._model.get_input_embeddings()(token_ids)
        # Both are in the order of the prompts.
        embeddings[token_ids == self._model.config.image_token_id] = stacked
        return {"inputs_embeds": embeddings}

    @staticmethod
    def _next_positions(position_ids: Tensor) -> Tensor:
        """Return the positions [R, U, 1] after ``position_ids`` [R, U, P].

        Text continues its own count, the M-RoPE rows continue after their common maximum.
        """
        following = position_ids.amax(-1, keepdim=True)
        if len(position_ids) > 1:
            following[1:] = following[1:].amax(0)
        return following + 1

    def _forward(self, position_ids: Tensor, **inputs: Tensor) -> Tensor:
        """Return the logits [B, V] of the last new tokens, at ``position_ids`` [R, B, n]."""
        self._length += position_ids.shape[-1]
        output = self._model(
            attention_mask=None if self._mask is None else self._mask[:, : self._length],
            position_ids=position_ids if len(position_ids) > 1 else position_ids[0],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
            **inputs,
        )
        logits: Tensor = output.logits
        return logits[:, -1]

    def _finish(self, n: int, ends: np.ndarray) -> None:
        """Finish the sequences that ended with their ``n``-th token, and drop abandoned ones."""
        live = np.flatnonzero(self._live)
        # Strings are looked for in all live sequences with one call of the tokenizer.
        stops = self._stop.reached(self._members[live].tolist(), self._tokens, n)
        for i, stop in zip(live.tolist(), stops, strict=True):
            member = int(self._members[i])
            row = self._rows[member]
            if ends[i]:
                reason = FinishReason.END_TOKEN
            elif stop:
                reason = FinishReason.STOP_STRING
            elif n == self._budget[member]:
                reason = FinishReason.LENGTH
            else:
                # A caller that was cancelled needs no further
                # tokens, and frees its place in the batch.
                self._live[i] = not row.abandoned()
                continue
            self._live[i] = False
            token_ids = tuple(self._tokens[member, :n].tolist())
            logprobs = tuple(self._logprobs[member, :n].tolist())
            kept_tokens = packed(row.sampling, self._kept_tokens[member])
            row.finish(token_ids, logprobs, reason, kept_tokens)

    def _compact(self, tokens: Tensor) -> Tensor:
        """Drop the finished sequences; returns the others' ``tokens``."""
        select = torch.from_numpy(np.flatnonzero(self._live)).to(self._device)
        self._select(select)
        self._sampler.select(select)
        self._members = self._members[self._live]
        self._live = self._live[self._live]
        return tokens[select]

    def _select(self, select: Tensor) -> None:
        for layer in self._cache.layers:
            # A recurrent state has only ``reorder_cache``.
            select_rows = getattr(layer, "batch_select_indices", layer.reorder_cache)
            select_rows(select)
        self._positions = self._positions[:, select]
        self._mask = None if self._mask is None else self._mask[select]
