"""Every entry of the menu against tests/oracles on random updates: ``pytest -s`` prints the largest
differences.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor

from rayloop.config.explain import members, models
from rayloop.core.groups import Group, Member, Scored
from rayloop.core.types import Streams, Task, TrajectoryId
from rayloop.engines.training.fsdp import FsdpEngine
from rayloop.engines.training.updates import count_denominators
from rayloop.grpo.advantage import build_advantage, over_step, with_advantages
from rayloop.grpo.losses.policy import STREAMS, Denominator, PolicyLoss, entropy_bound
from rayloop.grpo.losses.settings import (
    Aggregation,
    Correction,
    CustomLoss,
    Estimator,
    KlTerm,
    LossChoice,
    LossSettings,
    Perception,
)
from rayloop.grpo.settings import AdvantageChoice
from tests.oracles import advantages as advantage_oracle
from tests.oracles import losses as oracle
from tests.unit.groups import make_member

torch.set_num_threads(1)

SEEDS, LENGTHS, GROUPS = 5, (4, 1, 6, 3, 1, 5, 2), (0, 0, 0, 1, 1, 2, 2)
"""Seven trajectories of three groups."""
CORRECTIONS = ("decoupled", "bypass", "none")
AGGREGATIONS = (*get_args(get_args(Aggregation)[0]), 50.0)
KL = {"kl_coef": 0.3}
MASK = {"action": "mask", "low": 0.5, "high": 1.6}
WEIGHTS = (
    Streams(),
    Streams(),
    Streams(),
    Streams(0.5, 0.0, 1.0),
    Streams(0.5, 0.0, 1.0),
    Streams(0.0, 2.0, 0.0),
    Streams(0.0, 2.0),
)

Values = dict[str, Tensor]
Settings = dict[str, Any]
LOSSES: dict[str, Callable[[int], Settings]] = {
    **{
        f"kind: {kind}": lambda seed, kind=kind: {
            "kind": kind,
            "aggregation": AGGREGATIONS[seed % 5],
            **({} if kind == "dppo" else {"correction": CORRECTIONS[seed % 3]}),
        }
        for kind in oracle.SURROGATES
    },
    "kind: ppo, dual_clip off": lambda seed: {
        "clip_high": 0.28,
        "dual_clip": None,
        "correction": "none",
    },
    "kind: gspo, wide": lambda seed: {"kind": "gspo", "clip_low": 0.2, "clip_high": 0.3},
    **{
        f"aggregation: {how}": lambda seed, how=how: {"aggregation": how, **KL}
        for how in AGGREGATIONS
    },
    **{f"correction: {name}": lambda seed, name=name: {"correction": name} for name in CORRECTIONS},
    **{
        f"correction: {level}, {action}": lambda seed, rule={"level": level, **(MASK if action == "mask" else {"high": 1.3})}: {
            "correction": rule,
            **KL,
        }
        for level in ("token", "sequence", "geometric")
        for action in ("truncate", "mask")
    },
    "correction: veto": lambda seed: {"correction": {"veto": [0.5, 2.0]}},
    "correction: off_policy": lambda seed: {"correction": {"off_policy": 0.05}},
    "correction: bypass, mask": lambda seed: {"correction": {**MASK, "bypass": True}},
    **{
        f"kl: {estimator} in {where}": lambda seed, kl={"estimator": estimator, "in": where}: {
            "kl": kl,
            **KL,
        }
        for estimator in ("k1", "k2", "k3", "k3+", "low_var_kl")
        for where in ("loss", "reward")
    },
    **{
        f"kl: {estimator}, unbiased": lambda seed, kl={"estimator": estimator, "unbiased": True}: {
            "kl": kl,
            **KL,
        }
        for estimator in ("k1", "k3")
    },
    "kl_coef: adaptive": lambda seed: {"kl_coef": {"start": 0.1, "target": 0.05, "horizon": 100.0}},
    "entropy_coef": lambda seed: {"entropy_coef": 0.02},
    "entropy_coef: adaptive": lambda seed: {"entropy_coef": {"target": 1.5}},
    "top_entropy_quantile": lambda seed: {"top_entropy_quantile": 0.4},
    "perception": lambda seed: {
        "perception": {"coef": 0.02, "entropy": (0.03, 0.0)[seed % 2]},
        "aggregation": AGGREGATIONS[seed % 5],
    },
    "streams: rl, ref_kl, ce": lambda seed: {"aggregation": AGGREGATIONS[seed % 5], **KL},
}


def offered() -> set[str]:
    """What the settings offer, by the names of ``LOSSES``."""
    assert set(Correction.model_fields) == {
        "level",
        "action",
        "low",
        "high",
        "veto",
        "off_policy",
        "bypass",
    }
    assert set(Perception.model_fields) == {"coef", "entropy"}
    assert set(KlTerm.model_fields) == {"estimator", "where", "unbiased"}
    levels, actions = (
        TypeAdapter(Correction).json_schema()["properties"][name]["enum"]
        for name in ("level", "action")
    )
    places = TypeAdapter(KlTerm).json_schema()["properties"]["in"]["enum"]
    chosen = [
        name
        for one in members(LossSettings.model_fields["correction"].annotation)
        for name in get_args(one)
    ]
    return {
        *(
            f"kind: {loss.model_fields['kind'].default}"
            for loss in models(LossChoice)
            if loss is not CustomLoss
        ),
        *(
            f"aggregation: {how}"
            for one in members(Aggregation)
            for how in get_args(one) or (50.0,)
        ),
        *(f"correction: {name}" for name in chosen),
        *(f"correction: {level}, {action}" for level in levels for action in actions),
        *(f"kl: {estimator} in {where}" for estimator in get_args(Estimator) for where in places),
        f"streams: {', '.join(STREAMS)}",
    }


def test_every_entry_of_the_menu_has_an_oracle() -> None:
    assert offered() - set(LOSSES) == set()
    (kinds,) = members(AdvantageChoice.model_fields["kind"].annotation)
    assert set(get_args(kinds)) == {
        *advantage_oracle.PER_GROUP,
        *advantage_oracle.OVER_STEP,
        "permuted",
    }
    assert [field.name for field in fields(Streams)] == list(STREAMS)


# Losses -------------------------------------------------------------------------------------------


def random_update(seed: int, dtype: torch.dtype, *, streams: bool) -> Values:
    """Log-probs, advantages and entropies [N] of an update; one trajectory in four has an advantage
    of 0.
    """
    generator = torch.Generator().manual_seed(seed)
    trajectory_ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    noise = torch.randn(6, len(trajectory_ids), generator=generator, dtype=torch.float64)
    old_logprobs = -3 * torch.rand(len(trajectory_ids), generator=generator, dtype=torch.float64)
    advantage = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64)
    advantage[::4] = 0
    per_turn = advantage[trajectory_ids] + 0.5 * (torch.arange(len(trajectory_ids)) % 2) * (
        trajectory_ids % 2
    )
    values = {
        "old_logprobs": old_logprobs,
        "logprobs": old_logprobs + 0.4 * noise[0],
        "rollout_logprobs": old_logprobs + 0.4 * noise[1],
        "ref_logprobs": old_logprobs + 1.2 * noise[2],
        "entropy": (2 * noise[3].abs()).round(decimals=1) + 0.1,
        "advantage": per_turn,
        "masked_logprobs": (old_logprobs + 1.5 * noise[5]).masked_fill(
            trajectory_ids == 3, math.nan
        ),
    }
    weights = WEIGHTS if streams else (Streams(),) * len(LENGTHS)
    values |= {
        name: torch.tensor([getattr(one, name) for one in weights], dtype=torch.float64)[
            trajectory_ids
        ]
        for name in STREAMS
    }
    whole = torch.tensor(
        [sum(n for n, g in zip(LENGTHS, GROUPS, strict=True) if g == group) for group in GROUPS]
    )
    lengths = torch.bincount(trajectory_ids)[trajectory_ids]
    return {name: value.to(dtype) for name, value in values.items()} | {
        "trajectory_ids": trajectory_ids,
        "group_tokens": whole[trajectory_ids],
        "trajectory_tokens": lengths,
    }


def with_chosen(values: Values, settings: LossSettings) -> Values:
    """With the tokens of ``top_entropy_quantile``, as the trainer finds them over an update."""
    if settings.top_entropy_quantile == 1:
        return values
    learning = values["entropy"][values["rl"] != 0]
    return values | {
        "chosen": values["entropy"] >= entropy_bound(learning, settings.top_entropy_quantile)
    }


def denominators(values: Values) -> dict[str, Denominator]:
    """As the trainer counts them, over all trajectories."""
    samples = []
    for number in range(len(LENGTHS)):
        here = (values["trajectory_ids"] == number).nonzero()[:, 0]
        streams = Streams(*(float(values[name][here[0]]) for name in STREAMS))
        group_tokens = int(values["group_tokens"][here[0]])
        samples.append(
            SimpleNamespace(predict=here, streams=streams, group_tokens=group_tokens, share=1.0)
        )
    return count_denominators(samples, 1, torch.device("cpu"))  # type: ignore[arg-type]


def ours(
    values: Values, loss: PolicyLoss, settings: LossSettings, update: dict[str, Denominator]
) -> tuple[float, Tensor]:
    """The trainer's loss of these tokens, and the gradient of their log-probs and entropies [2, N]."""
    logprobs, entropy = (values[name].clone().requires_grad_() for name in ("logprobs", "entropy"))
    engine: Any = SimpleNamespace(
        _scorer=lambda batch, entropy: (logprobs, batch.entropies),
        _policy_loss=loss,
        _loss_settings=settings,
        recorder=SimpleNamespace(on=False),
    )
    values = dict(values)
    if settings.perception is None:
        values.pop("masked_logprobs")
    batch: Any = SimpleNamespace(
        **{"chosen": None, "elsewhere": None, "masked_logprobs": None}
        | {name: of for name, of in values.items() if name not in ("logprobs", "entropy")},
        entropies=entropy,
        on_policy=torch.zeros(len(logprobs), dtype=torch.bool),
        lag=torch.zeros(len(logprobs), dtype=torch.int64),
    )
    total, *_ = FsdpEngine._loss(engine, batch, update)
    gradients = torch.autograd.grad(total, (logprobs, entropy), allow_unused=True)
    return (
        total.item(),
        torch.stack([torch.zeros_like(logprobs) if g is None else g for g in gradients]).double(),
    )


def theirs(values: Values, given: Settings) -> tuple[float, Tensor]:
    logprobs, entropy = (values[name].double().requires_grad_() for name in ("logprobs", "entropy"))
    rows = []
    for number, group in enumerate(GROUPS):
        here = (values["trajectory_ids"] == number).nonzero()[:, 0].tolist()
        old_logprobs, rollout_logprobs, ref_logprobs = (
            [values[n][i].double() for i in here]
            for n in ("old_logprobs", "rollout_logprobs", "ref_logprobs")
        )
        rows.append(
            oracle.One(
                [logprobs[i] for i in here],
                old_logprobs,
                rollout_logprobs,
                ref_logprobs,
                [entropy[i] for i in here],
                [values["masked_logprobs"][i].double() for i in here],
                [float(values["advantage"][i]) for i in here],
                group,
                *(float(values[n][here[0]]) for n in STREAMS),
            )
        )
    names = {"kl": "kl_term", "perception": "perception_term"}
    total = oracle.update(rows, **{names.get(key, key): value for key, value in given.items()})
    gradients = torch.autograd.grad(total, (logprobs, entropy), allow_unused=True)
    return total.item(), torch.stack(
        [torch.zeros_like(logprobs) if g is None else g for g in gradients]
    )


def after_some_steps(loss: PolicyLoss, given: Settings, seed: int) -> Settings:
    """Adapts the coefficients over steps, and returns the settings with the numbers that the oracle
    has for them.
    """
    steps = [(random.Random(seed + i).uniform(0.0, 0.2), 4 + i) for i in range(5)]
    for measured, n in steps:
        loss.coefficients.after({"kl": measured, "entropy": 10 * measured}, n)
    if isinstance(rule := given.get("kl_coef"), dict):
        return given | {
            "kl_coef": oracle.adaptive_kl(rule["start"], rule["target"], rule["horizon"], steps)
        }
    if isinstance(rule := given.get("entropy_coef"), dict):
        applied = oracle.adaptive_entropy(
            0.0, rule["target"], 0.005, [10 * measured for measured, _ in steps]
        )
        return given | {"entropy_coef": applied}
    return given


@dataclass
class Row:
    """The largest differences of one entry, by type: of values and of gradients, relative where
    they are above 1.
    """

    values: dict[torch.dtype, float]
    gradients: dict[torch.dtype, float]
    packing: float = 0.0
    found: list[float] = field(default_factory=list)


TYPES = (torch.float64, torch.float32, torch.bfloat16)


def built(given: Settings) -> LossSettings:
    return TypeAdapter(LossChoice).validate_python(given)  # type: ignore[arg-type]


def measured(name: str) -> Row:
    row = Row(dict.fromkeys(TYPES, 0.0), dict.fromkeys(TYPES, 0.0))
    for seed in range(SEEDS):
        given = LOSSES[name](seed)
        settings = built(given)
        loss = PolicyLoss(settings)
        expected_by = after_some_steps(loss, given, seed)
        for dtype in TYPES if seed < 3 else TYPES[:1]:
            tokens = with_chosen(
                random_update(seed, dtype, streams=name.startswith("streams")), settings
            )
            update = denominators(tokens)
            value, gradient = ours(tokens, loss, settings, update)
            expected, pull = theirs(tokens, expected_by)
            row.values[dtype] = max(
                row.values[dtype], abs(value - expected) / max(1.0, abs(expected))
            )
            row.gradients[dtype] = max(
                row.gradients[dtype],
                ((gradient - pull).abs() / pull.abs().clamp(min=1.0)).max().item(),
            )
            if dtype == torch.float64:
                row.found += [value, gradient.abs().sum().item()]
            if dtype == torch.float64 and seed < 2:
                row.packing = max(
                    row.packing, apart(tokens, loss, settings, update, value, gradient)
                )
    return row


def apart(
    tokens: Values,
    loss: PolicyLoss,
    settings: LossSettings,
    update: dict[str, Denominator],
    whole: float,
    pull: Tensor,
) -> float:
    """How far the sum over micro-batches of one or two trajectories, of any ranks, is from the
    whole.
    """
    total, furthest = 0.0, 0.0
    for numbers in ((6, 0), (3,), (5, 1), (4,), (2,)):
        here = torch.cat(
            [(tokens["trajectory_ids"] == number).nonzero()[:, 0] for number in numbers]
        )
        part = {name: value[here] for name, value in tokens.items()}
        part["trajectory_ids"] = torch.cat(
            [torch.full((LENGTHS[n],), i) for i, n in enumerate(numbers)]
        )
        value, gradient = ours(part, loss, settings, update)
        total += value
        furthest = max(furthest, (gradient - pull[:, here]).abs().max().item())
    return max(furthest, abs(total - whole))


@pytest.fixture(scope="module")
def _alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# Advantages ---------------------------------------------------------------------------------------


def random_step(seed: int) -> list[list[advantage_oracle.One]]:
    """Groups of 2 to 6 trajectories of 1 to 5 turns, of which many saw the same; one group has
    equal rewards and components.
    """
    chance, step = random.Random(seed), []
    for number in range(4):
        group = []
        for _ in range(chance.randint(2, 6)):
            reward, n = (
                (0.5, 2)
                if number == 3
                else (chance.randint(0, 8) / 4 + chance.random() * (seed % 2), chance.randint(1, 5))
            )
            components = (
                {"iou": 0.5, "format": 1.0}
                if number == 3
                else {"iou": chance.random(), "format": float(chance.randint(0, 1))}
            )
            paid = [0.0 if seed % 3 == 0 else chance.random() for _ in range(n)]
            states = ["start", *(f"screen {chance.randint(0, 2)}" for _ in range(n - 1))]
            group.append(advantage_oracle.One(reward, components, paid, states))
        step.append(group)
    return step


def product_group(number: int, group: Sequence[advantage_oracle.One]) -> Group:
    made: list[Member] = [
        make_member(
            TrajectoryId(number, i),
            Scored(one.reward, one.components),
            turns=len(one.states),
            turn_rewards=tuple(one.turn_rewards),
            states=tuple(one.states),
        )
        for i, one in enumerate(group)
    ]
    return Group(number, Task("task", ()), tuple(made))


def flat(step: Iterable[Iterable[float | Sequence[float]]]) -> list[float]:
    return [
        v
        for group in step
        for one in group
        for v in (one if isinstance(one, (list, tuple)) else [one])
    ]


def advantage_row(kind: str) -> Row:
    row = Row(dict.fromkeys(TYPES[:1], 0.0), {})
    for seed in range(SEEDS):
        step = random_step(seed) + ([[advantage_oracle.One(0.7)]] if kind == "raw" else [])
        choice = AdvantageChoice.model_validate(
            {"kind": kind, "with": {"weights": advantage_oracle.WEIGHTS} if kind == "gdpo" else {}}
        )
        how = build_advantage(choice)
        groups = over_step(
            [with_advantages(product_group(i, group), how) for i, group in enumerate(step)], how
        )
        credits = [[m.credit for m in group.members] for group in groups]
        assert all(credit is not None for group in credits for credit in group)
        found = [[list(c.turns) or c.advantage for c in group] for group in credits]  # type: ignore[union-attr]
        if kind == "permuted":  # whose order is its own
            found, expected = (
                [sorted(group) for group in each]
                for each in (found, map(advantage_oracle.grpo, step))
            )  # type: ignore[type-var, assignment]
        else:
            per_group = advantage_oracle.PER_GROUP.get(kind)
            expected = (
                [per_group(group) for group in step]
                if per_group
                else advantage_oracle.OVER_STEP[kind](step)
            )  # type: ignore[misc]
        pairs = zip(flat(found), flat(expected), strict=True)  # type: ignore[arg-type]
        row.values[torch.float64] = max(row.values[torch.float64], *(abs(a - b) for a, b in pairs))
    return row


# The table ----------------------------------------------------------------------------------------

BOUNDS = {torch.float64: (1e-6, 1e-6), torch.float32: (1e-6, 1e-6), torch.bfloat16: (0.05, 0.5)}
"""Of values and gradients.

The weights of tokens are float32; in bfloat16, which no trainer has, a token may pass a clip's
edge.
"""


SAME = {
    "`kl: k3 in loss`": "`aggregation: token-mean`",
    "`kl: k3+ in reward`": "`kl: k3 in reward`",
}
"""The same settings, and a difference of gradients alone where there is none.

All others do something of their own.
"""


def table(rows: dict[str, Row]) -> str:
    heads = [
        f"{what}, {str(dtype).removeprefix('torch.')}"
        for dtype in TYPES
        for what in ("value", "gradient")
    ]
    lines = [
        "| entry | " + " | ".join(heads) + " | packed or apart |",
        "|---" * (len(heads) + 2) + "|",
    ]
    for name, row in rows.items():
        cells = [
            f"{of[dtype]:.0e}" if dtype in of else ""
            for dtype in TYPES
            for of in (row.values, row.gradients)
        ]
        lines.append(
            f"| {name} | "
            + " | ".join(cells)
            + (f" | {row.packing:.0e} |" if row.gradients else " | |")
        )
    return "\n".join(lines) + "\n"


@pytest.mark.usefixtures("_alone")
def test_every_entry_is_its_papers(tmp_path: Path) -> None:
    rows = {f"`{name}`": measured(name) for name in LOSSES}
    rows |= {
        f"`advantage: {kind}`": advantage_row(kind)
        for kind in (*advantage_oracle.PER_GROUP, *advantage_oracle.OVER_STEP, "permuted")
    }
    file = tmp_path / "menu.md"
    file.write_text(table(rows), encoding="utf-8")
    print(f"\n{file.read_text(encoding='utf-8')}")
    losses = {name: tuple(row.found) for name, row in rows.items() if row.found}
    assert {
        name: key for name in losses for key in losses if key < name and losses[key] == losses[name]
    } == SAME
    for name, row in rows.items():
        for dtype, (value, gradient) in BOUNDS.items():
            assert row.values.get(dtype, 0.0) <= value, (name, dtype)
            assert row.gradients.get(dtype, 0.0) <= gradient, (name, dtype)
        assert row.packing <= 1e-12, name
        if name.startswith("`advantage"):
            assert row.values[torch.float64] <= 1e-12, name


# What the random updates do not reach -------------------------------------------------------------


def test_gspos_gradient_is_that_of_the_trajectorys_loss() -> None:
    """Equation 5, differentiated as a whole, against the product, which spreads it over tokens."""
    tokens = random_update(3, torch.float64, streams=False)
    logprobs = tokens["logprobs"].clone().requires_grad_()
    losses = []
    for number in range(len(LENGTHS)):
        here = (tokens["trajectory_ids"] == number).nonzero()[:, 0].tolist()
        c, o = ([values[i] for i in here] for values in (logprobs, tokens["old_logprobs"]))
        losses.append(oracle.gspo(c, o, 0.7, 0.2, 0.3))
    expected = torch.stack(losses).mean()
    settings = built({"kind": "gspo", "clip_low": 0.2, "clip_high": 0.3, "correction": "none"})
    update = {"rl": Denominator(sum(LENGTHS), len(LENGTHS), 3)}
    value, gradient = ours(
        tokens | {"advantage": torch.full_like(logprobs, 0.7)},
        PolicyLoss(settings),
        settings,
        update,
    )
    assert value == pytest.approx(expected.item(), abs=1e-6)
    torch.testing.assert_close(
        gradient[0], torch.autograd.grad(expected, logprobs)[0], atol=1e-7, rtol=1e-6
    )
