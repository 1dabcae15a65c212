"""The weight of a token for the gap between the engine that sampled and the trainer
(docs/algorithm.md, section 2).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rayloop.grpo.losses.settings import Correction
from rayloop.grpo.losses.surrogates import RATIO_BOUND, LossInputs


@dataclass(frozen=True, slots=True)
class Weights:
    """``weight`` [N] without gradient.

    Bool [N]: ``bounded``, where the rule truncated or masked; ``masked``, where it masked, so that
    the token has neither a policy gradient nor a KL; ``left_out``, where a whole trajectory counts
    nothing.
    """

    weight: Tensor
    bounded: Tensor
    masked: Tensor
    left_out: Tensor


def anchor(old: Tensor, behaviour: Tensor, rule: Correction | None) -> Tensor:
    """Log-probs [N] under the ratio: the trainer's old ones (arXiv:2110.00641); with ``bypass`` the
    engine's (arXiv:1707.06347).
    """
    return behaviour if rule is not None and rule.bypass else old


def weights(inputs: LossInputs, old: Tensor, rule: Correction | None) -> Weights:
    """The importance weight ``exp(old - behaviour)`` of each token.

    token, truncate: truncated importance sampling (TIS, IMPALA, arXiv:1802.01561; AReaL,
    arXiv:2505.24298). token, mask: IcePop (ringtech.notion.site/icepop, 2025). sequence and
    geometric: TIS and masked importance sampling over trajectories (Liu, Li et al., "When Speed
    Kills Stability", 2025). A masked token keeps its place in the denominator of the aggregation.
    """
    ones, nowhere = torch.ones_like(old), torch.zeros_like(old, dtype=torch.bool)
    if rule is None:
        return Weights(ones, nowhere, nowhere, nowhere)
    gap = old - inputs.behaviour
    level = {
        "token": lambda: gap,
        "sequence": lambda: inputs.total(gap),
        "geometric": lambda: inputs.mean(gap),
    }[rule.level]()
    # A sum over a long trajectory can be hundreds of nats, whose exponential overflows float32.
    ratio = torch.exp(level.clamp(-RATIO_BOUND, RATIO_BOUND))
    bounded = (ratio < rule.low) | (ratio > rule.high)
    left_out = _left_out(inputs, gap, rule)
    if rule.action == "truncate":
        # Truncating keeps a biased gradient of each token
        # instead of a large variance (arXiv:1802.01561).
        weight, masked = ratio.clamp(rule.low, rule.high), left_out
    else:
        # With bypass the ratio has the engine's log-probs
        # below it already: a weight would count the gap twice.
        weight, masked = ones if rule.bypass else ratio, bounded | left_out
    return Weights(weight * ~masked, bounded | left_out, masked, left_out)


def _left_out(inputs: LossInputs, gap: Tensor, rule: Correction) -> Tensor:
    """Where a whole trajectory counts nothing: bool [N]."""
    left_out = torch.zeros_like(gap, dtype=torch.bool)
    if rule.veto is not None:
        # The veto looks at single tokens, whatever the level of the weight.
        own = torch.exp(gap.clamp(-RATIO_BOUND, RATIO_BOUND))
        outside = (own < rule.veto[0]) | (own > rule.veto[1])
        left_out = inputs.total(outside.to(gap)) > 0
    if rule.off_policy is not None:
        less_likely = inputs.mean((inputs.behaviour - inputs.current).detach()) > rule.off_policy
        # Only negative samples are left out: far off-policy
        # they mislead the update (arXiv:2512.02556).
        left_out = left_out | (less_likely & (inputs.mean(inputs.advantage) < 0))
    return left_out
