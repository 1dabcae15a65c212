"""The optimizer of a sharded model: learning-rate schedule and clipping.

Updates that are not finite are skipped.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from rayloop.core.failures import Diverged
from rayloop.engines.settings import OptimizerSettings
from rayloop.engines.training.sharding import local

MAX_SKIPPED = 3
"""Updates in a row that may be skipped because the gradient is not finite.

One more raises Diverged.
"""

DECAY_SHARE = 0.3
"""Share of a wsd schedule's length over which it decays, at its end."""


def learning_rate(settings: OptimizerSettings, update: int) -> float:
    """Return the learning rate of update number ``update``, from 0.

    After a linear warm-up the schedule goes down to 0. wsd is the warm-up, stable, decay schedule
    of Hu et al. 2024 (arXiv:2404.06395, section 4.2) with a linear decay.
    """
    if update < settings.warmup_steps:
        return settings.lr * (update + 1) / settings.warmup_steps
    if settings.schedule == "constant" or settings.total_updates is None:
        return settings.lr
    remaining = max(0, settings.total_updates - update)
    length = max(1, settings.total_updates - settings.warmup_steps)
    match settings.schedule:
        case "wsd":
            height = min(1.0, remaining / (settings.total_updates * DECAY_SHARE))
        case "linear":
            height = remaining / length
        case _:
            height = (1 - math.cos(math.pi * min(1.0, remaining / length))) / 2
    return settings.lr * height


@dataclass(frozen=True)
class OptimizerStep:
    """Result of one step of the optimizer.

    ``grad_norm`` is the global norm before clipping; ``applied`` is False when it was not finite.
    """

    grad_norm: float
    lr: float
    applied: bool


class Optimizer:
    """Updates sharded ``parameters`` from their gradients.

    FSDP shards them over all ranks of the default process group; ``replicas`` of them may exist.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings, replicas: int = 1
    ) -> None:
        self._parameters = dict(parameters)
        self._settings = settings
        self._replicas = replicas
        self._optimizer = _make(list(parameters.values()), settings)
        self.updates = 0
        self._skipped = 0

    def step(self) -> OptimizerStep:
        """Run one update and drop the gradients.

        Raises Diverged when too many in a row were not finite.
        """
        gradients = [local(p.grad) for p in self._parameters.values() if p.grad is not None]
        # Replicas hold equal gradients after their sum, so the
        # squares of all ranks count each of them that often.
        norm = _global_norm(gradients) / self._replicas**0.5
        lr = learning_rate(self._settings, self.updates)

        # A NaN that reaches AdamW's moments stays in them
        # for good. The norm is global, so all ranks skip.
        applied = math.isfinite(norm)
        if applied:
            if norm > self._settings.grad_clip:
                # torch's clip_grad_norm_ would compute the norm again, with one more collective.
                torch._foreach_mul_(gradients, self._settings.grad_clip / norm)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            self.updates += 1
        self._skipped = 0 if applied else self._skipped + 1
        self._optimizer.zero_grad()
        if self._skipped > MAX_SKIPPED:
            raise Diverged(
                f"the gradient was not finite in {self._skipped} updates in a row (after"
                f" {self.updates} good ones). Lower policy.optimizer.lr, or inspect the last batch"
            )
        return OptimizerStep(norm, lr, applied)

    def move(self, device: torch.device | str) -> None:
        """Move the optimizer's own tensors."""
        for tensors in self._optimizer.state.values():
            tensors |= {name: tensor.to(device) for name, tensor in tensors.items()}

    def discard(self) -> None:
        """Drop the gradients of an update."""
        self._optimizer.zero_grad()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer's own tensors by parameter name.

        They are to be saved, or overwritten in place by a load.
        """
        return {
            name: dict(self._optimizer.state[p])
            for name, p in self._parameters.items()
            if self._optimizer.state[p]
        }


def _make(parameters: list[nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
    if settings.kind == "sgd":
        return torch.optim.SGD(parameters, lr=settings.lr, weight_decay=settings.weight_decay)
    adamw = torch.optim.AdamW(  # arXiv:1711.05101
        parameters,
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    # AdamW makes these itself at its first step; save and load need them earlier.
    for parameter in parameters:
        adamw.state[parameter] = {
            # The fused kernel wants the number of steps on the parameter's device.
            "step": torch.tensor(0.0, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return adamw


def _global_norm(shards: list[Tensor]) -> float:
    """Return the L2 norm over the shards of all ranks; it may be NaN or infinite. Collective."""
    if shards:
        square = get_total_norm(shards).double().square()
    else:
        square = torch.zeros((), dtype=torch.float64)
    dist.all_reduce(square)
    return math.sqrt(square.item())
