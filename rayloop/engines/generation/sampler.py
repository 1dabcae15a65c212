"""Sampling from ``log_softmax(mask(logits) / temperature)``, and the end of a turn.

See docs/algorithm.md, section 1. All B sequences of a batch are at the same position of their turn;
V is the size of the vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from rayloop.core.failures import DataFailure
from rayloop.core.token_mask import TokenMask
from rayloop.core.types import Completion, FinishReason, Sampling, TokenPrompt, Version


def uniforms(seed: int, context: int, n: int) -> npt.NDArray[np.float64]:
    """Return the uniform draws [n] in [0, 1) of one turn.

    They are a function of the request's seed and context length alone. The context length keeps the
    turns of an episode apart when they share a seed.
    """
    # SeedSequence refuses negative numbers, hence the
    # mask. Philox gives one stream on all machines.
    sequence = np.random.SeedSequence([seed & (2**64 - 1), context])
    return np.random.Generator(np.random.Philox(sequence)).random(n)


class Sampler:
    """One batch's distributions and uniform streams ``draws`` [B, N]."""

    def __init__(
        self,
        samplings: Sequence[Sampling],
        draws: npt.NDArray[np.float64],
        vocabulary: int,
        device: torch.device,
    ) -> None:
        temperatures = [[s.temperature] for s in samplings]
        temperature = torch.tensor(temperatures, dtype=torch.float32, device=device)
        self._greedy = temperature[:, 0] == 0
        # Greedy log-probs are those at temperature 1; a division by 0 would make them NaN.
        self._temperature = temperature.masked_fill(self._greedy[:, None], 1.0)
        self._min_tokens = torch.tensor([[s.min_tokens] for s in samplings], device=device)
        self._longest_min = max(s.min_tokens for s in samplings)
        self._banned = _table([s.banned_tokens for s in samplings], vocabulary).to(device)
        self._ends = _table([s.end_tokens for s in samplings], vocabulary).to(device)
        self._draws = torch.from_numpy(draws).to(device)
        most = [s.effective_top_k or 0 for s in samplings]
        self._widest = min(max(most), vocabulary)
        self._most = torch.tensor(most, device=device)[:, None]
        self._top_p = torch.tensor([[s.top_p] for s in samplings], device=device)

    def sample(self, logits: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the sampled tokens of all sequences at one ``position`` of their turn.

        They are tokens [B] int64, their log-probs [B] float32, which are end tokens [B] bool, and
        the kept tokens [B, k] int64, -1 where fewer are (k = 0 without ``top_p`` and ``top_k``).
        ``logits`` [B, V] belong to the position. Greedy sequences take the most likely token.
        Logits that are NaN give log-probs that are NaN, which the rollout actor refuses.
        """
        mask = self._banned
        if position < self._longest_min:
            mask = mask | (self._ends & (position < self._min_tokens))
        masked = logits.float().masked_fill(mask, -torch.inf)
        logprobs = torch.log_softmax(masked / self._temperature, dim=-1)
        logprobs, kept_tokens = self._truncated(logprobs)
        # In float32 the sum over 152,000 tokens is off by more than a rare token's probability.
        cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
        total = cumulative[:, -1:]
        # A draw that rounding brought up to the total would
        # point past every token, the banned ones included.
        scaled_draw = self._draws[:, position : position + 1] * total
        draw = torch.minimum(scaled_draw, total.nextafter(torch.zeros_like(total)))
        sampled = torch.searchsorted(cumulative, draw, right=True)[:, 0]
        # With NaN the search ends behind all tokens.
        sampled = sampled.clamp_max(logprobs.shape[-1] - 1)
        tokens = torch.where(self._greedy, logprobs.argmax(-1), sampled)[:, None]
        token_logprobs = logprobs.gather(1, tokens)[:, 0]
        ends = self._ends.gather(1, tokens)[:, 0]
        return tokens[:, 0], token_logprobs, ends, kept_tokens

    def _truncated(self, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probs [B, V] over the kept tokens, and those tokens [B, k].

        Only sequences with ``top_p`` or ``top_k`` are truncated.
        """
        if not self._widest:
            return logprobs, torch.empty(len(logprobs), 0, dtype=torch.int64)
        likeliest, tokens = logprobs.topk(self._widest)
        ranks = torch.arange(self._widest, device=likeliest.device)
        within_top_k = likeliest.masked_fill(ranks >= self._most, -torch.inf)
        probabilities = within_top_k.softmax(-1)
        # A token stays while those before it have less than
        # top_p, so that the likeliest one always stays.
        above = probabilities.cumsum(-1) - probabilities
        dropped = within_top_k.isinf() | (above >= self._top_p)
        remaining = likeliest.masked_fill(dropped, -torch.inf)
        truncated = torch.full_like(logprobs, -torch.inf).scatter(1, tokens, remaining)
        # Rows without truncation keep their log-probs bit for bit.
        result = torch.where(self._most > 0, truncated.log_softmax(-1), logprobs)
        return result, tokens.masked_fill(dropped, -1)

    def select(self, rows: Tensor) -> None:
        """Keep only these sequences, in this order."""
        self._greedy = self._greedy[rows]
        self._temperature = self._temperature[rows]
        self._min_tokens = self._min_tokens[rows]
        self._draws = self._draws[rows]
        self._banned = self._banned[rows]
        self._ends = self._ends[rows]
        self._most = self._most[rows]
        self._top_p = self._top_p[rows]


class StopStrings:
    """Whether a sequence's text contains one of its stop strings.

    A turn shorter than ``min_tokens`` never stops.
    """

    def __init__(self, tokenizer: Tokenizer, samplings: Sequence[Sampling]) -> None:
        self._tokenizer = tokenizer
        self._samplings = samplings
        # A token is at least one byte, so a stop string that the newest token
        # completes is within as many last tokens as the string has bytes.
        self._window = [_most_bytes(sampling.stop) for sampling in samplings]
        self._any = any(self._window)

    def reached(self, rows: Sequence[int], tokens: npt.NDArray[np.int64], n: int) -> list[bool]:
        """Return whether each of ``rows`` of ``tokens`` [B, N] stops after its first ``n``."""
        if not self._any:
            return [False] * len(rows)
        tails: list[list[int]] = []
        for row in rows:
            min_tokens = self._samplings[row].min_tokens
            window = self._window[row]
            # A stop string before min_tokens did not end the turn,
            # so at that length the whole text is searched once.
            start = max(0, n - window) if n > min_tokens else 0
            searches = window > 0 and n >= min_tokens
            tails.append(tokens[row, start:n].tolist() if searches else [])
        texts = self._tokenizer.decode_batch(tails, skip_special_tokens=False)
        return [
            any(stop in text for stop in self._samplings[row].stop)
            for row, text in zip(rows, texts, strict=True)
        ]


def _most_bytes(stops: Sequence[str]) -> int:
    return max((len(stop.encode()) for stop in stops), default=0)


class TurnSampler:
    """Samples one turn, for an engine that does not batch (docs/bring_your_own/engine.md).

    ``ids``: prompt and sampled tokens. Raises DataFailure for a prompt without tokens, or with
    images.
    """

    def __init__(self, prompt: TokenPrompt, sampling: Sampling, tokenizer: Tokenizer) -> None:
        if prompt.images or not prompt.token_ids:
            raise DataFailure(
                "prompt",
                f"{len(prompt.token_ids)} tokens, {len(prompt.images)} images: only text is read"
                " here",
            )
        self.ids = list(prompt.token_ids)
        self.finish: FinishReason | None = None
        """Set when the turn has ended."""
        self._prompt = prompt
        self._sampling = sampling
        self._logprobs: list[float] = []
        self._kept_tokens: list[npt.NDArray[np.int64]] = []
        self._version: Version | None = None
        self._stops = StopStrings(tokenizer, [sampling])
        self._sampler: Sampler | None = None

    def add(self, logits: Tensor, version: Version) -> None:
        """Sample the next token from ``logits`` [V] after the last token.

        ``version`` is that of the weights that gave the logits.
        """
        # The oldest weights of a turn count for staleness.
        self._version = self._version or version
        if self._sampler is None:
            draws = uniforms(
                self._prompt.seed, len(self._prompt.token_ids), self._sampling.max_tokens
            )
            self._sampler = Sampler([self._sampling], draws[None], len(logits), logits.device)
        tokens, logprobs, ends, kept_tokens = self._sampler.sample(
            logits[None], len(self._logprobs)
        )
        self._kept_tokens.append(kept_tokens.numpy(force=True)[0])
        self.ids.append(int(tokens.item()))
        self._logprobs.append(float(logprobs.item()))
        sampled = self._sampled
        if ends.item():
            self.finish = FinishReason.END_TOKEN
        elif self._stops.reached([0], np.array([sampled]), len(sampled))[0]:
            self.finish = FinishReason.STOP_STRING
        elif len(sampled) == self._sampling.max_tokens:
            self.finish = FinishReason.LENGTH

    def completion(self) -> Completion:
        """Return the turn, which must have ended, with the version of its first token."""
        assert self.finish is not None
        assert self._version is not None
        return Completion(
            tuple(self._sampled),
            tuple(self._logprobs),
            self.finish,
            self._version,
            packed(self._sampling, self._kept_tokens),
        )

    @property
    def _sampled(self) -> list[int]:
        return self.ids[len(self._prompt.token_ids) :]


def packed(sampling: Sampling, rows: Sequence[npt.NDArray[np.int64]]) -> TokenMask | None:
    """Return the kept tokens of a turn, from the row of each of its positions.

    None when ``sampling`` removes none.
    """
    if sampling.effective_top_k is None:
        return None
    return TokenMask.of([row[row >= 0] for row in rows])


def _table(tokens: Sequence[Sequence[int]], vocabulary: int) -> Tensor:
    """Return the listed tokens of each sequence, as [B, V] bool."""
    table = torch.zeros(len(tokens), vocabulary, dtype=torch.bool)
    for row, listed in zip(table, tokens, strict=True):
        row[list(listed)] = True
    return table
