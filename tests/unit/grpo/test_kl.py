"""The KL's estimators: which of them has the KL's gradient, counted exactly over ten actions, their bounds, and coefficients that
adapt."""

from __future__ import annotations

import random
from typing import get_args

import pytest
import torch
from pydantic import ValidationError

from rayloop.grpo.losses.kl import Coefficients, estimate, to_go
from rayloop.grpo.losses.policy import PolicyLoss
from rayloop.grpo.losses.settings import Estimator, KlTerm, PpoLoss
from tests.oracles import losses as oracle


def pulls(estimator: Estimator, *, unbiased: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the term's mean under the policy that sampled, and that of the KL."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(10, generator=generator, dtype=torch.float64).requires_grad_()
    sampled, reference = (torch.randn(10, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(2))
    current = logits.log_softmax(0)
    behaviour = sampled if unbiased else current.detach()
    if unbiased and estimator in ("k2", "k3+"):
        term = torch.exp(current - behaviour) * estimate(current, reference, estimator)
    else:
        loss = PolicyLoss(PpoLoss(kl_coef=1.0, kl=KlTerm(estimator=estimator, unbiased=unbiased), correction="none"))
        zero, segment = torch.zeros(10, dtype=torch.float64), torch.zeros(10, dtype=torch.int64)
        found = loss(current, current.detach(), behaviour, zero, segment, reference=reference).ref_kl
        assert found is not None
        term = found
    ((got,), (true,)) = (
        torch.autograd.grad(one, logits, retain_graph=True)
        for one in ((behaviour.exp() * term).sum(), (current.exp() * (current - reference)).sum())
    )
    return got, true


@pytest.mark.parametrize(
    ("estimator", "unbiased", "right"),
    [
        ("k1", False, False), ("k2", False, True), ("k3", False, False), ("k3+", False, True),
        ("k1", True, True), ("k2", True, False), ("k3", True, True), ("k3+", True, False),
    ],
)  # fmt: skip
def test_which_gradient_is_the_kls(estimator: Estimator, unbiased: bool, right: bool) -> None:
    got, true = pulls(estimator, unbiased=unbiased)
    assert torch.allclose(got, true, atol=1e-9) == right


@pytest.mark.parametrize("estimator", ["k2", "k3+"])
def test_an_unbiased_term_without_the_kls_gradient_is_refused(estimator: Estimator) -> None:
    with pytest.raises(ValidationError, match=rf"goes with estimator: k1 or k3: .* with {estimator.replace('+', '.')} the two"):
        PpoLoss(kl_coef=1.0, kl=KlTerm(estimator=estimator, unbiased=True))


def test_returns_to_go_in_a_long_row_are_those_of_a_trajectory_alone() -> None:
    """Float32, the last of 40 trajectories of 1,000 tokens."""
    segment = torch.repeat_interleave(torch.arange(40), 1000)
    costs = 2 * torch.rand(len(segment), generator=torch.Generator().manual_seed(0))
    packed = to_go(costs, segment)[-1000:]
    alone = to_go(costs[-1000:], torch.zeros(1000, dtype=torch.int64))
    exact = costs[-1000:].double().flip(0).cumsum(0).flip(0)
    torch.testing.assert_close(packed, alone, atol=0, rtol=1e-6)
    torch.testing.assert_close(packed.double(), exact, atol=0, rtol=1e-6)
    assert to_go(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []


@pytest.mark.parametrize("estimator", get_args(Estimator))
@pytest.mark.parametrize("distance", [-30.0, -12.0, 12.0, 30.0])
def test_far_from_the_reference_an_estimate_is_bounded(estimator: str, distance: float) -> None:
    current = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    settings = PpoLoss.model_validate({"kl": estimator, "kl_coef": 1.0, "correction": "none"})
    zero, segment = torch.zeros_like(current), torch.zeros(1, dtype=torch.int64)
    found = PolicyLoss(settings)(current, zero, zero, zero, segment, reference=current.detach() + distance).ref_kl
    assert found is not None
    capped = estimator == "low_var_kl"  # whose log-ratio stops at 20 nats, not at 10
    reference = current.detach() + (max(-20.0, min(20.0, distance)) if capped else distance)
    expected = oracle.kl(current[0], reference[0], estimator)
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    pull, theirs = (torch.autograd.grad(one, current, allow_unused=True)[0] for one in (found.sum(), expected))
    assert pull is not None
    if not (capped and distance == -30.0):  # there the product's gradient is 0
        torch.testing.assert_close(pull, torch.zeros(1).double() if theirs is None else theirs, atol=1e-12, rtol=1e-12)


def test_coefficients_adapt_over_any_steps() -> None:
    settings = PpoLoss.model_validate(
        {"kl_coef": {"start": 0.2, "target": 0.05, "horizon": 500}, "entropy_coef": {"target": 0.5, "step": 0.01}}
    )
    chance, made = random.Random(1), Coefficients(settings)
    steps: list[tuple[float, int]] = []
    for _ in range(50):
        steps.append((chance.uniform(0, 0.2), chance.randint(1, 200)))
        made.after({"kl": steps[-1][0], "entropy": 5 * steps[-1][0]}, steps[-1][1])
        assert made.kl == pytest.approx(oracle.adaptive_kl(0.2, 0.05, 500, steps), rel=1e-12)
        assert made.entropy == pytest.approx(oracle.adaptive_entropy(0.0, 0.5, 0.01, [5 * kl for kl, _ in steps]), abs=1e-15)
        again = Coefficients(settings)
        again.load(made.state())
        assert (again.kl, again.entropy) == (made.kl, made.entropy)
