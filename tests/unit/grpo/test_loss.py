"""The loss: formulas by hand, gradients, corrections, one denominator however tokens are split."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayloop.grpo.losses.policy import Denominator, LossMetrics, k3, token_weights
from rayloop.grpo.losses.settings import LossSettings, PpoLoss
from tests.support.losses import policy_loss

torch.set_num_threads(1)

AGGREGATIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", 50]
PLAIN = PpoLoss(correction="none")


def settings_for(aggregation: Any) -> LossSettings:
    return PpoLoss(aggregation=aggregation)


def logprobs_of(*ratios: float) -> torch.Tensor:
    """Log-probs whose ratios to a log-prob of 0 are the given ones."""
    return torch.tensor(ratios).log()


def loss_of(ratios: list[float], advantage: float, settings: LossSettings) -> list[float]:
    zeros = torch.zeros(len(ratios))
    result = policy_loss(
        logprobs_of(*ratios), zeros, zeros, torch.full_like(zeros, advantage), settings
    )
    return result.loss.tolist()


def test_clips_above_and_below_by_the_sign_of_the_advantage() -> None:
    settings = PpoLoss(correction="none", clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    assert loss_of([1.5, 0.5, 4.0, 1.0], 1.0, settings) == pytest.approx([-1.3, -0.5, -1.3, -1.0])
    assert loss_of([1.5, 0.5, 4.0, 1.0], -1.0, settings) == pytest.approx([1.5, 0.8, 3.0, 1.0])


def test_without_dual_clip_a_large_ratio_counts_in_full() -> None:
    assert loss_of([4.0], -2.0, PpoLoss(correction="none", dual_clip=None)) == pytest.approx([8.0])
    assert loss_of([4.0], -2.0, PpoLoss(correction="none", dual_clip=3.0)) == pytest.approx([6.0])


def test_a_ratio_far_above_one_keeps_its_gradient_without_dual_clip() -> None:
    """Above 20 nats its value no longer grows."""
    logprobs = torch.tensor([25.0], requires_grad=True)
    zero = torch.zeros(1)
    loss = policy_loss(
        logprobs, zero, zero, -torch.ones(1), PpoLoss(correction="none", dual_clip=None)
    ).loss
    (pull,) = torch.autograd.grad(loss.sum(), logprobs)
    assert loss.item() == pull.item() == pytest.approx(math.exp(20))


def test_at_ratio_one_the_gradient_is_minus_the_advantage() -> None:
    logprobs = torch.randn(6, generator=torch.Generator().manual_seed(0), requires_grad=True)
    advantage = torch.tensor([1.0, -1.0, 0.5, -2.0, 0.0, 3.0])
    policy_loss(logprobs, logprobs, logprobs, advantage, PpoLoss()).loss.sum().backward()
    assert torch.allclose(logprobs.grad, -advantage)


def test_no_gradient_where_the_clip_holds() -> None:
    logprobs = logprobs_of(1.5, 0.5, 4.0).requires_grad_()
    zeros = torch.zeros(3)
    policy_loss(
        logprobs, zeros, zeros, torch.tensor([1.0, -1.0, -1.0]), PLAIN
    ).loss.sum().backward()
    assert logprobs.grad.tolist() == [0.0, 0.0, 0.0]


def test_decoupled_weighs_by_the_capped_drift_and_bypass_compares_with_behaviour() -> None:
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    old_logprobs, rollout_logprobs, advantage = (
        torch.tensor([-1.1, -1.0]),
        torch.tensor([-1.3, -3.0]),
        torch.ones(2),
    )
    (decoupled,) = torch.autograd.grad(
        policy_loss(logprobs, old_logprobs, rollout_logprobs, advantage, PpoLoss()).loss.sum(),
        logprobs,
    )
    assert decoupled.tolist() == pytest.approx([-math.exp(0.1) * math.exp(0.2), -2.0])
    bypass = PpoLoss(correction="bypass", clip_high=100.0)
    (bypassed,) = torch.autograd.grad(
        policy_loss(logprobs, old_logprobs, rollout_logprobs, advantage, bypass).loss.sum(),
        logprobs,
    )
    assert bypassed.tolist() == pytest.approx([-math.exp(0.3), -math.exp(2.0)])
    (ignored,) = torch.autograd.grad(
        policy_loss(logprobs, old_logprobs, rollout_logprobs, advantage, PLAIN).loss.sum(), logprobs
    )
    assert ignored.tolist() == pytest.approx([-math.exp(0.1), -1.0])


def test_decoupled_and_bypass_agree_while_nothing_is_clipped_or_capped() -> None:
    generator = torch.Generator().manual_seed(1)
    old_logprobs = -torch.rand(32, generator=generator)
    logprobs = (old_logprobs + 0.05 * torch.randn(32, generator=generator)).requires_grad_()
    rollout_logprobs, advantage = (
        old_logprobs + 0.05 * torch.randn(32, generator=generator),
        torch.randn(32, generator=generator),
    )
    gradients = []
    for correction in ("decoupled", "bypass"):
        settings = PpoLoss(correction=correction, clip_low=0.9, clip_high=9.0, dual_clip=None)
        loss = policy_loss(logprobs, old_logprobs, rollout_logprobs, advantage, settings).loss
        gradients.append(torch.autograd.grad(loss.sum(), logprobs)[0])
    assert torch.allclose(*gradients)


@pytest.mark.parametrize("correction", ["decoupled", "bypass", "none"])
def test_replayed_tokens_treated_as_on_policy_have_weight_one(correction: str) -> None:
    settings = PpoLoss(correction=correction, dual_clip=None)
    old_logprobs, rollout_logprobs = torch.tensor([-1.0, -1.0]), torch.tensor([-9.0, -1.0])
    on_policy = torch.tensor([True, False])
    result = policy_loss(
        old_logprobs.clone(),
        old_logprobs,
        rollout_logprobs,
        torch.ones(2),
        settings,
        on_policy=on_policy,
    )
    assert result.loss[0].item() == -1.0
    assert result.metrics.finalize()["logprob_mismatch_max"] == 0.0


def test_constants_get_no_gradient() -> None:
    leaves = [torch.zeros(2, requires_grad=True) for _ in range(5)]
    logprobs, old_logprobs, rollout_logprobs, advantage, ref_logprobs = leaves
    settings = PpoLoss(kl_coef=0.1)
    policy_loss(
        logprobs, old_logprobs, rollout_logprobs, advantage + 1, settings, ref_logprobs=ref_logprobs
    ).loss.sum().backward()
    assert [leaf.grad is None for leaf in leaves] == [False, True, True, True, True]


@given(st.floats(-50, 0), st.floats(-50, 0))
def test_k3_is_never_negative_and_always_finite(logprobs: float, ref_logprobs: float) -> None:
    value = k3(torch.tensor([logprobs]), torch.tensor([ref_logprobs])).item()
    assert 0 <= value <= math.exp(10) - 11 + 1


def test_k3_by_hand_with_its_gradient_and_bound() -> None:
    logprobs = torch.tensor([-1.0, -1.5, -40.0], requires_grad=True)
    value = k3(logprobs, torch.tensor([-1.5, -1.0, -1.0]))
    assert value[:2].tolist() == pytest.approx([0.106531, 0.148721], abs=1e-6)
    value.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx(
        [1 - math.exp(-0.5), 1 - math.exp(0.5), 1 - math.exp(10)]
    )


def test_the_kl_term_is_bounded_as_the_settings_say() -> None:
    """At a log-ratio of 6 a token costs exp(6) - 7; verl's bounds make that 10, without gradient
    beyond them.
    """
    ref_logprobs = torch.tensor([-1.0, -1.0, -1.0, -30.0])

    def terms(**estimator: str) -> tuple[list[float], list[float]]:
        logprobs = torch.tensor([-1.5, -7.0, -30.0, -1.0], requires_grad=True)
        here = logprobs.detach()
        settings = PpoLoss.model_validate({"kl_coef": 1.0, **estimator})
        loss = policy_loss(
            logprobs, here, here, torch.zeros(4), settings, ref_logprobs=ref_logprobs
        ).loss
        loss.sum().backward()
        return loss.tolist(), logprobs.grad.tolist()

    costs, pulls = terms()
    assert costs == pytest.approx([0.148721, math.exp(6) - 7, math.exp(10) - 11, 28.0], rel=1e-5)
    assert pulls == pytest.approx([1 - math.exp(0.5), 1 - math.exp(6), 1 - math.exp(10), 1.0])
    costs, pulls = terms(kl="low_var_kl")
    assert costs == pytest.approx([0.148721, 10, 10, 10], rel=1e-5)
    assert pulls == pytest.approx([1 - math.exp(0.5), 0.0, 0.0, 0.0])


def test_kl_shares_the_correction_weight_and_entropy_does_not() -> None:
    old_logprobs, rollout_logprobs, ref_logprobs = (
        torch.tensor([-1.0]),
        torch.tensor([-1.5]),
        torch.tensor([-1.2]),
    )
    settings = PpoLoss(kl_coef=0.5, entropy_coef=0.1)
    entropy = torch.tensor([2.0])
    result = policy_loss(
        old_logprobs.clone(),
        old_logprobs,
        rollout_logprobs,
        torch.ones(1),
        settings,
        ref_logprobs=ref_logprobs,
        entropy=entropy,
    )
    kl = math.exp(-0.2) + 0.2 - 1
    assert result.loss.item() == pytest.approx(math.exp(0.5) * (-1 + 0.5 * kl) - 0.1 * 2.0)
    metrics = result.metrics.finalize()
    assert (metrics["kl"], metrics["entropy"]) == (pytest.approx(kl), 2.0)


def test_a_term_without_its_input_is_an_error() -> None:
    zeros = torch.zeros(2)
    with pytest.raises(ValueError, match="kl_coef"):
        policy_loss(zeros, zeros, zeros, zeros, PpoLoss(kl_coef=0.1))
    with pytest.raises(ValueError, match="entropy term"):
        policy_loss(zeros, zeros, zeros, zeros, PpoLoss(entropy_coef=0.1))


def test_aggregations_by_hand() -> None:
    loss, trajectory_ids = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0, 0, 0, 1])
    expected = {"token-mean": 2.5, "seq-mean-token-sum": 5.0, "seq-mean-token-mean": 3.0, 50: 0.2}
    for aggregation, value in expected.items():
        weights = token_weights(
            trajectory_ids, settings_for(aggregation), Denominator(tokens=4, trajectories=2)
        )
        assert (weights * loss).sum().item() == pytest.approx(value)
    groups = torch.tensor([3, 3, 3, 1])
    weights = token_weights(
        trajectory_ids, settings_for("prompt-mean"), Denominator(4, 2, groups=2), groups
    )
    assert (weights * loss).sum().item() == pytest.approx((2 + 4) / 2)
    with pytest.raises(ValueError, match="0 tokens"):
        token_weights(trajectory_ids, PLAIN, Denominator(tokens=0, trajectories=2))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=6),
    st.lists(st.integers(0, 3), min_size=6, max_size=6),
)
def test_one_denominator_however_trajectories_are_split(
    aggregation: str, lengths: list[int], parts: list[int]
) -> None:
    settings, denominator = settings_for(aggregation), Denominator(sum(lengths), len(lengths))
    trajectory_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    loss = torch.randn(len(trajectory_ids), generator=torch.Generator().manual_seed(0))
    whole = (token_weights(trajectory_ids, settings, denominator) * loss).sum()
    assigned = torch.tensor(parts)[trajectory_ids]
    split = 0.0
    for part in range(4):
        here = assigned == part
        local = torch.unique(trajectory_ids[here], return_inverse=True)[1]
        split += (token_weights(local, settings, denominator) * loss[here]).sum().item()
    assert split == pytest.approx(whole.item(), rel=1e-4, abs=1e-5)


def test_metrics_of_parts_merge_to_the_metrics_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(2)
    logprobs, old_logprobs, rollout_logprobs = (
        -torch.rand(40, generator=generator) * 3 for _ in range(3)
    )
    advantage, lag = torch.randn(40, generator=generator), torch.arange(40) % 6
    settings = PpoLoss()

    def metrics(part: slice) -> LossMetrics:
        tensors = (t[part] for t in (logprobs, old_logprobs, rollout_logprobs, advantage))
        return policy_loss(
            *tensors, settings, entropy=old_logprobs[part].neg(), lag=lag[part]
        ).metrics

    merged = LossMetrics.zero().merge(metrics(slice(0, 7))).merge(metrics(slice(7, 40))).finalize()
    assert merged == pytest.approx(metrics(slice(None)).finalize())
    assert set(merged) >= {"logprob_mismatch_k3/lag_0", "logprob_mismatch_k3/lag_3", "entropy"}
    assert "kl" not in merged


def test_metrics_by_hand() -> None:
    logprobs, old_logprobs = logprobs_of(1.5, 0.5, 4.0, 1.0), torch.zeros(4)
    rollout_logprobs = logprobs_of(0.25, 1.0, 1.0, 1.0)
    advantage = torch.tensor([1.0, -1.0, -1.0, 1.0])
    lag = torch.tensor([0, 0, 1, 5])
    values = policy_loss(
        logprobs, old_logprobs, rollout_logprobs, advantage, PpoLoss(), lag=lag
    ).metrics.finalize()
    assert values["ratio_max"] == pytest.approx(4.0)
    assert (values["clip_low"], values["clip_high"], values["clip_dual"], values["capped"]) == (
        0.25,
        0.25,
        0.25,
        0.25,
    )
    assert values["effective_sample_size"] == pytest.approx(7**2 / (4 * 19))
    assert values["logprob_mismatch_mean"] == pytest.approx(math.log(4) / 4)
    assert values["logprob_mismatch_mean/lag_0"] == pytest.approx(math.log(4) / 2)
    assert values["logprob_mismatch_mean/lag_1"] == pytest.approx(0)
    assert values["logprob_mismatch_max"] == pytest.approx(math.log(4))
    assert values["logprob_mismatch_k3"] == pytest.approx((4 - math.log(4) - 1) / 4)


def test_no_tokens_give_no_metrics_and_broken_ones_stay_finite() -> None:
    empty = torch.zeros(0)
    result = policy_loss(empty, empty, empty, empty, PpoLoss())
    assert result.metrics.finalize() == {}
    far = policy_loss(
        torch.tensor([0.0]), torch.tensor([0.0]), torch.tensor([-900.0]), torch.ones(1), PpoLoss()
    )
    assert all(math.isfinite(value) for value in far.metrics.finalize().values())
    assert far.loss.item() == -2.0
