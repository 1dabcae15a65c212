"""The loss per token: policy gradient, KL and supervised streams.

docs/algorithm.md, sections 2 and 6. N is the number of sampled tokens of a micro-batch, one
trajectory after the other.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from rayloop.grpo.losses import correction
from rayloop.grpo.losses.kl import Coefficients, estimate, k3, to_go
from rayloop.grpo.losses.metrics import LossMetrics
from rayloop.grpo.losses.settings import LossSettings
from rayloop.grpo.losses.surrogates import (
    LossInputs,
    LossOutputs,
    TokensElsewhere,
    importance,
    surrogate,
)

TokenValues = TypeVar("TokenValues", correction.Weights, LossOutputs)

STREAMS = ("rl", "ref_kl", "ce")
"""The losses of a token: policy gradient, KL to the reference, minus the log-prob (supervised)."""


@dataclass(frozen=True)
class PerToken:
    """Losses of tokens with gradient, not yet weighted by stream and aggregation."""

    rl: Tensor  # [N]
    ref_kl: Tensor | None  # [N]
    ce: Tensor  # [N]
    metrics: LossMetrics
    """The sums of this micro-batch."""

    @property
    def loss(self) -> Tensor:
        """The losses [N] of tokens whose streams ``rl`` and ``ref_kl`` both have weight 1."""
        return self.rl if self.ref_kl is None else self.rl + self.ref_kl


@dataclass(frozen=True)
class Denominator:
    """Loss tokens, trajectories and groups of an optimizer update.

    They belong to one stream, over all ranks and micro-batches, and have a weight other than 0 in
    it. They are counted before the backward pass. Trajectories with advantage 0 count although they
    are skipped.
    """

    tokens: float
    trajectories: float
    groups: float = 0.0


class PolicyLoss:
    """Computes the losses of each token.

    rl: ``w * surrogate - entropy_coef * entropy``, and the terms of ``perception``; ref_kl:
    ``w * kl_coef * kl``; ce: ``-logprobs``. ``w``: importance weight (``correction.py``). Raises
    ConfigError, pydantic.ValidationError for a loss that cannot be built.
    """

    def __init__(self, settings: LossSettings) -> None:
        self._settings = settings
        self._surrogate = surrogate(settings)
        self.coefficients = Coefficients(settings)

    def __call__(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        rollout_logprobs: Tensor,
        advantage: Tensor,
        trajectory_ids: Tensor,
        *,
        ref_logprobs: Tensor | None = None,
        entropy: Tensor | None = None,
        on_policy: Tensor | None = None,
        lag: Tensor | None = None,
        chosen: Tensor | None = None,
        masked_logprobs: Tensor | None = None,
        elsewhere: TokensElsewhere | None = None,
    ) -> PerToken:
        """Returns the losses of the sampled tokens; all arguments but ``elsewhere`` are [N].

        ``logprobs``, ``old_logprobs``, ``rollout_logprobs``, ``ref_logprobs``: log-probs;
        ``trajectory_ids`` (int64): the trajectory of each token; ``entropy`` in nats. ``logprobs``
        and ``entropy`` carry the gradient; every other log-prob is a constant. ``on_policy`` (bool)
        marks replayed tokens treated as on-policy: their ``rollout_logprobs`` are ``old_logprobs``
        and their weight 1. ``lag`` (int64) is each token's version lag in steps, for the metrics
        only. ``chosen`` (0 or 1): the tokens of ``top_entropy_quantile``. ``masked_logprobs``: the
        log-probs with masked pictures, NaN before the first picture. ``elsewhere``: the other
        tokens of trajectories that are here in part. Raises ValueError when a setting lacks its
        input, and the errors of a custom loss.
        """
        self._check_inputs(ref_logprobs, entropy, chosen, masked_logprobs)
        # They say how tokens were sampled: a gradient through them would change the estimate.
        old_logprobs = old_logprobs.detach()
        rollout_logprobs = rollout_logprobs.detach()
        advantage = advantage.detach()
        ref_logprobs = None if ref_logprobs is None else ref_logprobs.detach()
        if on_policy is not None:
            rollout_logprobs = torch.where(on_policy, old_logprobs, rollout_logprobs)
        tokens: dict[str, Any] = {
            "logprobs": logprobs,
            "old_logprobs": old_logprobs,
            "rollout_logprobs": rollout_logprobs,
            "advantage": self._with_kl_reward(
                advantage, old_logprobs, ref_logprobs, trajectory_ids
            ),
            "trajectory_ids": trajectory_ids,
            "ref_logprobs": ref_logprobs,
            "entropy": entropy,
        }
        inputs = self._inputs(tokens)
        weights, outputs = self._weights_and_surrogate(inputs, tokens, elsewhere)
        # Tokens that were not chosen stay in the denominator (arXiv:2506.01939).
        rl = weights.weight * (outputs.loss if chosen is None else outputs.loss * chosen)
        perception_kl = None
        if masked_logprobs is not None:
            perception_kl = _perception_kl(logprobs, masked_logprobs)
        rl = self._with_terms(rl, entropy, perception_kl, weights.left_out)
        metrics = _metrics(inputs, old_logprobs, weights, outputs, lag, perception_kl)
        return PerToken(rl, self._kl(inputs, weights), -logprobs, metrics)

    def _with_terms(
        self, rl: Tensor, entropy: Tensor | None, perception_kl: Tensor | None, left_out: Tensor
    ) -> Tensor:
        """The losses [N] with the terms of entropy and perception.

        A trajectory that is left out counts in no term, the bonus included.
        """
        if self.coefficients.entropy > 0 and entropy is not None:
            rl = rl - self.coefficients.entropy * entropy * ~left_out
        if perception_kl is not None:
            rl = rl + self._perception(perception_kl, entropy) * ~left_out
        return rl

    def _with_kl_reward(
        self,
        advantage: Tensor,
        old_logprobs: Tensor,
        ref_logprobs: Tensor | None,
        trajectory_ids: Tensor,
    ) -> Tensor:
        """The advantage [N], minus the KL from the token on where the KL is a reward."""
        term = self._settings.kl_term
        if ref_logprobs is None or term.where != "reward":
            return advantage
        # The KL as a reward is that of the old policy, so that it is constant within the step.
        kl = estimate(old_logprobs, ref_logprobs, term.estimator)
        return advantage - self.coefficients.kl * to_go(kl, trajectory_ids)

    def _weights_and_surrogate(
        self, inputs: LossInputs, tokens: Mapping[str, Any], elsewhere: TokensElsewhere | None
    ) -> tuple[correction.Weights, LossOutputs]:
        """The importance weights and the surrogate loss.

        ``inputs`` are ``tokens`` with the ratio's denominator that the correction chooses.
        """
        rule = self._settings.rule
        if elsewhere is None:
            return correction.weights(inputs, tokens["old_logprobs"], rule), self._surrogate(inputs)
        # The tokens elsewhere are added: the ratio of a trajectory must not depend on how it is
        # cut. Their own losses are computed where they are, and dropped here.
        all_tokens, places = elsewhere.beside(tokens)
        all_inputs = self._inputs(all_tokens)
        weights = correction.weights(all_inputs, all_tokens["old_logprobs"], rule)
        return _at(places, weights), _at(places, self._surrogate(all_inputs))

    def _inputs(self, tokens: Mapping[str, Any]) -> LossInputs:
        """The values of ``tokens`` for surrogates and corrections."""
        rule = self._settings.rule
        if rule is None or not rule.bypass:
            return LossInputs(**tokens)
        # PPO's ratio is to the engine that sampled (arXiv:1707.06347).
        return LossInputs(**{**tokens, "old_logprobs": tokens["rollout_logprobs"]})

    def _check_inputs(
        self,
        ref_logprobs: Tensor | None,
        entropy: Tensor | None,
        chosen: Tensor | None,
        masked_logprobs: Tensor | None,
    ) -> None:
        settings = self._settings
        if settings.uses_kl and ref_logprobs is None:
            raise ValueError("kl_coef is positive, but the batch carries no reference log-probs")
        if settings.uses_entropy and entropy is None:
            raise ValueError("the loss has an entropy term, but no entropy was computed")
        if settings.perception is not None and masked_logprobs is None:
            raise ValueError("perception is set, but the batch carries no masked log-probs")
        if settings.top_entropy_quantile < 1 and chosen is None:
            raise ValueError(
                "top_entropy_quantile is below 1, but no tokens were chosen by their entropy"
            )

    def _perception(self, kl: Tensor, entropy: Tensor | None) -> Tensor | float:
        """The terms of PAPO [N]: minus the KL to masked pictures, plus the entropy."""
        term = self._settings.perception
        if term is None:
            return 0.0
        loss = -term.coef * kl
        return loss if entropy is None or not term.entropy else loss + term.entropy * entropy

    def _kl(self, inputs: LossInputs, weights: correction.Weights) -> Tensor | None:
        term = self._settings.kl_term
        if inputs.ref_logprobs is None or not self._settings.uses_kl or term.where == "reward":
            return None
        kl = self.coefficients.kl * estimate(inputs.logprobs, inputs.ref_logprobs, term.estimator)
        if not term.unbiased:
            return weights.weight * kl
        # The importance weight is to the engine that sampled,
        # and has a gradient, too (arXiv:2512.02556).
        return importance(inputs.logprobs, inputs.rollout_logprobs) * kl * ~weights.masked


def _perception_kl(logprobs: Tensor, masked_logprobs: Tensor) -> Tensor:
    """The estimate [N] of KL(policy || policy with masked pictures), as the authors have it.

    Its formula is that of ``low_var_kl`` (github.com/MikeWangWZHL/PAPO, fb63bf4); the log-probs
    with masked pictures are constants.
    """
    # Where no picture precedes, the policy is its own reference: value and gradient are 0.
    masked_logprobs = torch.where(masked_logprobs.isnan(), logprobs.detach(), masked_logprobs)
    return estimate(logprobs, masked_logprobs, "low_var_kl")


def _metrics(
    inputs: LossInputs,
    old_logprobs: Tensor,
    weights: correction.Weights,
    outputs: LossOutputs,
    lag: Tensor | None,
    perception_kl: Tensor | None,
) -> LossMetrics:
    """The metrics of a micro-batch's tokens only: tokens from elsewhere would count twice."""
    kl = None
    if inputs.ref_logprobs is not None:
        kl = k3(inputs.logprobs.detach(), inputs.ref_logprobs)
    return LossMetrics.of(
        ratio=inputs.ratio,
        clips=outputs,
        capped=weights.capped,
        mismatch=old_logprobs - inputs.rollout_logprobs,
        mismatch_k3=k3(inputs.rollout_logprobs, old_logprobs),
        kl=kl,
        entropy=inputs.entropy,
        perception_kl=perception_kl,
        lag=lag,
    )


def _at(places: Tensor, values: TokenValues) -> TokenValues:
    """A dataclass of values [N] with those at ``places`` alone."""
    selected: dict[str, Any] = {}
    for field in dataclasses.fields(values):
        value = getattr(values, field.name)
        selected[field.name] = None if value is None else value[places]
    return dataclasses.replace(values, **selected)


TIE_MARGIN = 1e-4
"""Entropies that differ by less than this, in nats, are equal.

Members of a group have the same entropy at their first token, but for rounding, which differs
between micro-batches.
"""


def entropy_bound(entropies: Tensor, share: float) -> float:
    """Returns the lowest entropy at which a token of an update has a policy gradient.

    It is that of the ``ceil(share * n)``-th most uncertain of ``entropies`` [n] (arXiv:2506.01939,
    equation 5), less ``TIE_MARGIN``, so that rounding does not choose among equals. Infinite
    without tokens.
    """
    if not len(entropies):
        return math.inf
    # 0.07 * 100 is above 7 in floating point, and ceil would choose one token more.
    rank = math.ceil(share * len(entropies) - 1e-9)
    return float(entropies.sort(descending=True).values[rank - 1]) - TIE_MARGIN


def token_weights(
    trajectory_ids: Tensor,
    settings: LossSettings,
    denominator: Denominator,
    group_tokens: Tensor | None = None,
    trajectory_tokens: Tensor | None = None,
) -> Tensor:
    """Returns the weights [N] float32 of the tokens in the loss of the update.

    That loss is ``(weights * loss).sum()``, summed over all micro-batches and ranks.
    ``trajectory_ids`` [N] int64: the trajectory of each token. ``group_tokens`` [N]: the loss
    tokens of each token's group in the update, for prompt-mean; ``trajectory_tokens`` [N]: the loss
    tokens of its trajectory, where that has several segments. token-mean: DAPO (arXiv:2503.14476);
    seq-mean-token-mean: GRPO (arXiv:2402.03300); a number: Dr. GRPO (arXiv:2503.20783). Raises
    ValueError for an empty denominator.
    """
    if denominator.tokens <= 0 or denominator.trajectories <= 0:
        raise ValueError(
            f"an update over {denominator.tokens:g} tokens of {denominator.trajectories:g}"
            " trajectories"
        )
    ones = torch.ones(trajectory_ids.shape, dtype=torch.float32, device=trajectory_ids.device)
    match settings.aggregation:
        case "token-mean":
            return ones / denominator.tokens
        case "seq-mean-token-sum":
            return ones / denominator.trajectories
        case "seq-mean-token-mean":
            if trajectory_tokens is None:
                # This holds while each trajectory is one segment, which is here.
                trajectory_tokens = torch.bincount(trajectory_ids)[trajectory_ids]
            return ones / (denominator.trajectories * trajectory_tokens)
        case "prompt-mean":
            if group_tokens is None or denominator.groups <= 0:
                raise ValueError("aggregation: prompt-mean needs the tokens of each group")
            return ones / (denominator.groups * group_tokens)
        case constant:
            return ones / constant
