"""One turn by itself, for an engine that does not batch: the policy's distribution, the seed's draws, and where the turn ends."""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer
from torch import Tensor

from rayloop.core.failures import DataFailure
from rayloop.core.types import Completion, FinishReason, Sampling, TokenPrompt, Version
from rayloop.engines.generation.sampler import Sampler, StopStrings, uniforms


class Turn:
    """``ids`` are the prompt's tokens and those sampled so far. Raises DataFailure for a prompt without tokens, or with images."""

    def __init__(self, prompt: TokenPrompt, sampling: Sampling, tokenizer: Tokenizer) -> None:
        if prompt.images or not prompt.token_ids:
            raise DataFailure("prompt", f"{len(prompt.token_ids)} tokens, {len(prompt.images)} images: only text is read here")
        self.ids = list(prompt.token_ids)
        self.finish: FinishReason | None = None
        """Set when the turn has ended."""
        self._prompt, self._sampling = prompt, sampling
        self._logprobs: list[float] = []
        self._version: Version | None = None
        self._stops = StopStrings(tokenizer, [sampling])
        self._sampler: Sampler | None = None

    def add(self, logits: Tensor, version: Version) -> None:
        """Sample the next token from the logits [V] that the model of this version has at the last one."""
        self._version = self._version or version
        if self._sampler is None:
            draws = uniforms(self._prompt.seed, len(self._prompt.token_ids), self._sampling.max_tokens)
            self._sampler = Sampler([self._sampling], draws[None], len(logits), logits.device)
        token, logprob, ends = (each.item() for each in self._sampler.sample(logits[None], len(self._logprobs)))
        self.ids.append(int(token))
        self._logprobs.append(float(logprob))
        sampled = self.ids[len(self._prompt.token_ids) :]
        if ends:
            self.finish = FinishReason.END_TOKEN
        elif self._stops.reached([0], np.array([sampled]), len(sampled))[0]:
            self.finish = FinishReason.STOP_STRING
        elif len(sampled) == self._sampling.max_tokens:
            self.finish = FinishReason.LENGTH

    def completion(self) -> Completion:
        """The turn, which must have ended; its version is that of its first token."""
        assert self.finish is not None
        assert self._version is not None
        tokens = tuple(self.ids[len(self._prompt.token_ids) :])
        return Completion(tokens, tuple(self._logprobs), self.finish, self._version)
