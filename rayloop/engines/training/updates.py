"""What one optimizer update returns, and what its losses are divided by."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rayloop.engines.training.optimizer import OptimizerStep
from rayloop.engines.training.sharding import total
from rayloop.grpo.batch import TrainSample
from rayloop.grpo.losses.metrics import LossMetrics
from rayloop.grpo.losses.policy import STREAMS, Denominator


@dataclass(frozen=True, slots=True)
class Update:
    """Result of one optimizer update on this rank; ``loss`` is the rank's part of the sum.

    ``computed``: of the ``tokens``, those of the trajectories that contribute.
    """

    loss: float
    metrics: LossMetrics
    step: OptimizerStep
    tokens: int
    computed: int


def count_denominators(
    samples: Sequence[TrainSample], together: int, device: torch.device
) -> dict[str, Denominator]:
    """Of each stream, over all ranks, of which ``together`` have one share. Collective."""
    counts = [0.0] * (3 * len(STREAMS))
    for sample in samples:
        n = len(sample.predict)
        for i, stream in enumerate(STREAMS):
            if n and getattr(sample.streams, stream):
                counts[3 * i] += n
                # Shares add up over ranks to numbers of
                # trajectories and groups, wherever their parts are.
                counts[3 * i + 1] += sample.share
                counts[3 * i + 2] += n / (sample.group_tokens or n)
    sums = total([count / together for count in counts], device)
    return {stream: Denominator(*sums[3 * i : 3 * i + 3]) for i, stream in enumerate(STREAMS)}
