"""The loss of some tokens in one call."""

from typing import Any

import torch
from torch import Tensor

from rayloop.grpo.losses.policy import PerToken, PolicyLoss
from rayloop.grpo.losses.settings import LossSettings


def policy_loss(
    current: Tensor,
    old: Tensor,
    behaviour: Tensor,
    advantage: Tensor,
    settings: LossSettings,
    **others: Any,
) -> PerToken:
    """``PolicyLoss`` over the tokens of one trajectory, unless ``segment`` says otherwise."""
    segment = others.pop("segment", torch.zeros(current.shape, dtype=torch.int64))
    return PolicyLoss(settings)(current, old, behaviour, advantage, segment, **others)
