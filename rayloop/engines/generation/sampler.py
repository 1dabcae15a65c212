"""Sampling from ``log_softmax(mask(logits) / temperature)`` (docs/algorithm.md, section 1), and
where a turn ends. All B sequences of a batch are at the same position of their turn; V is the size
of the vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from rayloop.core.failures import DataFailure
from rayloop.core.kept import Kept
from rayloop.core.types import Completion, FinishReason, Sampling, TokenPrompt, Version


def uniforms(seed: int, context: int, n: int) -> npt.NDArray[np.float64]:
    """The uniform draws [n] in [0, 1) of one turn: a function of the request's seed and context
    length alone. The context length keeps the turns of an episode apart when they share a seed.
    """
    # SeedSequence refuses negative numbers, hence the
    # mask. Philox gives one stream on all machines.
    return np.random.Generator(
        np.random.Philox(np.random.SeedSequence([seed & (2**64 - 1), context]))
    ).random(n)


class Sampler:
    """One batch's distributions and uniform streams ``draws`` [B, N]."""

    def __init__(
        self,
        samplings: Sequence[Sampling],
        draws: npt.NDArray[np.float64],
        vocabulary: int,
        device: torch.device,
    ) -> None:
        temperature = torch.tensor(
            [[s.temperature] for s in samplings], dtype=torch.float32, device=device
        )
        self._greedy = temperature[:, 0] == 0
        # Greedy log-probs are those at temperature 1; a division by 0 would make them NaN.
        self._temperature = temperature.masked_fill(self._greedy[:, None], 1.0)
        self._min_tokens = torch.tensor([[s.min_tokens] for s in samplings], device=device)
        self._longest_min = max(s.min_tokens for s in samplings)
        self._banned = _table([s.banned_tokens for s in samplings], vocabulary).to(device)
        self._ends = _table([s.end_tokens for s in samplings], vocabulary).to(device)
        self._draws = torch.from_numpy(draws).to(device)
        most = [s.most_kept or 0 for s in samplings]
        self._widest = min(max(most), vocabulary)
        self._most = torch.tensor(most, device=device)[:, None]
        self._top_p = torch.tensor([[s.top_p] for s in samplings], device=device)

    def sample(self, logits: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens [B] int64, their log-probs [B] float32, which are end tokens [B] bool, and the
        kept tokens [B, k] int64, -1 where fewer are (k = 0 without ``top_p`` and ``top_k``).
        ``logits`` [B, V] are those of ``position`` in the turn. Greedy sequences take the most
        likely token. Logits that are NaN give log-probs that are, which the rollout actor refuses.
        """
        mask = self._banned
        if position < self._longest_min:
            mask = mask | (self._ends & (position < self._min_tokens))
        logprobs = torch.log_softmax(
            logits.float().masked_fill(mask, -torch.inf) / self._temperature, dim=-1
        )
        logprobs, kept = self._truncated(logprobs)
        # In float32 the sum over 152,000 tokens is off by more than a rare token's probability.
        cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
        total = cumulative[:, -1:]
        # A draw that rounding brought up to the total would
        # point past every token, the banned ones included.
        draw = torch.minimum(
            self._draws[:, position : position + 1] * total,
            total.nextafter(torch.zeros_like(total)),
        )
        sampled = torch.searchsorted(cumulative, draw, right=True)[:, 0].clamp_max(
            logprobs.shape[-1] - 1
        )  # with NaN: behind all
        tokens = torch.where(self._greedy, logprobs.argmax(-1), sampled)[:, None]
        return (
            tokens[:, 0],
            logprobs.gather(1, tokens)[:, 0],
            self._ends.gather(1, tokens)[:, 0],
            kept,
        )

    def _truncated(self, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs [B, V] over the kept tokens of each sequence that has ``top_p`` or ``top_k``,
        and those tokens [B, k].
        """
        if not self._widest:
            return logprobs, torch.empty(len(logprobs), 0, dtype=torch.int64)
        likeliest, tokens = logprobs.topk(self._widest)
        among = likeliest.masked_fill(
            torch.arange(self._widest, device=likeliest.device) >= self._most, -torch.inf
        )
        probabilities = among.softmax(-1)
        # A token stays while those before it have less than
        # top_p, so that the likeliest one always stays.
        dropped = among.isinf() | (probabilities.cumsum(-1) - probabilities >= self._top_p)
        left = torch.full_like(logprobs, -torch.inf).scatter(
            1, tokens, likeliest.masked_fill(dropped, -torch.inf)
        )
        # Rows without truncation keep their log-probs bit for bit.
        return torch.where(self._most > 0, left.log_softmax(-1), logprobs), tokens.masked_fill(
            dropped, -1
        )

    def select(self, rows: Tensor) -> None:
        """Keep only these sequences, in this order."""
        self._greedy, self._temperature = self._greedy[rows], self._temperature[rows]
        self._min_tokens, self._draws = self._min_tokens[rows], self._draws[rows]
        self._banned, self._ends = self._banned[rows], self._ends[rows]
        self._most, self._top_p = self._most[rows], self._top_p[rows]


class StopStrings:
    """Whether a sequence's text contains one of its stop strings.

    A turn shorter than ``min_tokens`` never stops.
    """

    def __init__(self, tokenizer: Tokenizer, samplings: Sequence[Sampling]) -> None:
        self._tokenizer, self._samplings = tokenizer, samplings
        # A token is at least one byte, so a stop string completed by the newest token lies in this
        # many last tokens.
        self._window = [max((len(stop.encode()) for stop in s.stop), default=0) for s in samplings]
        self._any = any(self._window)

    def reached(self, rows: Sequence[int], tokens: npt.NDArray[np.int64], n: int) -> list[bool]:
        """For each of ``rows`` of ``tokens`` [B, N], of which the first ``n`` are sampled."""
        if not self._any:
            return [False] * len(rows)
        tails: list[list[int]] = []
        for row in rows:
            sampling, window = self._samplings[row], self._window[row]
            # A stop string before min_tokens did not end the turn,
            # so at that length the whole text is searched once.
            start = max(0, n - window) if n > sampling.min_tokens else 0
            tails.append(
                tokens[row, start:n].tolist() if window and n >= sampling.min_tokens else []
            )
        texts = self._tokenizer.decode_batch(tails, skip_special_tokens=False)
        return [
            any(stop in text for stop in self._samplings[row].stop)
            for row, text in zip(rows, texts, strict=True)
        ]


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
        self._prompt, self._sampling = prompt, sampling
        self._logprobs: list[float] = []
        self._kept: list[npt.NDArray[np.int64]] = []
        self._version: Version | None = None
        self._stops = StopStrings(tokenizer, [sampling])
        self._sampler: Sampler | None = None

    def add(self, logits: Tensor, version: Version) -> None:
        """Sample the next token from ``logits`` [V], which the weights of ``version`` give after
        the last token.
        """
        # The oldest weights of a turn count for staleness.
        self._version = self._version or version
        if self._sampler is None:
            draws = uniforms(
                self._prompt.seed, len(self._prompt.token_ids), self._sampling.max_tokens
            )
            self._sampler = Sampler([self._sampling], draws[None], len(logits), logits.device)
        *sampled_as, kept = self._sampler.sample(logits[None], len(self._logprobs))
        token, logprob, ends = (each.item() for each in sampled_as)
        self._kept.append(kept.numpy(force=True)[0])
        self.ids.append(int(token))
        self._logprobs.append(float(logprob))
        sampled = self._sampled
        if ends:
            self.finish = FinishReason.END_TOKEN
        elif self._stops.reached([0], np.array([sampled]), len(sampled))[0]:
            self.finish = FinishReason.STOP_STRING
        elif len(sampled) == self._sampling.max_tokens:
            self.finish = FinishReason.LENGTH

    def completion(self) -> Completion:
        """Returns the turn, which must have ended, with the version of its first token."""
        assert self.finish is not None
        assert self._version is not None
        kept = packed(self._sampling, self._kept)
        return Completion(
            tuple(self._sampled), tuple(self._logprobs), self.finish, self._version, kept
        )

    @property
    def _sampled(self) -> list[int]:
        return self.ids[len(self._prompt.token_ids) :]


def packed(sampling: Sampling, rows: Sequence[npt.NDArray[np.int64]]) -> Kept | None:
    """The kept tokens of a turn, from the row of each of its positions; None when ``sampling``
    removes none.
    """
    return None if sampling.most_kept is None else Kept.of([row[row >= 0] for row in rows])


def _table(tokens: Sequence[Sequence[int]], vocabulary: int) -> Tensor:
    """[B, V] bool: the listed tokens of each sequence."""
    table = torch.zeros(len(tokens), vocabulary, dtype=torch.bool)
    for row, listed in zip(table, tokens, strict=True):
        row[list(listed)] = True
    return table
