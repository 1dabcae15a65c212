"""The trainer's result must not depend on how the work is spread (docs/algorithm.md, section 6).

``python -m tests.engines.invariance`` prints the largest relative differences.
"""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from rayloop.core.protocols import TrainItem
from rayloop.engines.settings import FsdpSettings, OptimizerSettings
from rayloop.engines.tiny_vlm import write_tiny_vlm
from rayloop.grpo.balance import MemberLength, shares
from rayloop.grpo.losses.settings import PpoLoss
from tests.engines.training import SMALL, VERSION, Sgd, engine, mixed_items, run_ranks

STEPS = 3


class Damped(OptimizerSettings):
    """With a larger eps: the first steps of Adam are g / |g|, and some biases have gradients near
    float32 rounding.
    """

    eps: ClassVar[float] = 1e-6


OPTIMIZERS = {"sgd": Sgd(lr=0.1), "adamw": Damped(lr=1e-3, weight_decay=0.01)}
LOSSES = {
    "sgd": PpoLoss(kl_coef=0.05, entropy_coef=0.01),
    "adamw": PpoLoss(aggregation="seq-mean-token-mean"),
}
LAYOUTS = {
    "one micro-batch": FsdpSettings(),
    "three micro-batches": FsdpSettings(micro_batch_tokens=35),
    "not packed": FsdpSettings(micro_batch_tokens=1, gradient_checkpointing=True),
}


@dataclass(frozen=True)
class Outcome:
    """What ``STEPS`` updates did: ``losses`` and unclipped ``grad_norms`` [STEPS], and the
    parameters afterwards.
    """

    losses: Tensor
    grad_norms: Tensor
    parameters: dict[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """Relative differences from world size 1, one micro-batch; ``parameters`` is the largest over
    tensors (L2).
    """

    optimizer: str
    layout: str
    world_size: int
    loss: float
    grad_norm: float
    parameters: float

    @property
    def largest(self) -> float:
        return max(self.loss, self.grad_norm, self.parameters)


def differences() -> list[Difference]:
    """Run every layout with world size 1 and 2 and compare with the first."""
    with tempfile.TemporaryDirectory() as name:
        folder = write_tiny_vlm(Path(name), ["What is 1 + 2?"] * 50, **SMALL)
        alone = _outcomes(0, 1, folder)
        together = run_ranks(_outcomes, 2, folder)[0]
    found = []
    for world_size, outcomes in ((1, alone), (2, together)):
        for (optimizer, layout), outcome in outcomes.items():
            base = alone[optimizer, "one micro-batch"]
            found.append(
                Difference(
                    optimizer,
                    layout,
                    world_size,
                    _relative(outcome.losses, base.losses),
                    _relative(outcome.grad_norms, base.grad_norms),
                    max(
                        _relative(p, base.parameters[name])
                        for name, p in outcome.parameters.items()
                    ),
                )
            )
    return found


def _outcomes(rank: int, world_size: int, folder: Path) -> dict[tuple[str, str], Outcome]:
    items = mixed_items(folder)
    lengths = [MemberLength(0, len(item.trajectory.flatten().token_ids)) for item in items]
    share = [group for group, _ in shares([[length] for length in lengths], world_size)[rank]]
    combinations = list(itertools.product(OPTIMIZERS, LAYOUTS))
    return {
        (optimizer, layout): _train(
            [items[i] for i in share],
            folder,
            optimizer,
            layout,
            rank,
            world_size,
            folder / f"meeting-{index}" if world_size > 1 else None,
        )
        for index, (optimizer, layout) in enumerate(combinations)
    }


def _train(
    items: list[TrainItem],
    folder: Path,
    optimizer: str,
    layout: str,
    rank: int,
    world_size: int,
    meeting: Path | None,
) -> Outcome:
    with engine(
        folder,
        LAYOUTS[layout],
        OPTIMIZERS[optimizer],
        LOSSES[optimizer],
        rank=rank,
        world_size=world_size,
        meeting=meeting,
    ) as trainer:
        reports = [trainer.train([items]) for _ in range(STEPS)]
        return Outcome(
            torch.tensor([report["actor/loss"] for report in reports]),
            torch.tensor([report["actor/grad_norm"] for report in reports]),
            trainer.export(VERSION),
        )


def _relative(value: Tensor, base: Tensor) -> float:
    return float((value - base).norm() / base.norm().clamp_min(torch.finfo(base.dtype).tiny))


def table(found: list[Difference]) -> str:
    header = (
        f"{'optimizer':10} {'layout':20} {'ranks':>5} {'loss':>9} {'grad norm':>9}"
        f" {'parameters':>10}"
    )
    rows = [
        f"{d.optimizer:10} {d.layout:20} {d.world_size:5} {d.loss:9.1e} {d.grad_norm:9.1e}"
        f" {d.parameters:10.1e}"
        for d in found
    ]
    return "\n".join([header, *rows])


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(table(differences()))
