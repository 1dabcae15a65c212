"""What every loss keeps to: the shipped ones, and the one of docs/bring_your_own/loss.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rayloop.config.explain import models
from rayloop.config.settings import Component, check_components, load
from rayloop.core.failures import ConfigError
from rayloop.grpo.losses.policy import Denominator, PolicyLoss, token_weights
from rayloop.grpo.losses.settings import CustomLoss, GspoLoss, LossChoice, LossSettings
from rayloop.grpo.losses.surrogates import LossInputs, LossOutputs
from rayloop.run.config import RunConfig
from tests.support.pages import write_snippets

torch.set_num_threads(1)

SHIPPED: list[Any] = [model() for model in models(LossChoice) if model is not CustomLoss]
NAMES = [loss.kind for loss in SHIPPED]


def tokens(lengths: list[int], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    trajectory_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    old_logprobs, noise, drift = (
        torch.rand(len(trajectory_ids), generator=generator, dtype=torch.float64) for _ in range(3)
    )
    advantage = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    return {
        "logprobs": -3 * old_logprobs + noise - 0.5,
        "old_logprobs": -3 * old_logprobs,
        "rollout_logprobs": -3 * old_logprobs + drift - 0.5,
        "advantage": advantage[trajectory_ids],
        "trajectory_ids": trajectory_ids,
    }


def result(
    loss: LossSettings, given: dict[str, Tensor], whole: Denominator
) -> tuple[float, Tensor]:
    """The part of an update's loss that these tokens are, and the gradient at each of them."""
    logprobs = given["logprobs"].clone().requires_grad_()
    per_token = PolicyLoss(loss)(
        logprobs,
        given["old_logprobs"],
        given["rollout_logprobs"],
        given["advantage"],
        given["trajectory_ids"],
    ).loss
    part = (token_weights(given["trajectory_ids"], loss, whole).double() * per_token).sum()
    return part.item(), torch.autograd.grad(part, logprobs)[0]


@pytest.mark.parametrize("loss", SHIPPED, ids=NAMES)
@settings(max_examples=20)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_packing_changes_nothing(loss: LossSettings, lengths: list[int], random: Any) -> None:
    """A trajectory alone in its micro-batch, or packed in any order: the same to 1e-12."""
    packed, denominator = tokens(lengths), Denominator(sum(lengths), len(lengths))
    value, gradient = result(loss, packed, denominator)
    order = list(range(len(lengths)))
    random.shuffle(order)
    total = 0.0
    for number in order:
        here = packed["trajectory_ids"] == number
        alone = {name: values[here] for name, values in packed.items()} | {
            "trajectory_ids": torch.zeros(lengths[number], dtype=torch.int64)
        }
        part, pull = result(loss, alone, denominator)
        total += part
        torch.testing.assert_close(pull, gradient[here], atol=1e-12, rtol=0)
    assert total == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("loss", SHIPPED, ids=NAMES)
def test_an_advantage_of_zero_teaches_nothing(loss: LossSettings) -> None:
    given = tokens([4, 2, 3])
    given["advantage"] = torch.where(given["trajectory_ids"] == 1, 0.0, given["advantage"])
    _, gradient = result(loss, given, Denominator(9, 3))
    assert gradient[4:6].tolist() == [0.0, 0.0]
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize("loss", SHIPPED, ids=NAMES)
def test_at_the_policy_that_sampled_the_gradient_is_minus_the_advantage(loss: LossSettings) -> None:
    """On-policy all of them are REINFORCE; GSPO spreads a trajectory's over its tokens, which comes
    to the same.
    """
    given = tokens([4, 2, 3])
    given["old_logprobs"] = given["rollout_logprobs"] = given["logprobs"]
    _, gradient = result(loss, given, Denominator(9, 3))
    weights = token_weights(given["trajectory_ids"], loss, Denominator(9, 3)).double()
    torch.testing.assert_close(gradient, -given["advantage"] * weights, atol=1e-9, rtol=0)


@pytest.mark.parametrize("loss", SHIPPED, ids=NAMES)
def test_broken_logprobs_stay_finite(loss: LossSettings) -> None:
    far = tokens([2, 2])
    far["rollout_logprobs"] = torch.tensor([-900.0, 0.0, -900.0, 0.0], dtype=torch.float64)
    far["old_logprobs"] = torch.tensor([0.0, -900.0, -900.0, 0.0], dtype=torch.float64)
    value, gradient = result(loss, far, Denominator(4, 2))
    assert torch.isfinite(torch.tensor(value))
    assert torch.isfinite(gradient).all()


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_snippets("bring_your_own/loss.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_pages_loss_is_the_shipped_one_bit_for_bit(page: Path) -> None:
    own = CustomLoss.model_validate({"use": "my_losses:gspo", "aggregation": "seq-mean-token-mean"})
    ours = [result(own, tokens([4, 2, 3], seed), Denominator(9, 3)) for seed in range(5)]
    shipped = [result(GspoLoss(), tokens([4, 2, 3], seed), Denominator(9, 3)) for seed in range(5)]
    assert [value for value, _ in ours] == [value for value, _ in shipped]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(ours, shipped, strict=True))


def test_the_pages_configuration_is_one(page: Path) -> None:
    lines = (page / "loss.yaml").read_text(encoding="utf-8")
    reward = "reward: {source: {use: 'rayloop.recipes.digits.data:SortReward'}}\n"
    (page / "run.yaml").write_text(
        f"name: own\nsteps: 1\nmodel: {{path: m}}\ndata: {{train: t}}\n{reward}{lines}",
        encoding="utf-8",
    )
    config = load(page / "run.yaml", [], RunConfig)
    check_components(config)
    assert isinstance(config.policy.loss, CustomLoss)
    assert isinstance(config.policy.loss, Component)


def few(inputs: LossInputs) -> Tensor:
    return inputs.logprobs[:1]


def words(inputs: LossInputs) -> str:
    return "loss"


class Clipped:
    """A class with a method ``loss``."""

    def loss(self, inputs: LossInputs) -> LossOutputs:
        return LossOutputs(-inputs.advantage * inputs.ratio, high=inputs.ratio > 1)


def test_a_class_has_a_method_and_says_what_it_clipped() -> None:
    given = tokens([3])
    made = PolicyLoss(CustomLoss(use=f"{__name__}:Clipped", correction="none"))
    out = made(
        given["logprobs"],
        given["old_logprobs"],
        given["rollout_logprobs"],
        given["advantage"],
        given["trajectory_ids"],
    )
    assert out.metrics.finalize()["clip_high"] == pytest.approx(
        (given["logprobs"] > given["old_logprobs"]).double().mean().item()
    )


@pytest.mark.parametrize(("name", "got"), [("few", r"shape \(1,\)"), ("words", "str")])
def test_another_answer_is_an_error_that_names_the_loss(name: str, got: str) -> None:
    given = tokens([3])
    with pytest.raises(
        ConfigError,
        match=rf"policy.loss.use: {__name__}:{name} returned {got}; expected .* shape \(3,\)",
    ):
        PolicyLoss(CustomLoss(use=f"{__name__}:{name}"))(
            given["logprobs"],
            given["old_logprobs"],
            given["rollout_logprobs"],
            given["advantage"],
            given["trajectory_ids"],
        )
