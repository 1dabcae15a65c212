"""The surrogates of the loss, a function for each kind: what a token costs before KL, entropy and
aggregation. N is the number of sampled tokens of a micro-batch, one trajectory after the other.
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
    DppoLoss,
    GspoLoss,
    LossSettings,
    OwnLoss,
    PpoLoss,
    ReinforceLoss,
    SapoLoss,
)

RATIO_BOUND = 20.0
"""Log-ratios are at most ±20 before exp: far outside any clip range, and no broken token overflows
a sum.
"""


def importance(current: Tensor, other: Tensor) -> Tensor:
    """Returns ``exp(current - other)`` [N], with the gradient of ``current`` wherever the bound
    holds, too.
    """
    return torch.exp(log_ratio(current, other, -RATIO_BOUND, RATIO_BOUND))


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Of each token [N]: log-probs in nats, advantages, and ``segment``, int64 >= 0, the trajectory
    of the token. ``current`` and ``entropy`` carry the gradient, all others are constants.
    ``anchor``: the log-probs in the ratio's denominator, the trainer's old ones or, with
    ``correction: bypass``, the engine's (``behaviour``). A trajectory is here as a whole: tokens of
    its other sequences, which have losses of their own elsewhere, are among the N without a
    gradient.
    """

    current: Tensor
    anchor: Tensor
    behaviour: Tensor
    advantage: Tensor
    segment: Tensor
    reference: Tensor | None = None
    entropy: Tensor | None = None

    @property
    def ratio(self) -> Tensor:
        """``exp(current - anchor)`` [N], with gradient."""
        return importance(self.current, self.anchor)

    def mean(self, values: Tensor) -> Tensor:
        """The mean of ``values`` [N] over each token's trajectory, at each token [N]."""
        return self.total(values) / torch.bincount(self.segment)[self.segment]

    def total(self, values: Tensor) -> Tensor:
        """The sum of ``values`` [N] over each token's trajectory, at each token [N]."""
        # index_add takes trajectories of any length: nothing is padded, and the gradient flows.
        return values.new_zeros(len(torch.bincount(self.segment))).index_add(
            0, self.segment, values
        )[self.segment]


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Constants [G] of tokens that a micro-batch lacks: those of a trajectory's other sequences,
    where an agent began again or an episode forgot its images. ``segment``: the trajectory's number
    in the micro-batch.
    """

    current: Tensor
    old: Tensor
    behaviour: Tensor
    advantage: Tensor
    segment: Tensor
    reference: Tensor | None
    entropy: Tensor

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Elsewhere":
        """The same on ``device``."""
        return Elsewhere(
            **{
                name: None if t is None else t.to(device, non_blocking=non_blocking)
                for name, t in self._tensors()
            }
        )

    @classmethod
    def joined(cls, parts: Sequence["Elsewhere"]) -> "Elsewhere | None":
        """All tokens of ``parts``; None of none."""
        if not parts:
            return None
        columns = [[t for _, t in part._tensors()] for part in parts]
        names = [field.name for field in fields(cls)]
        whole = {
            name: None if of[0] is None else torch.cat(of)
            for name, of in zip(names, zip(*columns, strict=True), strict=True)
        }
        return cls(**whole)

    def beside(
        self, tokens: Mapping[str, Tensor | None]
    ) -> tuple[dict[str, Tensor | None], Tensor]:
        """``tokens`` (values [N] by the names of these fields) with these after them in each
        trajectory [N + G], and where the N are among them.
        """
        segment = tokens["segment"]
        assert segment is not None
        # The sort is stable: a trajectory's own tokens keep
        # their order, and stay in front of the others.
        order = torch.cat([segment, self.segment]).argsort(stable=True)
        made = {
            name: None if of is None else torch.cat([of, getattr(self, name)])[order]
            for name, of in tokens.items()
        }
        # The inverse permutation says where each of the first N tokens is.
        return made, order.argsort()[: len(segment)]

    def _tensors(self) -> list[tuple[str, Any]]:
        return [(field.name, getattr(self, field.name)) for field in fields(self)]


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """``loss`` [N] with gradient.

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
    out = _clipped(inputs.ratio, inputs.advantage, settings.clip_low, settings.clip_high)
    if settings.dual_clip is None:
        return out

    # For A < 0 the maximum takes a large ratio over
    # its clip: without a ceiling one token could rule.
    ceiling = -settings.dual_clip * inputs.advantage
    dual = (inputs.advantage < 0) & (out.loss > ceiling)
    return LossOutputs(torch.where(dual, ceiling, out.loss), out.low, out.high, dual)


def gspo(inputs: LossInputs, settings: GspoLoss) -> LossOutputs:
    """PPO's clip on ``s = exp(mean over the trajectory of current - anchor)`` (arXiv:2507.18071,
    equations 7 and 14). The value is the trajectory's, the gradient each token's own.
    """
    moved = inputs.mean((inputs.current - inputs.anchor).detach())
    # The difference is 0 and carries each token's
    # gradient; the mean alone would give all tokens one.
    ratio = torch.exp(
        moved.clamp(-RATIO_BOUND, RATIO_BOUND) + (inputs.current - inputs.current.detach())
    )
    return _clipped(ratio, inputs.advantage, settings.clip_low, settings.clip_high)


def cispo(inputs: LossInputs, settings: CispoLoss) -> LossOutputs:
    """``-sg(clip(r)) * A * current`` (arXiv:2506.13585, equations 4 and 5)."""
    ratio = inputs.ratio.detach()
    # The weight is constant: clipped tokens keep their gradient, where PPO's clip would cut it.
    weight = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return LossOutputs(-weight * inputs.advantage * inputs.current, weight > ratio, weight < ratio)


def sapo(inputs: LossInputs, settings: SapoLoss) -> LossOutputs:
    """``-A * sigmoid(tau * (r - 1)) * 4 / tau`` (arXiv:2511.20347, equations 5 and 6): at a ratio
    of 1 the gradient is PPO's.
    """
    positive, negative = settings.temperatures
    tau = torch.where(inputs.advantage > 0, positive, negative).to(inputs.current.dtype)
    return LossOutputs(-inputs.advantage * torch.sigmoid(tau * (inputs.ratio - 1)) * 4 / tau)


DPPO_CAP = 20.0
"""Largest weight of a token in ``dppo``, as prime-rl and verl have it."""


def dppo(inputs: LossInputs, settings: DppoLoss) -> LossOutputs:
    """``-A * sg(min(r, 20)) * current`` while the probability stays near the engine's, else 0
    (arXiv:2602.04879).
    """
    # Probabilities decide, not ratios: a rare token may double without moving the policy far.
    moved = (inputs.current.exp() - inputs.anchor.exp()).detach()
    high = (inputs.advantage > 0) & (moved > settings.clip_high)
    low = (inputs.advantage <= 0) & (moved < -settings.clip_low)
    loss = -inputs.advantage * inputs.ratio.detach().clamp(max=DPPO_CAP) * inputs.current
    return LossOutputs(loss * ~(high | low), low, high)


def reinforce(inputs: LossInputs, settings: ReinforceLoss) -> LossOutputs:
    """``-A * current``."""
    return LossOutputs(-inputs.advantage * inputs.current)


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

    Raises ConfigError, pydantic.ValidationError for a loss of your own.
    """
    if not isinstance(settings, OwnLoss):
        kind = LOSSES[type(settings)]
        return lambda inputs: kind(inputs, settings)
    made = settings.build()
    own = made.loss if hasattr(made, "loss") else made

    def checked(inputs: LossInputs) -> LossOutputs:
        found = own(inputs)
        out = LossOutputs(found) if isinstance(found, Tensor) else found
        if not isinstance(out, LossOutputs) or out.loss.shape != inputs.current.shape:
            got = (
                f"shape {tuple(out.loss.shape)}"
                if isinstance(out, LossOutputs)
                else type(found).__name__
            )
            n = len(inputs.current)
            raise ConfigError(
                f"policy.loss.use: {settings.use} returned {got}; expected the loss of each token,"
                f" shape ({n},)"
            )
        return out

    return checked


def _clipped(ratio: Tensor, advantage: Tensor, low: float, high: float) -> LossOutputs:
    plain, bound = -ratio * advantage, -ratio.clamp(1 - low, 1 + high) * advantage
    # Inside the range both are equal, and nothing is clipped.
    clipped = bound > plain
    return LossOutputs(
        torch.maximum(plain, bound), clipped & (advantage < 0), clipped & (advantage > 0)
    )
