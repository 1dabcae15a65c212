"""The weight of a token for the gap between the engine that sampled and the trainer.

docs/algorithm.md, section 2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rayloop.grpo.losses.settings import Correction
from rayloop.grpo.losses.surrogates import RATIO_BOUND, LossInputs


@dataclass(frozen=True)
class Weights:
    """The importance weights of tokens, and where the rule changed them."""

    weight: Tensor  # [N], without gradient
    capped: Tensor  # [N] bool, where the rule truncated or masked
    masked: Tensor  # [N] bool, where it masked: the token has neither a policy gradient nor a KL
    left_out: Tensor  # [N] bool, where a whole trajectory counts nothing


def weights(inputs: LossInputs, old_logprobs: Tensor, rule: Correction | None) -> Weights:
    """The importance weight ``exp(old_logprobs - rollout_logprobs)`` of each token.

    token, truncate: truncated importance sampling (TIS, IMPALA, arXiv:1802.01561; AReaL,
    arXiv:2505.24298). token, mask: IcePop (ringtech.notion.site/icepop, 2025). sequence and
    geometric: TIS and masked importance sampling over trajectories (Liu, Li et al., "When Speed
    Kills Stability", 2025). A masked token keeps its place in the denominator of the aggregation.
    """
    ones = torch.ones_like(old_logprobs)
    if rule is None:
        nowhere = torch.zeros_like(old_logprobs, dtype=torch.bool)
        return Weights(ones, nowhere, nowhere, nowhere)
    gap = old_logprobs - inputs.rollout_logprobs  # [N], nats
    # A sum over a long trajectory can be hundreds of nats, whose exponential overflows float32.
    ratio = torch.exp(_at_level(gap, inputs, rule).clamp(-RATIO_BOUND, RATIO_BOUND))
    outside = (ratio < rule.low) | (ratio > rule.high)
    left_out = _left_out(inputs, gap, rule)
    capped = outside | left_out
    if rule.action == "truncate":
        # Truncating keeps a biased gradient of each token
        # instead of a large variance (arXiv:1802.01561).
        weight = ratio.clamp(rule.low, rule.high)
        masked = left_out
    else:
        # With bypass the ratio has the engine's log-probs in
        # its denominator already: a weight would count the gap twice.
        weight = ones if rule.bypass else ratio
        masked = capped
    return Weights(weight * ~masked, capped, masked, left_out)


def _at_level(gap: Tensor, inputs: LossInputs, rule: Correction) -> Tensor:
    """The gap [N] of the token, or the sum or mean over its trajectory."""
    match rule.level:
        case "token":
            return gap
        case "sequence":
            return inputs.total(gap)
        case "geometric":
            return inputs.mean(gap)


def _left_out(inputs: LossInputs, gap: Tensor, rule: Correction) -> Tensor:
    """Where a whole trajectory counts nothing: bool [N]."""
    left_out = torch.zeros_like(gap, dtype=torch.bool)
    if rule.veto is not None:
        # The veto looks at single tokens, whatever the level of the weight.
        low, high = rule.veto
        ratio = torch.exp(gap.clamp(-RATIO_BOUND, RATIO_BOUND))
        outside = (ratio < low) | (ratio > high)
        left_out = inputs.total(outside.to(gap)) > 0
    if rule.off_policy is not None:
        lost_likelihood = inputs.mean((inputs.rollout_logprobs - inputs.logprobs).detach())
        # Only negative samples are left out: far off-policy
        # they mislead the update (arXiv:2512.02556).
        is_negative = inputs.mean(inputs.advantage) < 0
        left_out = left_out | ((lost_likelihood > rule.off_policy) & is_negative)
    return left_out
