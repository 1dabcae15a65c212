"""Values of tokens in other micro-batches and on other ranks that an update's losses need.

They are computed before the loss of any token, so that an update does not depend on how it is cut.
"""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rayloop.core.protocols import TrainItem
from rayloop.engines.training.collator import Collator
from rayloop.engines.training.scorer import Scores
from rayloop.engines.training.sharding import everywhere, on_all_ranks, total
from rayloop.grpo.batch import TrainSample
from rayloop.grpo.losses.policy import entropy_bound
from rayloop.grpo.losses.settings import CustomLoss, LossSettings
from rayloop.grpo.losses.surrogates import TokensElsewhere


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


def contributing(samples: Sequence[TrainSample], loss: LossSettings) -> list[TrainSample]:
    """Return the samples that need a forward pass.

    Without a KL, an entropy and a perception term, trajectories with advantage 0 have no gradient:
    all shipped losses are proportional to it.
    """
    has_more_terms = loss.uses_kl or loss.uses_entropy or loss.perception is not None
    needs_all = has_more_terms or isinstance(loss, CustomLoss)
    return [sample for sample in samples if needs_all or sample.teaches]


def completed(
    samples: Sequence[TrainSample], loss: LossSettings, score: ScoreFunction, device: torch.device
) -> Sequence[TrainSample]:
    """Return the samples with ``chosen`` and ``elsewhere``, where the loss needs them.

    Collective.
    """
    if loss.top_entropy_quantile >= 1 and not loss.looks_at_trajectories:
        return samples
    to_score = _to_score(samples, loss)
    # Scoring gathers weights on all ranks, so they decide together whether any has a sample.
    (most,) = total([len(to_score)], device, dist.ReduceOp.MAX)
    if not most:
        return samples
    scores_in_order = score(to_score, entropy=True)
    scores = dict(zip(map(id, to_score), scores_in_order, strict=True))

    # The quantile is the whole update's, and finding it
    # is collective: also for a rank without samples.
    bound = _entropy_bound(samples, scores, loss) if loss.top_entropy_quantile < 1 else None
    sequences = _sequences_of_trajectories(samples, loss)
    results = []
    for sample in samples:
        # Equality of samples would compare tensors, so they are distinguished by identity.
        siblings = [
            sibling for sibling in sequences.get(sample.part_of, ()) if sibling is not sample
        ]
        entropy = None if bound is None else scores[id(sample)].entropy
        results.append(
            dataclasses.replace(
                sample,
                chosen=None if entropy is None else (entropy >= bound).float(),
                elsewhere=TokensElsewhere.joined(
                    [_constants(sibling, scores[id(sibling)]) for sibling in siblings]
                ),
            )
        )
    return results


def _to_score(samples: Sequence[TrainSample], loss: LossSettings) -> list[TrainSample]:
    """Return the samples whose log-probs and entropies must be known before the update.

    All for ``top_entropy_quantile``; for a loss that looks at whole trajectories, the samples of
    trajectories with several sequences.
    """
    if loss.top_entropy_quantile < 1:
        return list(samples)
    return [sample for sample in samples if _is_part(sample)]


def _is_part(sample: TrainSample) -> bool:
    """Whether the sample's trajectory has several sequences."""
    return 0 < sample.share < 1


def _entropy_bound(
    samples: Sequence[TrainSample], scores: Mapping[int, Scores], loss: LossSettings
) -> Tensor | None:
    """Return the quantile of the entropies of all ranks' RL tokens. Collective."""
    entropies = [scores[id(sample)].entropy for sample in samples if sample.streams.rl]
    measured = [entropy for entropy in entropies if entropy is not None]
    return entropy_bound(everywhere(measured), loss.top_entropy_quantile)


def _sequences_of_trajectories(
    samples: Sequence[TrainSample], loss: LossSettings
) -> dict[int, list[TrainSample]]:
    """Return the samples of each trajectory with several, for a loss that looks at all of them."""
    sequences = defaultdict[int, list[TrainSample]](list)
    for sample in samples:
        if loss.looks_at_trajectories and _is_part(sample):
            sequences[sample.part_of].append(sample)
    return sequences


def _constants(sample: TrainSample, scores: Scores) -> TokensElsewhere:
    """Return a sample's tokens as the losses of its trajectory's other sequences see them."""
    assert scores.entropy is not None
    old_logprobs = scores.logprobs if sample.old_logprobs is None else sample.old_logprobs
    return TokensElsewhere(
        logprobs=scores.logprobs,
        old_logprobs=old_logprobs,
        # This is the rule of ``PolicyLoss``, which sees only the tokens of its micro-batch.
        rollout_logprobs=old_logprobs if sample.on_policy else sample.rollout_logprobs,
        advantage=sample.advantages,
        # ``pack`` fills in the trajectory's number, which is known once the row is put together.
        trajectory_ids=torch.zeros(len(sample.predict), dtype=torch.int64),
        ref_logprobs=sample.ref_logprobs,
        entropy=scores.entropy,
    )
