"""The metrics of the loss, as sums that ranks and micro-batches add up."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from rayloop.grpo.losses.surrogates import RATIO_BOUND, LossOutputs

LAG_BUCKETS = 4
"""k3 is split by version lag 0, 1, 2 and 3 or more."""
SHARES = ("clip_low", "clip_high", "clip_dual", "capped")
"""Masks of tokens, which ``finalize`` gives as fractions."""
SUMS = (
    *("tokens", *SHARES, "weight", "weight_squared", "mismatch", "mismatch_k3"),
    *("kl_tokens", "kl", "entropy_tokens", "entropy"),
    *("perception_kl_tokens", "perception_kl"),
    *(f"lag_tokens_{i}" for i in range(LAG_BUCKETS)),
    *(f"lag_k3_{i}" for i in range(LAG_BUCKETS)),
    *(f"lag_mismatch_{i}" for i in range(LAG_BUCKETS)),
)
MAXIMA = ("ratio", "mismatch")


@dataclass(frozen=True)
class LossMetrics:
    """The metrics of a set of tokens: all-reduce ``sums`` with SUM and ``maxima`` with MAX.

    ``finalize`` then gives the values for the log.
    """

    sums: Tensor  # [len(SUMS)] float64
    maxima: Tensor  # [len(MAXIMA)] float64

    @classmethod
    def zero(cls, device: torch.device | str = "cpu") -> Self:
        """Returns the metrics of an empty set, which a rank without tokens contributes."""
        return cls(
            sums=torch.zeros(len(SUMS), dtype=torch.float64, device=device),
            maxima=torch.zeros(len(MAXIMA), dtype=torch.float64, device=device),
        )

    @classmethod
    def of(
        cls,
        *,
        ratio: Tensor,
        clips: LossOutputs,
        capped: Tensor,
        mismatch: Tensor,
        mismatch_k3: Tensor,
        kl: Tensor | None = None,
        entropy: Tensor | None = None,
        perception_kl: Tensor | None = None,
        lag: Tensor | None = None,
    ) -> Self:
        """Returns the metrics of per-token values [N].

        ``clips``: its masks; ``mismatch``: old - rollout log-probs, nats.
        """
        # Squares of weights span 17 orders of magnitude: a float32 sum would drop the small ones.
        weight = torch.exp(mismatch.double().clamp(-RATIO_BOUND, RATIO_BOUND))
        distance = mismatch.abs()
        tokens = torch.full((), float(ratio.numel()), dtype=torch.float64, device=ratio.device)
        zero = torch.zeros((), dtype=torch.float64, device=ratio.device)
        # The order is that of SUMS.
        sums = [tokens]
        for clip in (clips.low, clips.high, clips.dual):
            sums.append(zero if clip is None else _sum(clip))
        sums += map(_sum, (capped, weight, weight.square(), distance, mismatch_k3))
        for values in (kl, entropy, perception_kl):
            # The tensor has one length on all ranks, also where one of them lacks such a term.
            sums += [zero, zero] if values is None else [tokens, _sum(values)]
        if lag is None:
            sums += [zero] * (3 * LAG_BUCKETS)
        else:
            buckets = [lag.clamp(0, LAG_BUCKETS - 1) == i for i in range(LAG_BUCKETS)]
            sums += [_sum(bucket) for bucket in buckets]
            sums += [_sum(mismatch_k3 * bucket) for bucket in buckets]
            sums += [_sum(distance * bucket) for bucket in buckets]
        return cls(torch.stack(sums), torch.stack([_max(ratio), _max(distance)]))

    def merge(self, other: "LossMetrics") -> "LossMetrics":
        """The metrics of both sets of tokens."""
        return LossMetrics(self.sums + other.sums, torch.maximum(self.maxima, other.maxima))

    def finalize(self) -> dict[str, float]:
        """Returns name -> value for the log; empty without tokens.

        ``ratio_max``; ``clip_low``, ``clip_high``, ``clip_dual``, ``capped``: fractions of tokens;
        ``effective_sample_size``: (sum w)^2 / (n * sum w^2) in (0, 1] with w = exp(old - rollout
        log-prob), uncapped; ``logprob_mismatch_mean``, ``logprob_mismatch_max``: |old - rollout
        log-prob| in nats; ``logprob_mismatch_k3``; mean and k3 also by version lag,
        ``.../lag_<i>``; ``kl`` (k3 to the reference), ``entropy`` and ``perception_kl`` (to the
        policy with masked pictures), in nats, when computed.
        """
        sums = dict(zip(SUMS, self.sums.tolist(), strict=True))
        maxima = dict(zip(MAXIMA, self.maxima.tolist(), strict=True))
        n = sums["tokens"]
        # A step whose updates were all skipped has nothing to divide by.
        if n == 0:
            return {}
        values = {name: sums[name] / n for name in SHARES}
        values |= {
            "ratio_max": maxima["ratio"],
            "effective_sample_size": sums["weight"] ** 2 / (n * sums["weight_squared"]),
            "logprob_mismatch_mean": sums["mismatch"] / n,
            "logprob_mismatch_max": maxima["mismatch"],
            "logprob_mismatch_k3": sums["mismatch_k3"] / n,
        }
        for i in range(LAG_BUCKETS):
            tokens = sums[f"lag_tokens_{i}"]
            if tokens:
                values[f"logprob_mismatch_k3/lag_{i}"] = sums[f"lag_k3_{i}"] / tokens
                values[f"logprob_mismatch_mean/lag_{i}"] = sums[f"lag_mismatch_{i}"] / tokens
        for name in ("kl", "entropy", "perception_kl"):
            tokens = sums[f"{name}_tokens"]
            if tokens:
                values[name] = sums[name] / tokens
        return values


def _sum(values: Tensor) -> Tensor:
    return values.detach().double().sum()


def _max(values: Tensor) -> Tensor:
    """The maximum of values >= 0, and 0 without values."""
    # max of an empty tensor raises, and a rank's micro-batch may be empty.
    return torch.cat([values.detach().double(), values.new_zeros(1, dtype=torch.float64)]).max()
