"""Keeps what a step computed for each token, so that ``replay`` can compute its losses again."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from rayloop.engines.updates import MicroBatchLoss, Scores
from rayloop.grpo.batch import Batch, TrainSample
from rayloop.grpo.losses.kl import Coefficients

TokenValues = dict[str, Tensor]
"""Values [N] of the tokens of a micro-batch, or of several one after another, by name."""


def token_values(
    batch: Batch,
    logprobs: Tensor,
    entropy: Tensor,
    losses: MicroBatchLoss,
    loss: Tensor,
) -> TokenValues:
    """Return the inputs and results of a micro-batch's loss.

    The inputs are log-probs and entropies, in nats; the results are ``MicroBatchLoss.tokens``, each
    [N], and ``batch_loss`` [1], which is the micro-batch's.
    """
    values: dict[str, Tensor | None] = {
        "logprobs": logprobs,
        "entropy": entropy,
        "old_logprobs": batch.old_logprobs,
        "ref_logprobs": batch.ref_logprobs,
        "masked_logprobs": batch.masked_logprobs,
        **losses.tokens,
        "batch_loss": loss[None],
    }
    return {name: value.detach() for name, value in values.items() if value is not None}


def joined(parts: Sequence[TokenValues]) -> TokenValues:
    """Return the values of all micro-batches, one after another; all have the same names."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def by_sample(values: Tensor, plan: Sequence[Sequence[TrainSample]]) -> dict[int, Tensor]:
    """Return the ``values`` [N] of each sample by its ``id``; they are in the plan's order."""
    samples = list(chain.from_iterable(plan))
    parts = values.split([len(sample.predict) for sample in samples])
    return dict(zip(map(id, samples), parts, strict=True))


class TokenRecorder:
    """Keeps the updates of one step of one rank as plain values, where it is ``on``."""

    def __init__(self) -> None:
        self.on = False
        self._updates: list[dict[str, Any]] = []
        self._coefficients: list[float] = []
        self._scores: dict[int, Scores] = {}

    def begin(self, coefficients: Coefficients) -> None:
        """Forget the last step; ``coefficients`` are those of the step that begins."""
        self._updates = []
        self._coefficients = coefficients.state().tolist()

    def keeping(self, score: Callable[..., list[Scores]]) -> Callable[..., list[Scores]]:
        """Return ``score``, whose results of this update are kept."""
        self._scores = {}
        if not self.on:
            return score

        def keep(samples: Sequence[TrainSample], **options: Any) -> list[Scores]:
            scores = score(samples, **options)
            self._scores = dict(zip(map(id, samples), scores, strict=True))
            return scores

        return keep

    def add(
        self,
        samples: Sequence[TrainSample],
        completed: Sequence[TrainSample],
        plan: Sequence[Sequence[TrainSample]],
        values: TokenValues,
    ) -> None:
        """Keep an update of this rank's ``samples``.

        ``completed``: the same ones, as the micro-batches of ``plan`` hold them; ``values`` are in
        the plan's order.
        """
        if not self.on:
            return
        numbers = {id(sample): number for number, sample in enumerate(completed)}
        scored = {}
        for number, sample in enumerate(samples):
            scores = self._scores.get(id(sample))
            if scores is not None and scores.entropy is not None:
                scored[str(number)] = torch.stack([scores.logprobs, scores.entropy]).numpy()
        planned = []
        for part in plan:
            planned.append([numbers[id(sample)] for sample in part])
        self._updates.append(
            {
                "plan": planned,
                "tokens": {name: value.cpu().numpy() for name, value in values.items()},
                "scored": scored,
            }
        )

    def result(self) -> Mapping[str, Any]:
        """Return the step: its ``updates``, and what the losses depended on besides.

        ``plan``: for each micro-batch the numbers of its samples in the rank's share; ``tokens``:
        arrays in that order; ``scored``: log-probs and entropies [2, N] before the update, by
        number. ``threads``: a sum over many tokens depends on them.
        """
        return {
            "updates": self._updates,
            "coefficients": self._coefficients,
            "device": "cuda" if torch.cuda.is_available() else "cpu",
            "threads": torch.get_num_threads(),
        }
