"""The KL's estimators: which of them has the KL's gradient, counted exactly over ten actions, their
bounds, and coefficients that adapt.
"""

from __future__ import annotations

import math
import random
from typing import Any, get_args

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
    sampled, ref_logprobs = (
        torch.randn(10, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(2)
    )
    logprobs = logits.log_softmax(0)
    rollout_logprobs = sampled if unbiased else logprobs.detach()
    if unbiased and estimator in ("k2", "k3+"):
        term = torch.exp(logprobs - rollout_logprobs) * estimate(logprobs, ref_logprobs, estimator)
    else:
        loss = PolicyLoss(
            PpoLoss(
                kl_coef=1.0, kl=KlTerm(estimator=estimator, unbiased=unbiased), correction="none"
            )
        )
        zero, trajectory_ids = (
            torch.zeros(10, dtype=torch.float64),
            torch.zeros(10, dtype=torch.int64),
        )
        found = loss(
            logprobs,
            logprobs.detach(),
            rollout_logprobs,
            zero,
            trajectory_ids,
            ref_logprobs=ref_logprobs,
        ).ref_kl
        assert found is not None
        term = found
    (got,), (true,) = (
        torch.autograd.grad(one, logits, retain_graph=True)
        for one in (
            (rollout_logprobs.exp() * term).sum(),
            (logprobs.exp() * (logprobs - ref_logprobs)).sum(),
        )
    )
    return got, true


@pytest.mark.parametrize(
    ("estimator", "unbiased", "right"),
    [
        ("k1", False, False),
        ("k2", False, True),
        ("k3", False, False),
        ("k3+", False, True),
        ("k1", True, True),
        ("k2", True, False),
        ("k3", True, True),
        ("k3+", True, False),
    ],
)
def test_which_gradient_is_the_kls(estimator: Estimator, unbiased: bool, right: bool) -> None:
    got, true = pulls(estimator, unbiased=unbiased)
    assert torch.allclose(got, true, atol=1e-9) == right


@pytest.mark.parametrize("estimator", ["k2", "k3+"])
def test_an_unbiased_term_without_the_kls_gradient_is_refused(estimator: Estimator) -> None:
    with pytest.raises(
        ValidationError,
        match=rf"goes with estimator: k1 or k3: .* with {estimator.replace('+', '.')} the two",
    ):
        PpoLoss(kl_coef=1.0, kl=KlTerm(estimator=estimator, unbiased=True))


def test_returns_to_go_in_a_long_row_are_those_of_a_trajectory_alone() -> None:
    """Float32, the last of 40 trajectories of 1,000 tokens."""
    trajectory_ids = torch.repeat_interleave(torch.arange(40), 1000)
    costs = 2 * torch.rand(len(trajectory_ids), generator=torch.Generator().manual_seed(0))
    packed = to_go(costs, trajectory_ids)[-1000:]
    alone = to_go(costs[-1000:], torch.zeros(1000, dtype=torch.int64))
    exact = costs[-1000:].double().flip(0).cumsum(0).flip(0)
    torch.testing.assert_close(packed, alone, atol=0, rtol=1e-6)
    torch.testing.assert_close(packed.double(), exact, atol=0, rtol=1e-6)
    assert to_go(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []


@pytest.mark.parametrize("estimator", get_args(Estimator))
@pytest.mark.parametrize("distance", [-30.0, -12.0, 12.0, 30.0])
def test_far_from_the_reference_an_estimate_keeps_its_gradient(
    estimator: str, distance: float
) -> None:
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    settings = PpoLoss.model_validate({"kl": estimator, "kl_coef": 1.0, "correction": "none"})
    zero, trajectory_ids = torch.zeros_like(logprobs), torch.zeros(1, dtype=torch.int64)
    found = PolicyLoss(settings)(
        logprobs, zero, zero, zero, trajectory_ids, ref_logprobs=logprobs.detach() + distance
    ).ref_kl
    assert found is not None
    expected = oracle.kl(logprobs[0], logprobs.detach()[0] + distance, estimator)
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    pull, theirs = (
        torch.autograd.grad(one, logprobs, allow_unused=True)[0] for one in (found.sum(), expected)
    )
    assert pull is not None
    assert (pull.item() == 0) == (estimator == "low_var_kl")  # verl's, which ends at 10
    torch.testing.assert_close(
        pull, torch.zeros(1).double() if theirs is None else theirs, atol=1e-12, rtol=1e-12
    )


@pytest.mark.parametrize("estimator", get_args(Estimator))
def test_a_reference_that_excludes_a_token_gives_finite_terms(estimator: Estimator) -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    term = estimate(logprobs, torch.tensor([-float("inf")]), estimator)
    (pull,) = torch.autograd.grad(term.sum(), logprobs)
    assert term.isfinite().all()
    assert pull.isfinite().all()


@pytest.mark.parametrize("estimator", ["k2", "k3+"])
def test_a_student_unlearns_what_its_teacher_rejects(estimator: Estimator) -> None:
    """The student gives .9 to a token to which the teacher gives a millionth: 13.7 nats."""
    logits = torch.full((50,), 0.1 / 49, dtype=torch.float64).log()
    teacher = torch.full((50,), (1 - 1e-6) / 49, dtype=torch.float64).log()
    logits[0], teacher[0] = torch.tensor([0.9, 1e-6], dtype=torch.float64).log()
    logits.requires_grad_()
    logprobs = logits.log_softmax(0)
    expected_term = (logprobs.exp().detach() * estimate(logprobs, teacher, estimator)).sum()
    reverse_kl = (logprobs.exp() * (logprobs - teacher)).sum()
    got, true = (
        torch.autograd.grad(one, logits, retain_graph=True)[0]
        for one in (expected_term, reverse_kl)
    )
    torch.testing.assert_close(got, true, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_an_unbiased_term_pulls_where_its_weight_is_bounded(estimator: Estimator) -> None:
    """The token is 25 nats likelier than when it was sampled: the weight stops at 20 nats, its
    gradient does not.
    """
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    settings = PpoLoss(
        kl_coef=1.0, kl=KlTerm(estimator=estimator, unbiased=True), correction="none"
    )
    zero, trajectory_ids = torch.zeros_like(logprobs), torch.zeros(1, dtype=torch.int64)
    rollout_logprobs, ref_logprobs = torch.tensor([-26.0]).double(), torch.tensor([-3.0]).double()
    found = PolicyLoss(settings)(
        logprobs,
        logprobs.detach(),
        rollout_logprobs,
        zero,
        trajectory_ids,
        ref_logprobs=ref_logprobs,
    ).ref_kl
    assert found is not None
    term, weight = {"k1": 2.0, "k3": math.exp(-2) + 1}[estimator], math.exp(20)
    slope = {"k1": 1.0, "k3": 1 - math.exp(-2)}[estimator]
    assert found.item() == pytest.approx(weight * term)
    assert torch.autograd.grad(found.sum(), logprobs)[0].item() == pytest.approx(
        weight * (term + slope)
    )


RULES: dict[str, dict[str, Any]] = {
    "veto": {"veto": [1e-4, 100]},
    "mask": {"action": "mask", "low": 0.5, "high": 5},
    "sequence mask": {"level": "sequence", "action": "mask", "low": 0.01, "high": 100},
    "off_policy": {"off_policy": 1.0},
}


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_what_a_correction_leaves_out_has_no_kl(rule: str, unbiased: bool) -> None:
    """The first token's weight is 11 nats off; an entropy bonus falls away with a whole trajectory."""
    settings = PpoLoss.model_validate(
        {
            "kl_coef": 0.1,
            "kl": {"estimator": "k3", "unbiased": unbiased},
            "entropy_coef": 0.1,
            "correction": RULES[rule],
        }
    )
    logprobs = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    rollout_logprobs = (
        torch.tensor([-12.0, -1.0], dtype=torch.float64) if rule != "off_policy" else logprobs + 2
    )
    entropy, advantage = torch.ones_like(logprobs), -torch.ones_like(logprobs)
    out = PolicyLoss(settings)(
        logprobs,
        logprobs,
        rollout_logprobs,
        advantage,
        torch.zeros(2, dtype=torch.int64),
        ref_logprobs=logprobs - 0.5,
        entropy=entropy,
    )
    assert out.ref_kl is not None
    whole = rule in ("veto", "off_policy")
    assert out.ref_kl[0] == 0
    assert (out.ref_kl[1] == 0) == (rule != "mask")
    assert (out.rl == 0).tolist() == [whole, whole]


def test_coefficients_adapt_over_any_steps() -> None:
    settings = PpoLoss.model_validate(
        {
            "kl_coef": {"start": 0.2, "target": 0.05, "horizon": 500},
            "entropy_coef": {"target": 0.5},
        }
    )
    chance, made = random.Random(1), Coefficients(settings)
    steps: list[tuple[float, int]] = []
    for _ in range(50):
        steps.append((chance.uniform(0, 0.2), chance.randint(1, 200)))
        made.after({"kl": steps[-1][0], "entropy": 5 * steps[-1][0]}, steps[-1][1])
        assert made.kl == pytest.approx(oracle.adaptive_kl(0.2, 0.05, 500, steps), rel=1e-12)
        assert made.entropy == pytest.approx(
            oracle.adaptive_entropy(0.0, 0.5, 0.005, [5 * kl for kl, _ in steps]), abs=1e-15
        )
        again = Coefficients(settings)
        again.load(made.state())
        assert (again.kl, again.entropy) == (made.kl, made.entropy)
