"""The clipped policy-gradient loss on packed loss tokens (docs/algorithm.md, sections 2 and 6), and its metrics.

N is the number of loss tokens of a micro-batch: the sampled tokens of its trajectories, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rayloop.grpo.metrics import LossMetrics
from rayloop.grpo.settings import LossSettings

RATIO_BOUND = 20.0
"""Log-ratios are clamped to ±20 before exp (verl does the same): far outside any clip range, finite in float32."""
K3_BOUND = 10.0
"""Log-ratios are clamped to ±10 where k3 only measures; ``LossSettings.kl_bound`` is the loss's own bound."""


@dataclass(frozen=True, slots=True)
class PerToken:
    """``loss`` [N] with gradient, not yet weighted by the aggregation; ``metrics`` are this micro-batch's sums."""

    loss: Tensor
    metrics: LossMetrics


@dataclass(frozen=True, slots=True)
class Denominator:
    """What one optimizer update averages over, counted over all ranks and micro-batches before the backward pass.

    ``tokens``: loss tokens; ``sequences``: trajectories. Those with advantage 0 count even if they are skipped.
    """

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
    """Per-token loss: ``w * (clip_loss + kl_coef * k3) - entropy_coef * entropy``.

    All arguments are [N]. ``current`` and ``entropy`` carry the gradient; every other log-prob is a constant. The
    clipped loss is PPO's (Schulman et al. 2017) with a separate upper clip (DAPO) and dual clip (Ye et al. 2020).
    ``on_policy`` (bool) marks replayed tokens treated as on-policy: their behaviour is ``old`` and their weight 1.
    ``lag`` (int64) is each token's version lag, for the metrics only.
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
    drift = old - behaviour
    drift_k3 = k3(behaviour, old)
    metrics = LossMetrics.of(
        ratio=ratio, clips=clips, capped=capped, drift=drift, drift_k3=drift_k3, kl=kl, entropy=entropy, lag=lag
    )
    return PerToken(loss, metrics)


def _correction(old: Tensor, behaviour: Tensor, on_policy: Tensor | None, settings: LossSettings) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probs [N] that the ratio compares with, the weight [N] of each token, and where the cap bound it."""
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
    """``-min(ratio * A, clip(ratio) * A)`` [N], bounded by the dual clip; and where low, high and dual clip hold."""
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
    """``exp(d) - d - 1`` [N] >= 0, ``d = reference - current`` clamped to ±bound: estimates KL(current || reference).

    Tokens are samples of ``current`` (Schulman, "Approximating KL divergence", 2020). No estimate is above ``cap``.
    """
    d = (reference - current).clamp(-bound, bound)
    estimate = torch.expm1(d) - d
    return estimate if cap is None else estimate.clamp(max=cap)


def token_weights(segment: Tensor, settings: LossSettings, denominator: Denominator) -> Tensor:
    """Weights [N] float32 such that ``(weights * loss).sum()``, summed over all micro-batches and ranks, is the loss.

    ``segment`` [N] int64 >= 0 tells tokens of one trajectory from those of another; a trajectory is never split over
    micro-batches. Raises ValueError for an empty denominator.
    """
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
