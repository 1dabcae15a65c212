"""The surrogates of the loss, a function for each kind.

A surrogate is the loss of a token before KL, entropy and aggregation. N is the number of sampled
tokens of a micro-batch, one trajectory after the other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from rayloop.core.failures import ConfigError
from rayloop.grpo.losses.kl import log_ratio
from rayloop.grpo.losses.settings import (
    CispoLoss,
    CustomLoss,
    DppoLoss,
    GspoLoss,
    LossSettings,
    PpoLoss,
    ReinforceLoss,
    SapoLoss,
)

RATIO_BOUND = 20.0
"""Log-ratios are at most ±20 before exp, so that no broken token overflows a sum.

That is far outside any clip range.
"""


def importance(logprobs: Tensor, other: Tensor) -> Tensor:
    """Returns ``exp(logprobs - other)`` [N].

    It has the gradient of ``logprobs`` where the bound holds, too.
    """
    return torch.exp(log_ratio(logprobs, other, -RATIO_BOUND, RATIO_BOUND))


@dataclass(frozen=True)
class LossInputs:
    """The values [N] from which a surrogate computes the losses of tokens.

    Log-probs in nats, advantages, and ``trajectory_ids``, int64 >= 0, the trajectory of the token.
    ``logprobs`` and ``entropy`` carry the gradient, all others are constants. ``old_logprobs``: the
    log-probs in the ratio's denominator, the trainer's old ones or, with ``correction: bypass``,
    the engine's (``rollout_logprobs``). A trajectory is complete: tokens of it that are in
    another micro-batch are also among these, as constants.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    advantage: Tensor
    trajectory_ids: Tensor
    ref_logprobs: Tensor | None = None
    entropy: Tensor | None = None

    @property
    def ratio(self) -> Tensor:
        """``exp(logprobs - old_logprobs)`` [N], with gradient."""
        return importance(self.logprobs, self.old_logprobs)

    def mean(self, values: Tensor) -> Tensor:
        """The mean of ``values`` [N] over each token's trajectory, at each token [N]."""
        return self.total(values) / torch.bincount(self.trajectory_ids)[self.trajectory_ids]

    def total(self, values: Tensor) -> Tensor:
        """The sum of ``values`` [N] over each token's trajectory, at each token [N]."""
        # index_add takes trajectories of any length: nothing is padded, and the gradient flows.
        trajectories = len(torch.bincount(self.trajectory_ids))
        totals = values.new_zeros(trajectories).index_add(0, self.trajectory_ids, values)
        return totals[self.trajectory_ids]


@dataclass(frozen=True)
class TokensElsewhere:
    """Constants [G] of tokens in other micro-batches, which the losses of this one need.

    When an agent restarts its context, its trajectory has several segments. These are the G tokens
    of the segments that are not in this micro-batch. ``trajectory_ids``: the number that the
    trajectory has in this micro-batch.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    advantage: Tensor
    trajectory_ids: Tensor
    ref_logprobs: Tensor | None
    entropy: Tensor

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "TokensElsewhere":
        """The same on ``device``."""
        tensors: dict[str, Any] = {}
        for field in fields(self):
            tensor = getattr(self, field.name)
            if tensor is not None:
                tensor = tensor.to(device, non_blocking=non_blocking)
            tensors[field.name] = tensor
        return TokensElsewhere(**tensors)

    @classmethod
    def joined(cls, parts: Sequence["TokensElsewhere"]) -> "TokensElsewhere | None":
        """All tokens of ``parts``; None without parts."""
        if not parts:
            return None
        tensors: dict[str, Any] = {}
        for field in fields(cls):
            column = [getattr(part, field.name) for part in parts]
            tensors[field.name] = None if column[0] is None else torch.cat(column)
        return cls(**tensors)

    def beside(
        self, tokens: Mapping[str, Tensor | None]
    ) -> tuple[dict[str, Tensor | None], Tensor]:
        """Returns complete trajectories [N + G], and the places of the N ``tokens`` in them.

        ``tokens``: values [N] by the names of these fields. In each trajectory they precede the
        tokens of this object.
        """
        trajectory_ids = tokens["trajectory_ids"]
        assert trajectory_ids is not None
        # The sort is stable: the given tokens of a trajectory
        # keep their order, and stay in front of the others.
        order = torch.cat([trajectory_ids, self.trajectory_ids]).argsort(stable=True)
        complete: dict[str, Tensor | None] = {}
        for name, tensor in tokens.items():
            if tensor is not None:
                tensor = torch.cat([tensor, getattr(self, name)])[order]
            complete[name] = tensor
        # The inverse permutation says where each of the first N tokens is.
        return complete, order.argsort()[: len(trajectory_ids)]


@dataclass(frozen=True)
class LossOutputs:
    """The losses of tokens, ``loss`` [N] with gradient.

    ``low``, ``high``, ``dual``: where a clip applies (bool [N]), for the metrics; None: nowhere.
    """

    loss: Tensor
    low: Tensor | None = None
    high: Tensor | None = None
    dual: Tensor | None = None


Surrogate = Callable[[LossInputs], LossOutputs]


def ppo(inputs: LossInputs, settings: PpoLoss) -> LossOutputs:
    """``-min(r * A, clip(r) * A)`` (arXiv:1707.06347, equation 7).

    For A < 0 at most ``dual_clip * |A|`` (arXiv:1912.09729).
    """
    clipped = _clipped(inputs.ratio, inputs.advantage, settings.clip_low, settings.clip_high)
    if settings.dual_clip is None:
        return clipped

    # For A < 0 the maximum takes a large ratio rather than
    # its clip: without a ceiling one token could rule.
    ceiling = -settings.dual_clip * inputs.advantage
    dual = (inputs.advantage < 0) & (clipped.loss > ceiling)
    loss = torch.where(dual, ceiling, clipped.loss)
    return LossOutputs(loss, clipped.low, clipped.high, dual)


def gspo(inputs: LossInputs, settings: GspoLoss) -> LossOutputs:
    """PPO's clip on ``s = exp(mean over the trajectory of logprobs - old_logprobs)``.

    arXiv:2507.18071, equations 7 and 14. The value is the trajectory's, the gradient the token's.
    """
    mean_change = inputs.mean((inputs.logprobs - inputs.old_logprobs).detach())
    # The second term is 0 and carries the gradient of each
    # token; the mean alone would give all tokens the same one.
    ratio = torch.exp(
        mean_change.clamp(-RATIO_BOUND, RATIO_BOUND) + (inputs.logprobs - inputs.logprobs.detach())
    )
    return _clipped(ratio, inputs.advantage, settings.clip_low, settings.clip_high)


def cispo(inputs: LossInputs, settings: CispoLoss) -> LossOutputs:
    """``-sg(clip(r)) * A * logprobs`` (arXiv:2506.13585, equations 4 and 5)."""
    ratio = inputs.ratio.detach()
    # The weight is constant: clipped tokens keep their gradient, where PPO's clip would cut it.
    weight = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return LossOutputs(-weight * inputs.advantage * inputs.logprobs, weight > ratio, weight < ratio)


def sapo(inputs: LossInputs, settings: SapoLoss) -> LossOutputs:
    """``-A * sigmoid(tau * (r - 1)) * 4 / tau`` (arXiv:2511.20347, equations 5 and 6).

    At a ratio of 1 the gradient is PPO's.
    """
    positive, negative = settings.temperatures
    tau = torch.where(inputs.advantage > 0, positive, negative).to(inputs.logprobs.dtype)
    return LossOutputs(-inputs.advantage * torch.sigmoid(tau * (inputs.ratio - 1)) * 4 / tau)


DPPO_CAP = 20.0
"""Largest weight of a token in ``dppo``, as prime-rl and verl have it."""


def dppo(inputs: LossInputs, settings: DppoLoss) -> LossOutputs:
    """``-A * sg(min(r, 20)) * logprobs``; 0 for tokens that have moved too far.

    A token has when the advantage would move its probability further from the engine's than
    ``clip_high`` upwards or ``clip_low`` downwards. arXiv:2602.04879.
    """
    # Probabilities decide, not ratios: a rare token may double without moving the policy far.
    change = (inputs.logprobs.exp() - inputs.old_logprobs.exp()).detach()
    high = (inputs.advantage > 0) & (change > settings.clip_high)
    low = (inputs.advantage <= 0) & (change < -settings.clip_low)
    weight = inputs.ratio.detach().clamp(max=DPPO_CAP)
    loss = -inputs.advantage * weight * inputs.logprobs
    return LossOutputs(loss * ~(high | low), low, high)


def reinforce(inputs: LossInputs, settings: ReinforceLoss) -> LossOutputs:
    """``-A * logprobs``."""
    return LossOutputs(-inputs.advantage * inputs.logprobs)


LOSSES: dict[type[LossSettings], Callable[[LossInputs, Any], LossOutputs]] = {
    PpoLoss: ppo,
    GspoLoss: gspo,
    CispoLoss: cispo,
    SapoLoss: sapo,
    DppoLoss: dppo,
    ReinforceLoss: reinforce,
}


def surrogate(settings: LossSettings) -> Surrogate:
    """The function of these settings.

    Raises ConfigError, pydantic.ValidationError for a custom loss.
    """
    if not isinstance(settings, CustomLoss):
        kind = LOSSES[type(settings)]
        return lambda inputs: kind(inputs, settings)
    custom = settings.build()
    loss = getattr(custom, "loss", custom)

    def checked(inputs: LossInputs) -> LossOutputs:
        result = loss(inputs)
        outputs = LossOutputs(result) if isinstance(result, Tensor) else result
        if not isinstance(outputs, LossOutputs):
            description = type(result).__name__
        elif outputs.loss.shape != inputs.logprobs.shape:
            description = f"shape {tuple(outputs.loss.shape)}"
        else:
            return outputs
        raise ConfigError(
            f"policy.loss.use: {settings.use} returned {description}; expected the loss of each"
            f" token, shape ({len(inputs.logprobs)},)"
        )

    return checked


def _clipped(ratio: Tensor, advantage: Tensor, low: float, high: float) -> LossOutputs:
    unclipped_loss = -ratio * advantage
    clipped_loss = -ratio.clamp(1 - low, 1 + high) * advantage
    # Inside the range both are equal, and nothing is clipped.
    is_clipped = clipped_loss > unclipped_loss
    return LossOutputs(
        loss=torch.maximum(unclipped_loss, clipped_loss),
        low=is_clipped & (advantage < 0),
        high=is_clipped & (advantage > 0),
    )
