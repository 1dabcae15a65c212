"""Values of tokens in other micro-batches and on other ranks that an update's losses need.

They are computed before the loss of any token, so that an update does not depend on how it is cut.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from rayloop.core.protocols import TrainItem
from rayloop.engines import updates
from rayloop.engines.training.collator import Collator
from rayloop.engines.training.sharding import everywhere, on_all_ranks, total
from rayloop.engines.updates import Scores
from rayloop.grpo.batch import TrainSample
from rayloop.grpo.losses.policy import entropy_bound
from rayloop.grpo.losses.settings import LossSettings


class ScoreFunction(Protocol):
    """Type of a function that scores samples under the current weights."""

    def __call__(self, samples: Sequence[TrainSample], *, entropy: bool = False) -> list[Scores]:
        """Return the scores of each sample. Collective."""


def with_constants(
    mini_batches: Sequence[Sequence[TrainItem]],
    samples: list[list[TrainSample]],
    loss: LossSettings,
    score: ScoreFunction,
    collator: Collator,
    seed: int,
) -> list[list[TrainSample]]:
    """Return the samples with the log-probs that stay constant during a step's updates.

    Collective.
    """
    # The only update of a step begins at the old
    # weights, so its old log-probs are its current ones.
    if len(mini_batches) > 1:
        samples = with_old_logprobs(mini_batches, samples, score)
    if loss.perception is not None:
        samples = with_masked_logprobs(mini_batches, samples, score, collator, seed)
    return samples


def with_old_logprobs(
    mini_batches: Sequence[Sequence[TrainItem]],
    samples: Sequence[Sequence[TrainSample]],
    score: ScoreFunction,
) -> list[list[TrainSample]]:
    """Return the samples with the log-probs before the first update.

    A trajectory of several epochs is scored once. Collective.
    """
    # ``segmented`` gives a trajectory the same objects
    # in each epoch, so that their ids name them.
    distinct: dict[int, TrainSample] = {}
    for items, share in zip(mini_batches, samples, strict=True):
        for item, sample in zip(items, share, strict=True):
            distinct[id(item.trajectory)] = sample
    scores = dict(zip(distinct, score(list(distinct.values())), strict=True))

    def with_old(item: TrainItem, sample: TrainSample) -> TrainSample:
        return dataclasses.replace(sample, old_logprobs=scores[id(item.trajectory)].logprobs)

    return [
        list(map(with_old, items, share))
        for items, share in zip(mini_batches, samples, strict=True)
    ]


def with_masked_logprobs(
    mini_batches: Sequence[Sequence[TrainItem]],
    samples: Sequence[Sequence[TrainSample]],
    score: ScoreFunction,
    collator: Collator,
    seed: int,
) -> list[list[TrainSample]]:
    """Return the samples with the log-probs that they have with masked pictures.

    PAPO, arXiv:2507.06448. They are those before the first update, NaN where no picture precedes.
    Collective.
    """
    # With several epochs a trajectory comes again, as the same object.
    with_pictures: dict[int, TrainItem] = {}
    for item in itertools.chain(*mini_batches):
        if item.trajectory.images:
            with_pictures[id(item.trajectory)] = item

    def masked_samples() -> list[TrainSample]:
        return [collator.sample(item, mask_seed=seed) for item in with_pictures.values()]

    scores = dict(zip(with_pictures, score(on_all_ranks(masked_samples)), strict=True))

    def with_masked(item: TrainItem, sample: TrainSample) -> TrainSample:
        logprobs = torch.full_like(sample.rollout_logprobs, torch.nan)
        if id(item.trajectory) in scores:
            sees = collator.follows_picture(sample)
            logprobs = torch.where(sees, scores[id(item.trajectory)].logprobs, logprobs)
        return dataclasses.replace(sample, masked_logprobs=logprobs)

    return [
        list(map(with_masked, items, share))
        for items, share in zip(mini_batches, samples, strict=True)
    ]


def completed(
    samples: Sequence[TrainSample], loss: LossSettings, score: ScoreFunction, device: torch.device
) -> Sequence[TrainSample]:
    """Return the samples with ``chosen`` and ``elsewhere``, where the loss needs them.

    Collective.
    """
    if loss.top_entropy_quantile >= 1 and not loss.looks_at_trajectories:
        return samples
    to_score = updates.to_score(samples, loss)
    # Scoring gathers weights on all ranks, so they decide together whether any has a sample.
    (most,) = total([len(to_score)], device, dist.ReduceOp.MAX)
    if not most:
        return samples
    scores_in_order = score(to_score, entropy=True)
    scores = dict(zip(map(id, to_score), scores_in_order, strict=True))

    # The quantile is the whole update's, and finding it
    # is collective: also for a rank without samples.
    bound = None
    if loss.top_entropy_quantile < 1:
        entropies = everywhere(updates.entropies(samples, scores))
        bound = entropy_bound(entropies, loss.top_entropy_quantile)
    return updates.completed(samples, loss, scores, bound)
