"""Coefficients that change from step to step. All ranks compute them from the same metrics, so they agree."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rayloop.grpo.losses.settings import AdaptiveEntropy, AdaptiveKl, LossSettings

ERROR_BOUND = 0.2
"""Of the relative error of the KL (arXiv:1909.08593, equation 4)."""


class Coefficients:
    """The coefficients of the KL and the entropy term. ``after`` gets each step's metrics; ``state`` and ``load``: for restarts."""

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

    def after(self, metrics: Mapping[str, float], sequences: float) -> dict[str, float]:
        """Adapts to a step's ``kl`` and ``entropy`` (nats a token) over ``sequences`` trajectories. Returns what adapts, to log."""
        if self._kl is not None and "kl" in metrics:
            error = min(max(metrics["kl"] / self._kl.target - 1, -ERROR_BOUND), ERROR_BOUND)
            self.kl *= max(0.0, 1 + error * sequences / self._kl.horizon)
        if self._entropy is not None and "entropy" in metrics:
            low = metrics["entropy"] < self._entropy.target
            self._base = max(0.0, self._base + (self._entropy.step if low else -self._entropy.step))
            self._open = metrics["entropy"] <= self._entropy.target
        logged = {"kl_coef": self.kl} if self._kl is not None else {}
        return logged | ({"entropy_coef": self.entropy} if self._entropy is not None else {})

    def state(self) -> Tensor:
        """[3] float64."""
        return torch.tensor([self.kl, self._base, float(self._open)], dtype=torch.float64)

    def load(self, state: Tensor) -> None:
        """Continue from a ``state``."""
        self.kl, self._base, is_open = state.tolist()
        self._open = bool(is_open)
