"""Parts of an optimizer update that need neither the model nor other ranks.

The trainer computes with them, and ``replay`` once more from the values on record.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rayloop.grpo.batch import Batch, TrainSample
from rayloop.grpo.losses.policy import STREAMS, Denominator, PerToken, PolicyLoss, token_weights
from rayloop.grpo.losses.settings import CustomLoss, LossSettings
from rayloop.grpo.losses.surrogates import TokensElsewhere


class Scores(NamedTuple):
    """Output of the trainer's ``Scorer``: a tuple, since FSDP finds the tensors in any pytree."""

    logprobs: Tensor
    """[N] float32."""
    entropy: Tensor | None
    """[N] float32, nats, of the masked distribution; with top_p or top_k over the kept tokens."""


def counts(samples: Sequence[TrainSample]) -> list[float]:
    """Returns tokens, trajectories and groups of these samples, for each stream one after another.

    Shares of trajectories and groups add up to whole numbers over all ranks, wherever their parts
    are.
    """
    numbers = [0.0] * (3 * len(STREAMS))
    for sample in samples:
        n = len(sample.predict)
        for i, stream in enumerate(STREAMS):
            if n and getattr(sample.streams, stream):
                numbers[3 * i] += n
                numbers[3 * i + 1] += sample.share
                numbers[3 * i + 2] += n / (sample.group_tokens or n)
    return numbers


def denominators(sums: Sequence[float]) -> dict[str, Denominator]:
    """Returns the denominator of each stream; ``sums``: ``counts`` added up over all ranks."""
    return {stream: Denominator(*sums[3 * i : 3 * i + 3]) for i, stream in enumerate(STREAMS)}


@dataclass(frozen=True)
class MicroBatchLoss:
    """What a micro-batch adds to the loss of its update.

    ``old_logprobs`` [N]; ``per_token``: the losses of the streams; ``weighted``: for each stream
    that has a loss, its losses [N] in the update's mean.
    """

    old_logprobs: Tensor
    per_token: PerToken
    weighted: Sequence[Tensor]

    @property
    def total(self) -> Tensor | None:
        """The loss, a scalar; None: no stream has one."""
        if not self.weighted:
            return None
        return torch.stack([losses.sum() for losses in self.weighted]).sum()

    @property
    def tokens(self) -> dict[str, Tensor]:
        """``rl`` and ``ref_kl`` of the streams, and ``loss``, the weighted sum of all: each [N]."""
        rl = self.per_token.rl
        losses = {"rl": rl, "loss": torch.zeros_like(rl)}
        if self.weighted:
            losses["loss"] = torch.stack(list(self.weighted)).sum(0)
        if self.per_token.ref_kl is not None:
            losses["ref_kl"] = self.per_token.ref_kl
        return losses


def micro_batch_loss(
    batch: Batch,
    logprobs: Tensor,
    entropy: Tensor | None,
    policy_loss: PolicyLoss,
    settings: LossSettings,
    denominators: Mapping[str, Denominator],
) -> MicroBatchLoss:
    """Returns the loss of a packed micro-batch.

    ``logprobs`` and ``entropy`` [N] are the model's, in nats; ``settings``: those of
    ``policy_loss``.
    """
    old_logprobs = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    losses = policy_loss(
        logprobs,
        old_logprobs,
        batch.rollout_logprobs,
        batch.advantage,
        batch.trajectory_ids,
        ref_logprobs=batch.ref_logprobs,
        entropy=entropy,
        on_policy=batch.on_policy,
        lag=batch.lag,
        chosen=batch.chosen,
        masked_logprobs=batch.masked_logprobs,
        elsewhere=batch.elsewhere,
    )
    weighted = _weighted(losses, batch, denominators, settings)
    return MicroBatchLoss(old_logprobs, losses, weighted)


def _weighted(
    losses: PerToken, batch: Batch, denominators: Mapping[str, Denominator], settings: LossSettings
) -> list[Tensor]:
    """Returns the weighted losses [N] of each stream that has a loss."""
    parts: list[Tensor] = []
    for stream, denominator in denominators.items():
        token_losses: Tensor | None = getattr(losses, stream)
        # A stream without a token on any rank has no denominator, and all ranks leave it out.
        if token_losses is None or not denominator.tokens:
            continue
        weights = token_weights(
            batch.trajectory_ids, settings, denominator, batch.group_tokens, batch.trajectory_tokens
        )
        parts.append(getattr(batch, stream) * weights * token_losses)
    return parts


def contributing(samples: Sequence[TrainSample], loss: LossSettings) -> list[TrainSample]:
    """Returns the samples that need a forward pass.

    Without a KL, an entropy and a perception term, trajectories with advantage 0 have no gradient:
    all shipped losses are proportional to it.
    """
    has_more_terms = loss.uses_kl or loss.uses_entropy or loss.perception is not None
    needs_all = has_more_terms or isinstance(loss, CustomLoss)
    return [sample for sample in samples if needs_all or sample.teaches]


def to_score(samples: Sequence[TrainSample], loss: LossSettings) -> list[TrainSample]:
    """Returns the samples whose log-probs and entropies must be known before the update.

    All for ``top_entropy_quantile``; for a loss that looks at whole trajectories, the samples of
    trajectories with several segments.
    """
    if loss.top_entropy_quantile < 1:
        return list(samples)
    if not loss.looks_at_trajectories:
        return []
    return [sample for sample in samples if _is_part(sample)]


def completed(
    samples: Sequence[TrainSample],
    loss: LossSettings,
    scores: Mapping[int, Scores],
    bound: float | None,
) -> list[TrainSample]:
    """Returns the samples with ``chosen`` and ``elsewhere``, where the loss needs them.

    ``scores``: of the samples ``to_score``, by their ``id``. ``bound``: the entropy from which
    tokens are chosen (``entropy_bound``); None: all tokens.
    """
    segments = _segments_of_trajectories(samples, loss)
    results = []
    for sample in samples:
        # Equality of samples would compare tensors, so they are distinguished by identity.
        siblings = [
            sibling for sibling in segments.get(sample.part_of, ()) if sibling is not sample
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


def entropies(samples: Sequence[TrainSample], scores: Mapping[int, Scores]) -> list[Tensor]:
    """Returns the entropies of the samples with a policy gradient, for ``entropy_bound``."""
    measured = [scores[id(sample)].entropy for sample in samples if sample.streams.rl]
    return [entropy for entropy in measured if entropy is not None]


def _is_part(sample: TrainSample) -> bool:
    """Whether the sample's trajectory has several segments."""
    return 0 < sample.share < 1


def _segments_of_trajectories(
    samples: Sequence[TrainSample], loss: LossSettings
) -> dict[int, list[TrainSample]]:
    """Returns the samples of each trajectory with several, for a loss that looks at all of them."""
    segments = defaultdict[int, list[TrainSample]](list)
    for sample in samples:
        if loss.looks_at_trajectories and _is_part(sample):
            segments[sample.part_of].append(sample)
    return segments


def _constants(sample: TrainSample, scores: Scores) -> TokensElsewhere:
    """Returns a sample's tokens as the losses of its trajectory's other segments see them."""
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
