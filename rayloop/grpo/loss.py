"""The clipped policy-gradient loss per token (docs/algorithm.md, sections 2 and 6), and its metrics.

N is the number of loss tokens of a micro-batch: the sampled tokens of its trajectories, one trajectory after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rayloop.grpo.settings import LossSettings

LAG_BUCKETS = 4
"""k3 is split by version lag 0, 1, 2 and 3 or more."""
SHARES = ("clip_low", "clip_high", "clip_dual", "capped")
"""Masks of tokens, which ``finalize`` gives as fractions."""
SUMS = (
    *("tokens", *SHARES, "weight", "weight_squared", "mismatch", "mismatch_k3"),
    *("kl_tokens", "kl", "entropy_tokens", "entropy"),
    *(f"{name}_{i}" for name in ("lag_tokens", "lag_k3", "lag_mismatch") for i in range(LAG_BUCKETS)),
)
MAXIMA = ("ratio", "mismatch")


@dataclass(frozen=True, slots=True)
class LossMetrics:
    """``sums`` [len(SUMS)] and ``maxima`` [len(MAXIMA)], float64: all-reduce with SUM and MAX, then ``finalize``."""

    sums: Tensor
    maxima: Tensor

    @classmethod
    def zero(cls, device: torch.device | str = "cpu") -> LossMetrics:
        """Returns the metrics of no token, which a rank without tokens contributes."""
        sums, maxima = (torch.zeros(len(names), dtype=torch.float64, device=device) for names in (SUMS, MAXIMA))
        return cls(sums, maxima)

    @classmethod
    def of(
        cls,
        *,
        ratio: Tensor,
        clips: tuple[Tensor, Tensor, Tensor],
        capped: Tensor,
        mismatch: Tensor,
        mismatch_k3: Tensor,
        kl: Tensor | None = None,
        entropy: Tensor | None = None,
        lag: Tensor | None = None,
    ) -> LossMetrics:
        """Returns the metrics of per-token values [N]. ``clips``: masks (low, high, dual); ``mismatch``: old - behaviour, nats."""
        weight = torch.exp(mismatch.double().clamp(-RATIO_BOUND, RATIO_BOUND))
        low, high, dual = clips
        tokens = torch.full((), float(ratio.numel()), dtype=torch.float64, device=ratio.device)
        none = torch.zeros((), dtype=torch.float64, device=ratio.device)
        sums = [tokens, *map(_sum, (low, high, dual, capped, weight, weight.square(), mismatch.abs(), mismatch_k3))]
        for values in (kl, entropy):
            sums += [none, none] if values is None else [tokens, _sum(values)]
        if lag is None:
            sums += [none] * (3 * LAG_BUCKETS)
        else:
            buckets = [lag.clamp(0, LAG_BUCKETS - 1) == i for i in range(LAG_BUCKETS)]
            sums += [_sum(bucket) for bucket in buckets] + [_sum(mismatch_k3 * bucket) for bucket in buckets]
            sums += [_sum(mismatch.abs() * bucket) for bucket in buckets]
        return cls(torch.stack(sums), torch.stack([_max(ratio), _max(mismatch.abs())]))

    def merge(self, other: LossMetrics) -> LossMetrics:
        """The metrics of both sets of tokens."""
        return LossMetrics(self.sums + other.sums, torch.maximum(self.maxima, other.maxima))

    def finalize(self) -> dict[str, float]:
        """Returns name -> value for the log; empty without tokens.

        ``ratio_max``; ``clip_low``, ``clip_high``, ``clip_dual``, ``capped``: fractions of tokens;
        ``effective_sample_size``: (sum w)^2 / (n * sum w^2) in (0, 1] with w = exp(old - behaviour), uncapped;
        ``logprob_mismatch_mean``, ``logprob_mismatch_max``: |old - behaviour| in nats; ``logprob_mismatch_k3``; mean and k3
        also by version lag, ``.../lag_<i>``; ``kl`` (k3 to the reference) and ``entropy``, in nats, when computed.
        """
        sums = dict(zip(SUMS, self.sums.tolist(), strict=True))
        maxima = dict(zip(MAXIMA, self.maxima.tolist(), strict=True))
        n = sums["tokens"]
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
            if tokens := sums[f"lag_tokens_{i}"]:
                values[f"logprob_mismatch_k3/lag_{i}"] = sums[f"lag_k3_{i}"] / tokens
                values[f"logprob_mismatch_mean/lag_{i}"] = sums[f"lag_mismatch_{i}"] / tokens
        for name in ("kl", "entropy"):
            if tokens := sums[f"{name}_tokens"]:
                values[name] = sums[name] / tokens
        return values


def _sum(values: Tensor) -> Tensor:
    return values.detach().double().sum()


def _max(values: Tensor) -> Tensor:
    """The maximum of values >= 0, 0 when there are none."""
    return torch.cat([values.detach().double(), values.new_zeros(1, dtype=torch.float64)]).max()


RATIO_BOUND = 20.0
"""Log-ratios are clamped to ±20 before exp, as in verl: far outside any clip range, and no broken token overflows a sum."""
K3_BOUND = 10.0
"""Log-ratios are clamped to ±10 where k3 only measures; ``LossSettings.kl_bound`` is the loss's own bound."""


@dataclass(frozen=True, slots=True)
class PerToken:
    """``loss`` [N] with gradient, not yet weighted by the aggregation; ``metrics`` are this micro-batch's sums."""

    loss: Tensor
    metrics: LossMetrics


@dataclass(frozen=True, slots=True)
class Denominator:
    """Loss tokens and trajectories (``sequences``) of one optimizer update, over all ranks and micro-batches. They are counted
    before the backward pass. Trajectories with advantage 0 count although they are skipped."""

    tokens: int
    sequences: int


def policy_loss(
    current: Tensor,
    old: Tensor,
    behaviour: Tensor,
    advantage: Tensor,
    settings: LossSettings,
    reference: Tensor | None = None,
    entropy: Tensor | None = None,
    on_policy: Tensor | None = None,
    lag: Tensor | None = None,
) -> PerToken:
    """Returns the loss of each token: ``w * (clip_loss + kl_coef * k3) - entropy_coef * entropy``.

    All arguments are [N]: log-probs of the sampled tokens, advantages, entropies in nats. ``current`` and ``entropy`` carry the
    gradient; every other log-prob is a constant. ``w``: importance weight (``_correction``), ``clip_loss``: PPO's (``_clipped``).
    ``on_policy`` (bool) marks replayed tokens treated as on-policy: their behaviour is ``old`` and their weight 1.
    ``lag`` (int64) is each token's version lag in steps, for the metrics only.
    Raises ValueError when a coefficient is positive but its input is missing.
    """
    old, behaviour, advantage = old.detach(), behaviour.detach(), advantage.detach()
    if on_policy is not None:
        behaviour = torch.where(on_policy, old, behaviour)
    anchor, weight, capped = _correction(old, behaviour, on_policy, settings)
    ratio = torch.exp((current - anchor).clamp(-RATIO_BOUND, RATIO_BOUND))
    loss, clips = _clipped(ratio, advantage, settings)
    kl = None if reference is None else k3(current, reference.detach(), settings.kl_bound, settings.kl_cap)
    if settings.kl_coef > 0:
        if kl is None:
            raise ValueError("kl_coef is positive, but the batch carries no reference log-probs")
        loss = loss + settings.kl_coef * kl
    loss = weight * loss
    if settings.entropy_coef > 0:
        if entropy is None:
            raise ValueError("entropy_coef is positive, but no entropy was computed")
        loss = loss - settings.entropy_coef * entropy
    mismatch = old - behaviour
    metrics = LossMetrics.of(
        ratio=ratio, clips=clips, capped=capped, mismatch=mismatch, mismatch_k3=k3(behaviour, old), kl=kl, entropy=entropy, lag=lag
    )
    return PerToken(loss, metrics)


def _correction(old: Tensor, behaviour: Tensor, on_policy: Tensor | None, settings: LossSettings) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the log-probs [N] in the ratio's denominator, the importance weight [N], and where the cap applied (bool [N]).

    decoupled: ratio to the trainer's old log-probs, times the weight ``exp(old - behaviour)`` (decoupled PPO, arXiv:2110.00641; in
    AReaL, arXiv:2505.24298), truncated at the cap (truncated importance sampling, TIS, as in IMPALA, arXiv:1802.01561). bypass:
    ratio to the engine's log-probs, weight 1 (PPO, arXiv:1707.06347). none: ratio to the old log-probs, weight 1.
    """
    ones, nowhere = torch.ones_like(old), torch.zeros_like(old, dtype=torch.bool)
    match settings.correction:
        case "bypass":
            return behaviour, ones, nowhere
        case "none":
            return old, ones, nowhere
        case "decoupled":
            weight = torch.exp((old - behaviour).clamp(-RATIO_BOUND, RATIO_BOUND))
            capped = weight > settings.correction_cap
            if on_policy is not None:
                capped = capped & ~on_policy
            return old, torch.where(capped, settings.correction_cap, weight), capped


def _clipped(ratio: Tensor, advantage: Tensor, settings: LossSettings) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Returns ``-min(ratio * A, clip(ratio) * A)`` [N], and where the low, high and dual clip apply (bool [N] each). PPO's
    clipped loss (arXiv:1707.06347) with a clip of its own above 1 (DAPO, arXiv:2503.14476). For A < 0 the loss is at most
    ``dual_clip * |A|`` (dual-clip PPO, arXiv:1912.09729)."""
    plain = -ratio * advantage
    bound = -ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * advantage
    loss = torch.maximum(plain, bound)
    clipped = bound > plain
    dual = torch.zeros_like(clipped)
    if settings.dual_clip is not None:
        ceiling = -settings.dual_clip * advantage
        dual = (advantage < 0) & (loss > ceiling)
        loss = torch.where(dual, ceiling, loss)
    return loss, (clipped & (advantage < 0), clipped & (advantage > 0), dual)


def k3(current: Tensor, reference: Tensor, bound: float = K3_BOUND, cap: float | None = None) -> Tensor:
    """Returns ``exp(d) - d - 1`` [N] >= 0 with ``d = reference - current`` clamped to ±bound, at most ``cap``. Estimates
    KL(current || reference) from tokens sampled by ``current``: the k3 estimator of John Schulman's note "Approximating KL
    divergence" (joschu.net/blog/kl-approx.html, 2020), used by GRPO (arXiv:2402.03300)."""
    d = (reference - current).clamp(-bound, bound)
    estimate = torch.expm1(d) - d
    return estimate if cap is None else estimate.clamp(max=cap)


def token_weights(segment: Tensor, settings: LossSettings, denominator: Denominator) -> Tensor:
    """Returns weights [N] float32; ``(weights * loss).sum()``, summed over all micro-batches and ranks, is the loss of the
    update. ``segment`` [N] int64 >= 0 is the trajectory of each token; a trajectory is never split over micro-batches.
    token-mean: DAPO (arXiv:2503.14476); seq-mean-token-mean: GRPO (arXiv:2402.03300); seq-mean-token-sum-norm: Dr. GRPO
    (arXiv:2503.20783). Raises ValueError for an empty denominator."""
    if denominator.tokens <= 0 or denominator.sequences <= 0:
        raise ValueError(f"an update over {denominator.tokens} tokens of {denominator.sequences} trajectories")
    ones = torch.ones(segment.shape, dtype=torch.float32, device=segment.device)
    match settings.aggregation:
        case "token-mean":
            return ones / denominator.tokens
        case "seq-mean-token-sum":
            return ones / denominator.sequences
        case "seq-mean-token-mean":
            lengths = torch.bincount(segment)[segment]
            return ones / (denominator.sequences * lengths)
        case "seq-mean-token-sum-norm":
            if settings.norm_length is None:
                raise ValueError("seq-mean-token-sum-norm needs norm_length")
            return ones / settings.norm_length
