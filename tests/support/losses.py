"""The loss of some tokens in one call."""

from typing import Any

import torch
from torch import Tensor

from rayloop.grpo.losses.policy import PerToken, PolicyLoss
from rayloop.grpo.losses.settings import LossSettings


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantage: Tensor,
    settings: LossSettings,
    **others: Any,
) -> PerToken:
    """``PolicyLoss`` over the tokens of one trajectory, unless ``trajectory_ids`` says otherwise."""
    trajectory_ids = others.pop("trajectory_ids", torch.zeros(logprobs.shape, dtype=torch.int64))
    return PolicyLoss(settings)(
        logprobs, old_logprobs, rollout_logprobs, advantage, trajectory_ids, **others
    )
