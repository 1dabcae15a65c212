"""What an update must know of the tokens of other micro-batches and other ranks before the loss of
any. With it an update does not depend on how it is cut.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

import torch

from rayloop.engines.training.scorer import Scores
from rayloop.engines.training.sharding import everywhere
from rayloop.grpo.batch import TrainSample
from rayloop.grpo.losses.policy import entropy_bound
from rayloop.grpo.losses.settings import LossSettings, OwnLoss
from rayloop.grpo.losses.surrogates import Elsewhere


def contributing(samples: Sequence[TrainSample], loss: LossSettings) -> list[TrainSample]:
    """Without a KL and an entropy term, trajectories with advantage 0 have no gradient and need no
    forward pass: all shipped losses are proportional to it.
    """
    every = loss.uses_kl or loss.uses_entropy or isinstance(loss, OwnLoss)
    return [s for s in samples if every or s.teaches]


def is_needed(loss: LossSettings) -> bool:
    """Whether ``to_score`` can name a sample."""
    return loss.top_entropy_quantile < 1 or loss.looks_at_trajectories


def to_score(samples: Sequence[TrainSample], loss: LossSettings) -> list[TrainSample]:
    """The samples whose log-probs and entropies must be known first: all for
    ``top_entropy_quantile``; those of trajectories with several sequences for a loss that looks at
    whole trajectories.
    """
    if loss.top_entropy_quantile < 1:
        return list(samples)
    if loss.looks_at_trajectories:
        return [sample for sample in samples if 0 < sample.share < 1]
    return []


def completed(
    samples: Sequence[TrainSample],
    scored: Sequence[TrainSample],
    scores: Sequence[Scores],
    loss: LossSettings,
) -> list[TrainSample]:
    """The samples with ``chosen`` and ``elsewhere``.

    ``scores``: of the samples ``scored``. Collective.
    """
    found = dict(zip(map(id, scored), scores, strict=True))

    # The quantile is the whole update's, and finding it
    # is collective: also for a rank without samples.
    bound = None
    if loss.top_entropy_quantile < 1:
        learning = [found[id(s)].entropy for s in samples if s.streams.rl]
        bound = entropy_bound(
            everywhere([e for e in learning if e is not None]), loss.top_entropy_quantile
        )
    sequences = defaultdict[int, list[TrainSample]](list)
    for sample in samples:
        if loss.looks_at_trajectories and 0 < sample.share < 1:
            sequences[sample.part_of].append(sample)
    made = []
    for sample in samples:
        # Equality of samples would compare tensors, so they are distinguished by identity.
        others = [other for other in sequences[sample.part_of] if other is not sample]
        entropy = found[id(sample)].entropy if bound is not None else None
        chosen = None if entropy is None else (entropy >= bound).float()
        rest = Elsewhere.joined([_constants(other, found[id(other)]) for other in others])
        made.append(dataclasses.replace(sample, chosen=chosen, elsewhere=rest))
    return made


def _constants(sample: TrainSample, scores: Scores) -> Elsewhere:
    """A sample's tokens as they stand beside its trajectory's others."""
    assert scores.entropy is not None
    old = scores.logprobs if sample.old is None else sample.old
    return Elsewhere(
        current=scores.logprobs,
        old=old,
        # This is the rule of ``PolicyLoss``, which sees only the tokens of its own micro-batch.
        behaviour=old if sample.on_policy else sample.behaviour,
        advantage=sample.advantages,
        # ``pack`` fills in the trajectory's number, which is known once the row is put together.
        segment=torch.zeros(len(sample.predict), dtype=torch.int64),
        reference=sample.reference,
        entropy=scores.entropy,
    )
