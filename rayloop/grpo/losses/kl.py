"""Estimators of the KL divergence to the reference, from sampled tokens (joschu.net/blog/kl-approx.html, 2020)."""

import torch
from torch import Tensor

from rayloop.grpo.losses.settings import Estimator

BOUND = 10.0
"""Log-ratios are clamped to ±10 nats: at 10 below the reference a token costs 22,015 in k3."""
LOW_VAR_BOUND, LOW_VAR_CAP = 20.0, 10.0
"""verl's ``low_var_kl``: a wider log-ratio, and a cap on the term itself, beyond which there is no gradient."""


def k3(current: Tensor, reference: Tensor, bound: float = BOUND, cap: float | None = None) -> Tensor:
    """Returns ``exp(d) - d - 1`` [N] >= 0 with ``d = reference - current`` clamped to ±bound, at most ``cap``. Estimates
    KL(current || reference) from tokens sampled by ``current``; used by GRPO (arXiv:2402.03300)."""
    d = (reference - current).clamp(-bound, bound)
    estimate = torch.expm1(d) - d
    return estimate if cap is None else estimate.clamp(max=cap)


def estimate(current: Tensor, reference: Tensor, estimator: Estimator) -> Tensor:
    """Returns the estimate [N] of KL(current || reference), in nats, with gradient. Over tokens that ``current`` sampled, the
    gradient of k2 and k3+ is the KL's own, that of k3 the one of KL(reference || current), and that of k1 is 0 in the mean."""
    if estimator == "low_var_kl":
        return k3(current, reference, LOW_VAR_BOUND, LOW_VAR_CAP)
    if estimator == "k3":
        return k3(current, reference)
    d = (current - reference).clamp(-BOUND, BOUND)
    if estimator == "k1":
        return d
    half = d.square() / 2
    return half if estimator == "k2" else half - half.detach() + k3(current, reference).detach()


def to_go(values: Tensor, segment: Tensor) -> Tensor:
    """Returns for each token [N] the sum of ``values`` [N] from it to the end of its trajectory, summed in
    float64, so that the trajectories before it in the row do not matter. ``segment`` [N] int64 ascends."""
    exact = values.double()
    whole = exact.new_zeros(int(segment.max()) + 1 if len(segment) else 1).index_add(0, segment, exact)
    before = exact.cumsum(0) - exact
    first = torch.zeros_like(whole).index_add(0, segment[1:], before[1:] * (segment[1:] != segment[:-1]))
    return (whole[segment] - (before - first[segment])).to(values)
