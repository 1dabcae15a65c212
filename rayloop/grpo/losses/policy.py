"""The loss per token: policy gradient, KL and supervised streams (docs/algorithm.md, sections 2 and 6). N is the number of
sampled tokens of a micro-batch, one trajectory after the other."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rayloop.grpo.losses import correction
from rayloop.grpo.losses.kl import Coefficients, estimate, k3, to_go
from rayloop.grpo.losses.metrics import LossMetrics
from rayloop.grpo.losses.settings import LossSettings
from rayloop.grpo.losses.surrogates import LossInputs, importance, surrogate

STREAMS = ("rl", "ref_kl", "ce")
"""The losses of a token: the policy gradient, the KL to the reference, and minus the log-prob (supervised)."""


@dataclass(frozen=True, slots=True)
class PerToken:
    """Losses [N] with gradient, not yet weighted by stream and aggregation; ``metrics`` are this micro-batch's sums."""

    rl: Tensor
    ref_kl: Tensor | None
    ce: Tensor
    metrics: LossMetrics

    @property
    def loss(self) -> Tensor:
        """The losses [N] of tokens that the streams ``rl`` and ``ref_kl`` have with weight 1."""
        return self.rl if self.ref_kl is None else self.rl + self.ref_kl


@dataclass(frozen=True, slots=True)
class Denominator:
    """Loss tokens, trajectories (``sequences``) and groups (``prompts``) of one stream of one optimizer update, over all ranks and
    micro-batches: those whose weight in the stream is not 0. They are counted before the backward pass. Trajectories with
    advantage 0 count although they are skipped."""

    tokens: float
    sequences: float
    prompts: float = 0.0


class PolicyLoss:
    """The losses of each token. rl: ``w * surrogate - entropy_coef * entropy``; ref_kl: ``w * kl_coef * kl``; ce: ``-current``.
    ``w``: importance weight (``correction.py``). Raises ConfigError, pydantic.ValidationError for a loss that cannot be built."""

    def __init__(self, settings: LossSettings) -> None:
        self._settings = settings
        self._surrogate = surrogate(settings)
        self.coefficients = Coefficients(settings)

    def __call__(
        self, current: Tensor, old: Tensor, behaviour: Tensor, advantage: Tensor, segment: Tensor, *,
        reference: Tensor | None = None, entropy: Tensor | None = None, on_policy: Tensor | None = None,
        lag: Tensor | None = None,
    ) -> PerToken:  # fmt: skip
        """All arguments are [N]: log-probs of the sampled tokens, advantages, trajectories (int64), entropies in nats. ``current``
        and ``entropy`` carry the gradient; every other log-prob is a constant. ``on_policy`` (bool) marks replayed tokens treated
        as on-policy: their behaviour is ``old`` and their weight 1. ``lag`` (int64) is each token's version lag in steps, for the
        metrics only. Raises ValueError when a positive coefficient lacks its input, and what a loss of your own raises."""
        settings, reference = self._settings, None if reference is None else reference.detach()
        if settings.uses_kl and reference is None:
            raise ValueError("kl_coef is positive, but the batch carries no reference log-probs")
        old, behaviour, advantage = old.detach(), behaviour.detach(), advantage.detach()
        if on_policy is not None:
            behaviour = torch.where(on_policy, old, behaviour)
        if reference is not None and settings.kl_term.where == "reward":
            advantage = advantage - self.coefficients.kl * to_go(estimate(old, reference, settings.kl_term.estimator), segment)
        rule = settings.rule
        inputs = LossInputs(current, correction.anchor(old, behaviour, rule), behaviour, advantage, segment, reference, entropy)
        weights = correction.weights(inputs, old, rule)
        out = self._surrogate(inputs)
        metrics = LossMetrics.of(
            ratio=inputs.ratio, clips=out, capped=weights.bounded, mismatch=old - behaviour, mismatch_k3=k3(behaviour, old),
            kl=None if reference is None else k3(current.detach(), reference), entropy=entropy, lag=lag,
        )  # fmt: skip
        rl = weights.weight * self._of_top_entropy(out.loss, entropy, segment)
        if self.coefficients.entropy > 0 and entropy is not None:
            rl = rl - self.coefficients.entropy * entropy * ~weights.left_out
        return PerToken(rl, self._kl(inputs, weights), -current, metrics)

    def _of_top_entropy(self, loss: Tensor, entropy: Tensor | None, segment: Tensor) -> Tensor:
        """The surrogate [N], 0 outside of the tokens with the most entropy of each trajectory (arXiv:2506.01939)."""
        share = self._settings.top_entropy_quantile
        if (share < 1 or self._settings.uses_entropy) and entropy is None:
            raise ValueError("entropy_coef or top_entropy_quantile is set, but no entropy was computed")
        return loss if share == 1 or entropy is None else loss * top_entropy(entropy.detach(), segment, share)

    def _kl(self, inputs: LossInputs, weights: correction.Weights) -> Tensor | None:
        term = self._settings.kl_term
        if inputs.reference is None or not self._settings.uses_kl or term.where == "reward":
            return None
        found = self.coefficients.kl * estimate(inputs.current, inputs.reference, term.estimator)
        if not term.unbiased:
            return weights.weight * found
        return importance(inputs.current, inputs.behaviour) * found * ~weights.masked


def top_entropy(entropy: Tensor, segment: Tensor, share: float) -> Tensor:
    """Bool [N]: the ``ceil(share * n)`` tokens with most ``entropy`` [N] of the n of a trajectory, the earlier of equal ones."""
    chosen = torch.zeros_like(segment, dtype=torch.bool)
    for number in segment.unique():
        places = (segment == number).nonzero().flatten()
        order = entropy[places].argsort(descending=True, stable=True)
        chosen[places[order[: math.ceil(share * len(places) - 1e-9)]]] = True
    return chosen


def token_weights(segment: Tensor, settings: LossSettings, denominator: Denominator, group_tokens: Tensor | None = None) -> Tensor:
    """Returns weights [N] float32; ``(weights * loss).sum()``, summed over all micro-batches and ranks, is the loss of the update.
    ``segment`` [N] int64 is the trajectory of each token, ascending; never split over micro-batches. ``group_tokens`` [N]: the loss
    tokens of each token's group in the update, for prompt-mean. token-mean: DAPO (arXiv:2503.14476); seq-mean-token-mean: GRPO
    (arXiv:2402.03300); a number: Dr. GRPO (arXiv:2503.20783). Raises ValueError for an empty denominator."""
    if denominator.tokens <= 0 or denominator.sequences <= 0:
        raise ValueError(f"an update over {denominator.tokens:g} tokens of {denominator.sequences:g} trajectories")
    ones = torch.ones(segment.shape, dtype=torch.float32, device=segment.device)
    match settings.aggregation:
        case "token-mean":
            return ones / denominator.tokens
        case "seq-mean-token-sum":
            return ones / denominator.sequences
        case "seq-mean-token-mean":
            first, last = (torch.searchsorted(segment, segment, right=right) for right in (False, True))
            return ones / (denominator.sequences * (last - first))
        case "prompt-mean":
            if group_tokens is None or denominator.prompts <= 0:
                raise ValueError("aggregation: prompt-mean needs the tokens of each group")
            return ones / (denominator.prompts * group_tokens)
        case constant:
            return ones / constant
