"""Parts of an optimizer update that all ranks agree on, its result, and the metrics of a step."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rayloop.engines.training.optimizer import OptimizerStep
from rayloop.engines.training.sharding import total
from rayloop.engines.updates import counts, denominators
from rayloop.grpo.batch import TrainSample
from rayloop.grpo.losses.metrics import LossMetrics
from rayloop.grpo.losses.policy import Denominator


@dataclass(frozen=True)
class Update:
    """Result of one optimizer update on this rank; ``loss`` is the rank's part of the sum.

    ``computed``: the ``tokens`` that belong to trajectories that contribute.
    """

    loss: float
    metrics: LossMetrics
    step: OptimizerStep
    tokens: int
    computed: int


def count_denominators(
    samples: Sequence[TrainSample], together: int, device: torch.device
) -> dict[str, Denominator]:
    """Return the denominator of each stream, over all ranks.

    ``together`` ranks have one share. Collective.
    """
    sums = total([count / together for count in counts(samples)], device)
    return denominators(sums)


def check_counts(count: int, device: torch.device) -> None:
    """Raise ValueError unless all ranks have the same number of mini-batches. Collective."""
    # The largest of the negated numbers is the smallest number: one collective finds both.
    most, negated_least = total([count, -count], device, dist.ReduceOp.MAX)
    if most != -negated_least:
        raise ValueError(
            f"the ranks got from {-negated_least:.0f} to {most:.0f} mini-batches; each needs as"
            " many"
        )


def equal_passes(plan: list[list[TrainSample]], device: torch.device) -> list[list[TrainSample]]:
    """Return the plan with empty micro-batches added: as many on all ranks, and at least one.

    Collective.
    """
    # FSDP gathers weights in each pass: a rank with
    # fewer passes would leave the others waiting.
    (most,) = total([max(1, len(plan))], device, dist.ReduceOp.MAX)
    return plan + [[] for _ in range(int(most) - len(plan))]


def summarize(
    updates: Sequence[Update],
    trajectories: int,
    seconds: float,
    together: int,
    device: torch.device,
) -> tuple[dict[str, float], LossMetrics, float]:
    """Return a step's metrics, its loss metrics, and its number of trajectories, over all ranks.

    Metrics are means over the applied updates; a skipped update is only counted.
    ``trajectories``: number on this rank, whose share ``together`` ranks have. Collective.
    """
    applied = [update for update in updates if update.step.applied]
    metrics = LossMetrics.zero(device)
    for update in applied:
        metrics = metrics.merge(update.metrics)

    # The gradient's norm is global, so that all ranks have applied the same updates.
    dist.all_reduce(metrics.sums)
    dist.all_reduce(metrics.maxima, dist.ReduceOp.MAX)
    sums = [
        sum(update.loss for update in applied),
        sum(update.tokens for update in updates),
        sum(update.computed for update in updates),
        trajectories / together,
    ]
    loss, tokens, computed, trained = total(sums, device)
    report = {
        "actor/updates": float(len(applied)),
        "actor/skipped_updates": float(len(updates) - len(applied)),
        "actor/tokens": tokens,
        "actor/computed_tokens": computed,
        "actor/sequences": trained,
        "actor/tokens_per_second": computed / seconds,
    }
    if applied:
        grad_norms = sum(update.step.grad_norm for update in applied)
        report |= {
            "actor/loss": loss / len(applied),
            "actor/grad_norm": grad_norms / len(applied),
            "actor/lr": applied[-1].step.lr,
        }
    return report, metrics, trained
