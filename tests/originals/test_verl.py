"""verl's own functions beside ours.

Its files run unchanged, on stand-ins for what else they import.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from rayloop.core.groups import Group, Scored
from rayloop.core.types import Task, TrajectoryId
from rayloop.grpo.advantage import build_advantage, over_step, with_advantages
from rayloop.grpo.losses.correction import weights
from rayloop.grpo.losses.kl import Coefficients, estimate
from rayloop.grpo.losses.policy import Denominator, PolicyLoss, token_weights
from rayloop.grpo.losses.settings import Correction, LossChoice, LossSettings
from rayloop.grpo.losses.surrogates import LossInputs
from rayloop.grpo.settings import AdvantageChoice
from tests.unit.groups import make_member

torch.set_num_threads(1)
FOLDER = importlib.util.find_spec("verl")
pytestmark = [
    pytest.mark.env,
    pytest.mark.skipif(
        FOLDER is None,
        reason="verl is not installed: pip install --no-deps verl, as make test-env does",
    ),
]

READ = (
    "utils/import_utils",
    "utils/groupwise",
    "utils/torch_functional",
    "trainer/ppo/core_algos",
    "trainer/ppo/rollout_corr_helper",
)
"""Files of verl that are loaded, in this order."""


class Config(SimpleNamespace):
    """Stands for ActorConfig and AlgoConfig: attributes, and ``get``."""

    global_batch_info: dict[str, Any] = {}
    clip_ratio, clip_ratio_low, clip_ratio_high, tau_pos, tau_neg = 0.2, None, None, 1.0, 1.05

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self, key, default)


class AlgoConfig(Config):
    """So that an actor's configuration is none."""


STAND_INS: dict[str, dict[str, Any]] = {
    "omegaconf": {"DictConfig": Config},
    "tensordict": {"TensorDict": dict},
    "verl.workers": {},
    "verl.trainer": {},
    "verl.trainer.ppo": {},
    "verl.trainer.config": {"AlgoConfig": AlgoConfig},
    "verl.trainer.config.algorithm": {"RolloutCorrectionConfig": Config},
    "verl.workers.config": {"ActorConfig": Config},
    "verl.workers.config.actor": {"PolicyLossConfig": Config},
    "verl.protocol": {"DataProto": Config},
    "verl.utils.device": {"get_device_name": lambda: "cpu", "get_torch_device": lambda: torch.cpu},
}
"""Modules that verl's files import, and what they take from them here."""


@pytest.fixture(scope="module")
def verl() -> Iterator[SimpleNamespace]:
    """verl's ``core_algos`` and ``rollout_corr_helper``."""
    assert FOLDER is not None
    assert FOLDER.submodule_search_locations is not None
    root = Path(FOLDER.submodule_search_locations[0])
    with pytest.MonkeyPatch.context() as patch:
        utils = types.ModuleType("verl.utils")
        for name, module in {"verl": types.ModuleType("verl"), "verl.utils": utils}.items():
            module.__path__ = []
            patch.setitem(sys.modules, name, module)
        for name, given in STAND_INS.items():
            stand_in = types.ModuleType(name)
            stand_in.__path__ = []
            stand_in.__dict__.update(given)
            patch.setitem(sys.modules, name, stand_in)
        for path in READ:
            name = "verl." + path.replace("/", ".")
            spec = importlib.util.spec_from_file_location(name, root / f"{path}.py")
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            patch.setitem(sys.modules, name, module)
            spec.loader.exec_module(module)
            if path == "utils/groupwise":  # of which its package has these
                utils.__dict__.update(
                    as_torch_index=module.as_torch_index, group_mean_std=module.group_mean_std
                )
            setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], module)
        yield SimpleNamespace(
            core=sys.modules[f"verl.{READ[3].replace('/', '.')}"],
            correction=sys.modules[f"verl.{READ[4].replace('/', '.')}"],
        )


# Packed rows and padded ones ----------------------------------------------------------------------

LENGTHS = (5, 1, 9, 3, 1, 7, 2)
SEGMENT = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
MASK = torch.arange(max(LENGTHS))[None] < torch.tensor(LENGTHS)[:, None]
WHOLE = Denominator(float(len(SEGMENT)), float(len(LENGTHS)), 3.0)


def padded(values: Tensor) -> Tensor:
    """[S, longest]; 0 behind a trajectory's end."""
    return torch.zeros(MASK.shape, dtype=values.dtype).masked_scatter(MASK, values)


def update(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(3, len(SEGMENT), generator=generator, dtype=torch.float64)
    old_logprobs = -3 * torch.rand(len(SEGMENT), generator=generator, dtype=torch.float64)
    advantage = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64)[SEGMENT]
    return {
        "old_logprobs": old_logprobs,
        "logprobs": old_logprobs + 0.5 * noise[0],
        "rollout_logprobs": old_logprobs + 0.4 * noise[1],
        "ref_logprobs": old_logprobs + noise[2],
        "advantage": advantage,
    }


def settings(**given: Any) -> LossSettings:
    return TypeAdapter(LossChoice).validate_python(given)  # type: ignore[arg-type]


def ours(given: dict[str, Tensor], chosen: LossSettings) -> tuple[float, Tensor]:
    logprobs = given["logprobs"].clone().requires_grad_()
    loss = PolicyLoss(chosen)(
        logprobs, given["old_logprobs"], given["rollout_logprobs"], given["advantage"], SEGMENT
    ).rl
    total = (token_weights(SEGMENT, chosen, WHOLE).double() * loss).sum()
    return total.item(), torch.autograd.grad(total, logprobs)[0]


def theirs(
    given: dict[str, Tensor],
    function: Any,
    config: Config,
    mode: str,
    weight: Tensor | None = None,
    old_logprobs: str = "old_logprobs",
) -> tuple[float, Tensor]:
    logprobs = given["logprobs"].clone().requires_grad_()
    total, _ = function(
        padded(given[old_logprobs]),
        padded(logprobs),
        padded(given["advantage"]),
        MASK.double(),
        mode,
        config,
        None if weight is None else padded(weight),
    )
    return total.item(), torch.autograd.grad(total, logprobs)[0]


def assert_same(found: tuple[float, Tensor], expected: tuple[float, Tensor]) -> None:
    assert found[0] == pytest.approx(expected[0], abs=3e-7)
    torch.testing.assert_close(found[1], expected[1], atol=1e-7, rtol=1e-6)


MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
LOSSES: dict[str, tuple[str, dict[str, Any], Config, str]] = {
    "ppo": (
        "vanilla",
        {"clip_high": 0.28, "correction": "none"},
        Config(clip_ratio_low=0.2, clip_ratio_high=0.28),
        "old_logprobs",
    ),
    "ppo, bypass": ("vanilla", {"correction": "bypass"}, Config(), "rollout_logprobs"),
    "gspo": (
        "gspo",
        {"correction": "none"},
        Config(clip_ratio_low=3e-4, clip_ratio_high=4e-4),
        "old_logprobs",
    ),
    "cispo": (
        "cispo",
        {"correction": "none"},
        Config(clip_ratio_low=1.0, clip_ratio_high=4.0),
        "old_logprobs",
    ),
    "sapo": ("sapo", {"correction": "none"}, Config(), "old_logprobs"),
    "dppo": (
        "dppo_tv",
        {"clip_low": 0.2, "clip_high": 0.2},
        Config(clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=20.0),
        "rollout_logprobs",
    ),
}
"""Ours: verl's name, our settings, its configuration, and the log-probs that it gets as the old
ones.
"""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_verls(name: str, mode: str, seed: int, verl: SimpleNamespace) -> None:
    kind, given, config, old_logprobs = LOSSES[name]
    if kind == "sapo" and mode != "seq-mean-token-mean":
        pytest.skip("verl's SAPO takes no other aggregation")
    chosen = settings(kind=name.partition(",")[0], aggregation=mode, **given)
    function = verl.core.get_policy_loss_fn(kind)
    assert_same(
        ours(update(seed), chosen),
        theirs(update(seed), function, config, mode, old_logprobs=old_logprobs),
    )


def test_reinforce_is_verls(verl: SimpleNamespace) -> None:
    given = update(0)
    found = ours(given, settings(kind="reinforce", correction="none"))
    assert_same(
        found, theirs(given, verl.core.compute_policy_loss_reinforce, Config(), "token-mean")
    )


def test_a_number_is_verls_norm_times_the_trajectories(verl: SimpleNamespace) -> None:
    """Ours differs on purpose: verl divides by the trajectories too, so that their number changes a
    token's weight.
    """
    chosen = settings(aggregation=50.0 * len(LENGTHS), correction="none")
    config = Config(global_batch_info={"loss_scale_factor": 50})
    assert_same(
        ours(update(1), chosen),
        theirs(
            update(1), verl.core.get_policy_loss_fn("vanilla"), config, "seq-mean-token-sum-norm"
        ),
    )


# KL -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours_", "theirs_"),
    [("k1", "k1"), ("k2", "k2"), ("k3", "k3"), ("k3+", "k3+"), ("low_var_kl", "low_var_kl")],
)
@pytest.mark.parametrize("seed", range(3))
def test_an_estimate_of_the_kl_is_verls(
    ours_: Any, theirs_: str, seed: int, verl: SimpleNamespace
) -> None:
    given = update(seed)
    ref_logprobs = given["logprobs"] + 0.7 * (
        given["ref_logprobs"] - given["old_logprobs"]
    )  # within verl's cap, which its k3 has too
    pulls = []
    for function, name in ((estimate, ours_), (verl.core.kl_penalty, theirs_)):
        logprobs = given["logprobs"].clone().requires_grad_()
        value = function(logprobs, ref_logprobs, name)
        pulls.append((value.detach(), torch.autograd.grad(value.sum(), logprobs)[0]))
    torch.testing.assert_close(pulls[0], pulls[1], atol=1e-12, rtol=1e-12)


def test_far_from_the_reference_ours_is_bounded_elsewhere(verl: SimpleNamespace) -> None:
    """On purpose: k3 is bounded by its log-ratio (10 nats), and a token keeps its gradient;
    ``low_var_kl`` is verl's k3, capped at 10, without one. k1 and k2 are verl's.
    """
    logprobs, ref_logprobs = torch.tensor([-9.0]), torch.tensor([-4.0])
    assert (
        verl.core.kl_penalty(logprobs, ref_logprobs, "k3").item()
        == estimate(logprobs, ref_logprobs, "low_var_kl").item()
        == 10.0
    )
    assert estimate(logprobs, ref_logprobs, "k3").item() == pytest.approx(142.4, abs=0.1)
    far = torch.tensor([-30.0])
    assert (
        verl.core.kl_penalty(far, ref_logprobs, "k1").item()
        == estimate(far, ref_logprobs, "k1").item()
        == -26.0
    )
    assert (
        verl.core.kl_penalty(far, ref_logprobs, "k2").item()
        == estimate(far, ref_logprobs, "k2").item()
        == 338.0
    )


def test_the_adaptive_coefficient_is_verls(verl: SimpleNamespace) -> None:
    control = verl.core.AdaptiveKLController(0.2, 0.05, 1000.0)
    made = Coefficients(settings(kl_coef={"start": 0.2, "target": 0.05, "horizon": 1000.0}))
    for i, measured in enumerate((0.01, 0.2, 0.055, 0.0, 0.06)):
        control.update(measured, 64 + i)
        made.after({"kl": measured}, 64 + i)
        assert made.kl == pytest.approx(control.value, rel=1e-12)


# Advantages ---------------------------------------------------------------------------------------

REWARDS = ((1.0, 0.0, 0.25, 0.5), (0.5, 0.5, 0.5), (0.0, 2.0, 1.0))
FORMAT = ((1.0, 0.0, 1.0, 1.0), (1.0, 1.0, 1.0), (0.0, 1.0, 1.0))
INDEX = np.array([group for group, rewards in enumerate(REWARDS) for _ in rewards])


def our_advantages(kind: str, **with_: Any) -> list[float]:
    how = build_advantage(AdvantageChoice.model_validate({"kind": kind, "with": with_}))
    groups = []
    for g, (rewards, formats) in enumerate(zip(REWARDS, FORMAT, strict=True)):
        outcomes = [
            Scored(r, {"iou": r, "format": f}) for r, f in zip(rewards, formats, strict=True)
        ]
        made = tuple(make_member(TrajectoryId(g, i), outcome) for i, outcome in enumerate(outcomes))
        groups.append(with_advantages(Group(g, Task("task", ()), made), how))
    return [float(m.advantage or 0.0) for group in over_step(groups, how) for m in group.members]


def their_advantages(function: Any, length: int = 3, **more: Any) -> list[float]:
    """Each answer has ``length`` tokens, the last of which has the reward."""
    rewards = torch.zeros(len(INDEX), length)
    rewards[:, -1] = torch.tensor([reward for group in REWARDS for reward in group])
    found, _ = function(rewards, torch.ones(len(INDEX), length), INDEX, **more)
    return found[:, 0].tolist()


def test_grpo_dr_grpo_and_rloo_are_verls(verl: SimpleNamespace) -> None:
    core = verl.core
    assert our_advantages("grpo") == pytest.approx(
        their_advantages(core.compute_grpo_outcome_advantage), abs=2e-6
    )
    assert our_advantages("grpo") == pytest.approx(
        their_advantages(core.compute_grpo_vectorized_outcome_advantage), abs=2e-6
    )
    plain = their_advantages(core.compute_grpo_outcome_advantage, norm_adv_by_std_in_grpo=False)
    assert our_advantages("dr_grpo") == pytest.approx(plain, abs=1e-6)
    assert our_advantages("rloo") == pytest.approx(
        their_advantages(core.compute_rloo_outcome_advantage), abs=1e-6
    )


def test_a_lone_sample_is_verls(verl: SimpleNamespace) -> None:
    found, _ = verl.core.compute_grpo_outcome_advantage(
        torch.tensor([[0.7]]), torch.ones(1, 1), np.array([0])
    )
    how = build_advantage(AdvantageChoice(kind="raw"))
    (credit,) = how.credits([make_member(TrajectoryId(0, 0), Scored(0.7))])
    assert credit.advantage == pytest.approx(found.item(), abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        ("reinforce_pp", "compute_reinforce_plus_plus_baseline_outcome_advantage"),
        ("gdpo", "compute_gdpo_outcome_advantage"),
    ],
)
def test_a_scale_over_the_step_is_verls_but_for_its_tokens(
    kind: str, function: str, verl: SimpleNamespace
) -> None:
    """Ours differs on purpose: verl's deviation is over the tokens of the step, so that long
    answers set the scale and a trajectory counts as often as it has tokens; the papers' is over
    trajectories. Over answers of one length they differ by Bessel's correction alone, n * length
    against n.
    """
    with_ = {"weights": {"iou": 1.0, "format": 0.5}} if kind == "gdpo" else {}
    n, length = len(INDEX), 3
    more: dict[str, Any] = {}
    if kind == "gdpo":
        columns = {
            "iou": [r for group in REWARDS for r in group],
            "format": [f for group in FORMAT for f in group],
        }
        more = {
            "config": Config(gdpo_reward_keys=list(columns), gdpo_reward_weights=[1.0, 0.5]),
            "non_tensor_batch": columns,
            "batch": {
                "prompts": torch.zeros(n, 1),
                "attention_mask": torch.ones(n, 1 + length, dtype=torch.int64),
            },
        }
    scale = ((n * length / (n * length - 1)) / (n / (n - 1))) ** 0.5
    expected = [
        value * scale for value in their_advantages(getattr(verl.core, function), length, **more)
    ]
    assert our_advantages(kind, **with_) == pytest.approx(expected, abs=1e-5)


# The gap between engine and trainer ---------------------------------------------------------------


def our_weights(given: dict[str, Tensor], rule: Correction) -> Tensor:
    inputs = LossInputs(
        given["logprobs"],
        given["old_logprobs"],
        given["rollout_logprobs"],
        given["advantage"],
        SEGMENT,
    )
    return weights(inputs, given["old_logprobs"], rule).weight


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    ("threshold", "rule"),
    [(1.5, {"high": 1.5}), ("0.6_1.5", {"action": "mask", "low": 0.6, "high": 1.5})],
)
def test_a_weight_is_verls(
    level: Any, threshold: Any, rule: dict[str, Any], seed: int, verl: SimpleNamespace
) -> None:
    given = update(seed)
    gap = padded(given["old_logprobs"] - given["rollout_logprobs"])
    expected, _ = verl.correction.compute_rollout_correction_weights(
        gap, MASK.double(), level, threshold
    )
    torch.testing.assert_close(
        our_weights(given, Correction(level=level, **rule)), expected[MASK], atol=1e-12, rtol=1e-12
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("theirs_", "level"),
    [("token_k1", "token"), ("seq_sum_k1", "sequence"), ("seq_mean_k1", "geometric")],
)
def test_what_is_masked_is_verls(
    theirs_: str, level: Any, seed: int, verl: SimpleNamespace
) -> None:
    """verl's k1 is rollout - old log-probs, so its bounds are the inverses of ours.

    It takes a masked token out of the denominator; ours stays there on purpose, so that a step with
    many masked tokens is a small step.
    """
    given = update(seed)
    gap = padded(given["old_logprobs"] - given["rollout_logprobs"])
    expected, _ = verl.correction.compute_rollout_rejection_mask(
        gap, MASK.double(), theirs_, f"{1 / 1.4}_{1 / 0.8}"
    )
    kept = our_weights(
        given, Correction(level=level, action="mask", low=0.8, high=1.4, bypass=True)
    )
    assert 0 < kept.sum() < len(kept)
    torch.testing.assert_close(kept, expected[MASK], atol=0, rtol=0)


def test_weights_go_into_the_loss_as_verls_do(verl: SimpleNamespace) -> None:
    given, chosen = update(2), settings(aggregation="seq-mean-token-mean")
    weight = our_weights(given, Correction())
    function = verl.core.get_policy_loss_fn("vanilla")
    assert_same(
        ours(given, chosen), theirs(given, function, Config(), "seq-mean-token-mean", weight)
    )
