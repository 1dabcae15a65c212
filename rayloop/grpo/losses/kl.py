"""Estimators of the KL divergence to the reference, from sampled tokens
(joschu.net/blog/kl-approx.html, 2020), and coefficients that change from step to step.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from rayloop.grpo.losses.settings import AdaptiveEntropy, AdaptiveKl, Estimator, LossSettings

BOUND = 10.0
"""k3's exponential stops growing at 10 nats below the reference, where a token costs 22,015."""
FAR = 100.0
"""Log-ratios are at most ±100 nats, so that a reference that excludes a token gives no infinity."""
LOW_VAR_BOUND, LOW_VAR_CAP = 20.0, 10.0
"""verl's ``low_var_kl``: a wider log-ratio, and a cap on the term itself, beyond which verl has no
gradient either.
"""
ERROR_BOUND = 0.2
"""Of the relative error of the KL (arXiv:1909.08593, equation 4)."""


def k3(
    current: Tensor, reference: Tensor, bound: float = BOUND, cap: float | None = None
) -> Tensor:
    """Returns ``exp(d) - d - 1`` [N] >= 0 with ``d = reference - current`` of at most ``bound``,
    and the term at most ``cap``. Estimates KL(current || reference) from tokens sampled by
    ``current``; used by GRPO (arXiv:2402.03300).
    """
    d = -log_ratio(current, reference, low=-bound)
    # expm1 keeps the digits that exp(d) - 1 loses where the policies agree.
    estimate = torch.expm1(d) - d
    return estimate if cap is None else estimate.clamp(max=cap)


def log_ratio(current: Tensor, other: Tensor, low: float = -FAR, high: float = FAR) -> Tensor:
    """Returns ``current - other`` [N] within [low, high].

    Its gradient is that of ``current``, beyond the bounds too: a token that is far off would
    otherwise never come back.
    """
    # A plain clamp has no gradient outside; the second term is 0, and carries it.
    value = (current - other).detach().clamp(low, high)
    return value + (current - current.detach())


def estimate(current: Tensor, reference: Tensor, estimator: Estimator) -> Tensor:
    """Returns the estimate [N] of KL(current || reference), in nats, with gradient.

    Over tokens that ``current`` sampled, the gradient of k2 and k3+ is the KL's own, that of k3 the
    one of KL(reference || current), and that of k1 is 0 in the mean.
    """
    if estimator == "low_var_kl":
        return k3(current, reference, LOW_VAR_BOUND, LOW_VAR_CAP)
    if estimator == "k3":
        return k3(current, reference)
    d = log_ratio(current, reference)
    if estimator == "k1":
        return d
    half = d.square() / 2
    # It has the gradient of k2 and the value of k3, which is never negative and varies little.
    return half if estimator == "k2" else half - half.detach() + k3(current, reference).detach()


def to_go(values: Tensor, segment: Tensor) -> Tensor:
    """Returns for each token [N] the sum of ``values`` [N] from it to the end of its trajectory,
    summed in float64, so that the trajectories before it in the row do not matter. ``segment`` [N]
    int64 ascends.
    """
    exact = values.double()
    # A micro-batch may have no predicted token, and max of an empty tensor raises.
    whole = exact.new_zeros(int(segment.max()) + 1 if len(segment) else 1).index_add(
        0, segment, exact
    )
    before = exact.cumsum(0) - exact
    first = torch.zeros_like(whole).index_add(
        0, segment[1:], before[1:] * (segment[1:] != segment[:-1])
    )
    return (whole[segment] - (before - first[segment])).to(values)


class Coefficients:
    """The coefficients of the KL and the entropy term, the same in all ranks.

    ``after`` gets each step's metrics; ``state`` and ``load``: for restarts.
    """

    def __init__(self, settings: LossSettings) -> None:
        kl, entropy = settings.kl_coef, settings.entropy_coef
        self._kl = kl if isinstance(kl, AdaptiveKl) else None
        self._entropy = entropy if isinstance(entropy, AdaptiveEntropy) else None
        self.kl = kl.start if isinstance(kl, AdaptiveKl) else kl
        self._base = entropy.start if isinstance(entropy, AdaptiveEntropy) else entropy
        self._open = self._entropy is None

    @property
    def entropy(self) -> float:
        """The entropy's coefficient; 0 while the entropy is above its target, or not yet known."""
        return self._base if self._open else 0.0

    def adapting(self) -> dict[str, float]:
        """Those that change from step to step, as they apply now, to log."""
        logged = {"kl_coef": self.kl} if self._kl is not None else {}
        return logged | ({"entropy_coef": self.entropy} if self._entropy is not None else {})

    def after(self, metrics: Mapping[str, float], trajectories: float) -> None:
        """Adapts to a step's ``kl`` and ``entropy`` (nats a token) over ``trajectories``, each
        counted once.
        """
        if self._kl is not None and "kl" in metrics:
            # The clip keeps one odd step from moving the coefficient far (arXiv:1909.08593).
            error = min(max(metrics["kl"] / self._kl.target - 1, -ERROR_BOUND), ERROR_BOUND)
            # More than five horizons of trajectories would make the factor negative.
            self.kl *= max(0.0, 1 + error * trajectories / self._kl.horizon)
        if self._entropy is not None and "entropy" in metrics:
            low = metrics["entropy"] < self._entropy.target
            self._base = max(0.0, self._base + (self._entropy.step if low else -self._entropy.step))
            self._open = metrics["entropy"] <= self._entropy.target

    def state(self) -> Tensor:
        """[3] float64."""
        return torch.tensor([self.kl, self._base, float(self._open)], dtype=torch.float64)

    def load(self, state: Tensor) -> None:
        """Continue from a ``state``."""
        self.kl, self._base, is_open = state.tolist()
        self._open = bool(is_open)
