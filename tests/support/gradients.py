"""The gradients of an update of random tokens, to compare settings by."""

from __future__ import annotations

import torch
from torch import Tensor

from rayloop.grpo.idle import Situation
from rayloop.grpo.losses.policy import Denominator, PolicyLoss, entropy_bound, token_weights
from tools.pages.idle import Changes, built

LENGTHS = (*range(6, 18), *range(6, 18), 12, 12)


def apart(first: Changes, second: Changes, situation: Situation) -> float:
    """How far the gradients under two settings are from each other, relative to those of the
    second.
    """
    one, other = (gradient(changes, situation) for changes in (first, second))
    return float((one - other).norm() / other.norm().clamp(min=1e-12))


def tokens(situation: Situation, *, one: bool) -> dict[str, Tensor]:
    """An update: the second of a step, unless it is its only ``one``.

    Drifts are large enough for every clip, mask and bound.
    """
    generator = torch.Generator().manual_seed(0)
    trajectory_ids = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    n = len(trajectory_ids)

    def noise() -> Tensor:
        return 0.8 * torch.randn(n, generator=generator, dtype=torch.float64)

    old_logprobs = -3 * torch.rand(n, generator=generator, dtype=torch.float64)
    moved, gap, away = noise(), noise(), noise()
    logprobs = old_logprobs if one else old_logprobs + moved
    return {
        "logprobs": logprobs,
        "old_logprobs": old_logprobs,
        "rollout_logprobs": old_logprobs if situation.exact else old_logprobs + gap,
        "ref_logprobs": logprobs if situation.refresh_every == 1 and one else old_logprobs + away,
        "entropy": torch.rand(n, generator=generator, dtype=torch.float64),
        "advantage": torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64)[
            trajectory_ids
        ],
        "trajectory_ids": trajectory_ids,
        "masked_logprobs": old_logprobs + noise(),
    }


def gradient(changes: Changes, situation: Situation) -> Tensor:
    """Of log-probs and entropies."""
    loss, algorithm, update = built({"loss.aggregation": "token-mean", **changes})
    data = tokens(situation, one=update.epochs * update.mini_batches == 1)
    logprobs, entropy = (
        data.pop(name).clone().requires_grad_() for name in ("logprobs", "entropy")
    )
    bound = entropy_bound(entropy.detach(), loss.top_entropy_quantile)
    on_policy = torch.full(data["trajectory_ids"].shape, algorithm.replay.kind == "on_policy")
    ref_logprobs = data.pop("ref_logprobs")
    masked_logprobs = data.pop("masked_logprobs")
    out = PolicyLoss(loss)(
        logprobs,
        **data,
        ref_logprobs=ref_logprobs if loss.uses_kl else None,
        masked_logprobs=None if loss.perception is None else masked_logprobs,
        entropy=entropy,
        on_policy=on_policy,
        chosen=entropy.detach() >= bound if loss.top_entropy_quantile < 1 else None,
    )
    group = data["trajectory_ids"] // 2
    update_size = Denominator(len(logprobs), len(LENGTHS), len(group.unique()))
    weights = token_weights(data["trajectory_ids"], loss, update_size, torch.bincount(group)[group])
    policy_gradient = algorithm.advantage.kind != "distill"
    total = (weights * out.rl).sum() if policy_gradient else 0.0 * logprobs.sum()
    total = total if out.ref_kl is None else total + (weights * out.ref_kl).sum()
    pulls = torch.autograd.grad(total, (logprobs, entropy), allow_unused=True)
    return torch.cat([torch.zeros_like(logprobs) if pull is None else pull for pull in pulls])
