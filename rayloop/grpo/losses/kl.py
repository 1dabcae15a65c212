"""Estimators of the KL divergence to the reference, and coefficients that change with the steps.

The estimates are from sampled tokens (joschu.net/blog/kl-approx.html, 2020).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from rayloop.grpo.losses.settings import AdaptiveEntropy, AdaptiveKl, Estimator, LossSettings

K3_BOUND = 10.0
"""k3's exponential stops growing at 10 nats below the reference, where a token costs 22,015."""
LOG_RATIO_BOUND = 100.0
"""Log-ratios are at most ±100 nats, so that a reference that excludes a token gives no infinity."""
LOW_VAR_BOUND = 20.0
"""The log-ratio's bound in verl's ``low_var_kl``, wider than that of k3."""
LOW_VAR_CAP = 10.0
"""The cap on the term of verl's ``low_var_kl``, beyond which verl has no gradient either."""
ERROR_BOUND = 0.2
"""Bound of the relative error of the KL (arXiv:1909.08593, equation 4)."""


def k3(
    logprobs: Tensor, ref_logprobs: Tensor, bound: float = K3_BOUND, cap: float | None = None
) -> Tensor:
    """Returns ``exp(d) - d - 1`` [N] >= 0, the estimate of KL(policy || reference) of GRPO.

    ``d = ref_logprobs - logprobs`` is at most ``bound``, and the term at most ``cap``. The tokens
    are sampled by ``logprobs`` (arXiv:2402.03300).
    """
    d = -log_ratio(logprobs, ref_logprobs, low=-bound)
    # expm1 keeps the digits that exp(d) - 1 loses where the policies agree.
    estimate = torch.expm1(d) - d
    return estimate if cap is None else estimate.clamp(max=cap)


def log_ratio(
    logprobs: Tensor, other: Tensor, low: float = -LOG_RATIO_BOUND, high: float = LOG_RATIO_BOUND
) -> Tensor:
    """Returns ``logprobs - other`` [N] within [low, high].

    Its gradient is that of ``logprobs``, beyond the bounds too: a token that is far off would
    otherwise never come back.
    """
    # A plain clamp has no gradient outside; the second term is 0, and carries it.
    value = (logprobs - other).detach().clamp(low, high)
    return value + (logprobs - logprobs.detach())


def estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: Estimator) -> Tensor:
    """Returns the estimate [N] of KL(policy || reference), in nats, with gradient.

    Over tokens that ``logprobs`` sampled, the gradient of k2 and k3+ is that of the KL, the
    gradient of k3 is that of KL(reference || policy), and the gradient of k1 is 0 in the mean.
    """
    if estimator == "low_var_kl":
        return k3(logprobs, ref_logprobs, LOW_VAR_BOUND, LOW_VAR_CAP)
    if estimator == "k3":
        return k3(logprobs, ref_logprobs)
    d = log_ratio(logprobs, ref_logprobs)
    if estimator == "k1":
        return d
    k2 = d.square() / 2
    if estimator == "k2":
        return k2
    # k3+ has the gradient of k2 and the value of k3, which is never negative and varies little.
    return k2 - k2.detach() + k3(logprobs, ref_logprobs).detach()


def to_go(values: Tensor, trajectory_ids: Tensor) -> Tensor:
    """Returns for each token [N] the sum of ``values`` [N] from it to the end of its trajectory.

    The sums are in float64, so that the trajectories before it in the row do not matter.
    ``trajectory_ids`` [N] int64 ascends.
    """
    exact = values.double()
    # A micro-batch may have no predicted token, and max of an empty tensor raises.
    trajectories = int(trajectory_ids.max()) + 1 if len(trajectory_ids) else 1
    totals = exact.new_zeros(trajectories).index_add(0, trajectory_ids, exact)  # [S]
    prefix = exact.cumsum(0) - exact  # [N], the sum of all tokens before each
    is_first = trajectory_ids[1:] != trajectory_ids[:-1]
    # [S], the prefix of each trajectory's first token; that of the row's first token is 0.
    starts = torch.zeros_like(totals).index_add(0, trajectory_ids[1:], prefix[1:] * is_first)
    return (totals[trajectory_ids] - (prefix - starts[trajectory_ids])).to(values)


class Coefficients:
    """The coefficients of the KL and the entropy term, the same in all ranks.

    ``after`` gets each step's metrics; ``state`` and ``load``: for restarts.
    """

    def __init__(self, settings: LossSettings) -> None:
        kl = settings.kl_coef
        entropy = settings.entropy_coef
        self._kl = kl if isinstance(kl, AdaptiveKl) else None
        self._entropy = entropy if isinstance(entropy, AdaptiveEntropy) else None
        self.kl = kl.start if isinstance(kl, AdaptiveKl) else kl
        self._base = 0.0 if isinstance(entropy, AdaptiveEntropy) else entropy
        self._open = self._entropy is None

    @property
    def entropy(self) -> float:
        """The entropy's coefficient; 0 while the entropy is above its target, or not yet known."""
        return self._base if self._open else 0.0

    def adapting(self) -> dict[str, float]:
        """The present values of the coefficients that change from step to step, to log."""
        values: dict[str, float] = {}
        if self._kl is not None:
            values["kl_coef"] = self.kl
        if self._entropy is not None:
            values["entropy_coef"] = self.entropy
        return values

    def after(self, metrics: Mapping[str, float], trajectories: float) -> None:
        """Adapts to a step's ``kl`` and ``entropy`` (nats a token).

        ``trajectories``: number of the step's, each counted once.
        """
        if self._kl is not None and "kl" in metrics:
            error = metrics["kl"] / self._kl.target - 1
            # The clip keeps one odd step from moving the coefficient far (arXiv:1909.08593).
            clipped_error = min(max(error, -ERROR_BOUND), ERROR_BOUND)
            # More than five horizons of trajectories would make the factor negative.
            self.kl *= max(0.0, 1 + clipped_error * trajectories / self._kl.horizon)
        if self._entropy is not None and "entropy" in metrics:
            is_low = metrics["entropy"] < self._entropy.target
            change = self._entropy.step if is_low else -self._entropy.step
            self._base = max(0.0, self._base + change)
            self._open = metrics["entropy"] <= self._entropy.target

    def state(self) -> Tensor:
        """[3] float64."""
        return torch.tensor([self.kl, self._base, float(self._open)], dtype=torch.float64)

    def load(self, state: Tensor) -> None:
        """Continue from a ``state``."""
        self.kl, self._base, is_open = state.tolist()
        self._open = bool(is_open)
