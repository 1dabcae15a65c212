"""Rules for the algorithm's vectors: the original's name and inputs become the options that express
it here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from rayloop.core.groups import Group, Scored
from rayloop.core.types import EndReason, Task, TrajectoryId
from rayloop.grpo.advantage import with_advantages
from rayloop.grpo.filters import (
    EqualRewards,
    Filter,
    ImagesConsistent,
    KeepEndReasons,
    MaxLength,
    PositiveNegativeAdvantage,
    ToolImage,
)
from rayloop.grpo.losses.policy import Denominator, token_weights
from rayloop.grpo.losses.settings import LossSettings, PpoLoss
from rayloop.grpo.replay import ReplayBuffer, ReplayRules
from rayloop.grpo.selection import apply_filters, select
from rayloop.grpo.settings import AdvantageSettings, FilteringSettings, ReplaySettings
from tests.support.losses import policy_loss
from tests.unit.groups import make_group, make_member
from tests.vector_rules.advantages import NUMBER, blocks_of, group_advantage, number
from tests.vector_rules.entries import Deviation, Entry, Rule, Unknown, refusals

# Filtering ----------------------------------------------------------------------------------------

END_REASONS = {
    "DONE": EndReason.DONE,
    "ERROR_IN_ACTION": EndReason.ACTION_ERROR,
    "OVER_LENGTH": EndReason.OVER_LENGTH,
    "EXCEED_MAX_TURNS": EndReason.MAX_TURNS,
    "EXCEED_MAX_IMAGE_NUM_32": EndReason.MAX_IMAGES,
    "ON_GOING": EndReason.ENVIRONMENT_FAILURE,
}
"""An episode that is going on is never scored here.

Environment failures, which the original has no word for, stand for it.
"""


def _end_reason(name: str) -> EndReason:
    if name not in END_REASONS:
        raise Unknown(f"end reason {name!r}")
    return END_REASONS[name]


def _filters(entry: Entry) -> list[Filter]:
    reserve = entry.inputs.get("reserve", ["DONE", "EXCEED_MAX_TURNS", "ERROR_IN_ACTION"])
    table: dict[str, Filter] = {
        "seq_reward": EqualRewards(),
        "hasimage": ToolImage(),
        "trajlength": MaxLength(),
        "vtoken_images_num_consis": ImagesConsistent(),
        "end_reason": KeepEndReasons(keep=tuple(map(_end_reason, reserve))),
        "pos_sample_neg_adv": PositiveNegativeAdvantage(),
    }
    if unknown := sorted(set(entry.need("filters")) - set(table)):
        raise Unknown(f"filters {unknown}")
    return [
        table[name]
        for name in entry.need("filters")
        if name != "end_reason" or name in entry.inputs
    ]


def partial_filtering(entry: Entry, file: Sequence[Entry]) -> list[int]:
    """Positions that survive, in order.

    A column that the entry leaves out lets its filter keep everything.
    """
    columns = ("end_reason", "hasimage", "trajlength", "vtoken_images_num_consis")
    entry.only("groups", "group_size", "rewards", "filters", "reserve", *columns)
    rewards, n = entry.need("rewards"), len(entry.need("rewards"))
    ends, images, lengths, consistent = (
        entry.inputs.get(name, [usual] * n)
        for name, usual in zip(columns, ("DONE", 1, 1, 1), strict=True)
    )
    settings = AdvantageSettings(normalize_std=False, min_group=1, singleton="raw")
    kept: list[int] = []
    for position, block in enumerate(blocks_of(entry, file)):
        members = tuple(
            make_member(
                TrajectoryId(position, i),
                Scored(rewards[i]),
                end_reason=_end_reason(ends[i]),
                observation_images=int(images[i]),
                length=lengths[i],
                images_consistent=bool(consistent[i]),
            )
            for i in block
        )
        group = apply_filters(
            with_advantages(Group(position, Task("t", ()), members), settings), _filters(entry)
        )
        kept += [member.summary.id.sample for member in group.kept]
    return sorted(kept)


def ranking(entry: Entry, file: Sequence[Entry]) -> list[int]:
    """The first trajectories by group std.

    Any order among equal stds is right: the original's sort is not stable.
    """
    entry.only("kept_idx", "std")
    indices, stds = (
        entry.need("kept_idx"),
        dict(zip(entry.need("kept_idx"), entry.need("std"), strict=True)),
    )
    target = int(number(r"top NUMBER", entry.reward, None) or len(entry.expected))
    groups: list[Group] = []
    for index in indices:
        member = make_member(TrajectoryId(0, index), Scored(0.0))
        if groups and groups[-1].std == stds[index]:
            groups[-1] = replace(groups[-1], members=(*groups[-1].members, member))
        else:
            groups.append(Group(len(groups), Task("t", ()), (member,), std=stds[index]))
    selection = select(groups, target, FilteringSettings())
    order = sorted(selection.train, key=lambda group: (-group.std, group.number))
    chosen = [member.summary.id.sample for group in order for member in group.kept]
    distinct = len(set(entry.expected)) == len(entry.expected) and set(entry.expected) <= set(stds)
    if distinct and [stds[i] for i in entry.expected] == [stds[i] for i in chosen]:
        return list(entry.expected)
    return chosen


# Replay -------------------------------------------------------------------------------------------


def _step_number(entry: Entry) -> int:
    return int(re.sub(r"\D", "", entry.need("step")))


def _stored_before(entry: Entry, file: Sequence[Entry]) -> list[str]:
    """The buffer's names before this step: what the preceding step left, else what this one's
    outcome implies.
    """
    if _step_number(entry) == 1:
        return []
    for other in file:
        if other.reward == entry.reward and _step_number(other) == _step_number(entry) - 1:
            return list(other.expected["buffer_after"])
    own = f"{entry.need('step')}_"
    implied = [name for name in entry.expected["buffer_after"] if not name.startswith(own)]
    injected = entry.expected["batch_after"][0]
    return implied if injected.startswith(own) or injected in implied else [injected, *implied]


SINGLE_PRECISION = (
    "a result of exactly 0.1 is not above 0.1: the original rounds results to single precision"
    " first"
)
ON_THE_LIMIT = (
    "a std of exactly 0.05 or a mean of exactly 0.2 is not below it: the original rounds results"
    " first"
)


def replay_step(entry: Entry, file: Sequence[Entry]) -> Deviation:
    entry.only("step", "evals")
    capacity = int(number(r"buffer NUMBER", entry.reward, 8) or 8)
    rules = ReplayRules(capacity=capacity)
    evals = entry.need("evals")
    exact, rounded = (
        [Fraction(str(value)) for value in evals],
        np.array(evals, dtype=np.float32).astype(float),
    )
    mean = sum(exact) / len(exact)
    below = {
        "max_std": (
            sum((value - mean) ** 2 for value in exact) / len(exact) < Fraction(1, 400),
            rounded.std() < 0.05,
        ),
        "max_mean": (mean < Fraction(1, 5), rounded.mean() < 0.2),
    }
    changes: dict[str, float] = {"success_above": 0.0999999}
    for name, (here, there) in below.items():
        changes[name] = getattr(rules, name) + 1e-6 * (int(there) - int(here))
    conditions = {
        SINGLE_PRECISION: 0.1 in evals,
        ON_THE_LIMIT: any(here != there for here, there in below.values()),
    }
    why = "; ".join(reason for reason, holds in conditions.items() if holds)
    fresh = [
        f"{entry.need('step')}_{i}" for i, value in enumerate(exact) if value > Fraction(1, 10)
    ]
    return Deviation(
        _replayed(entry, file, rules),
        why,
        _replayed(entry, file, replace(rules, **changes)),
        {"buffer_after": [*_stored_before(entry, file), *fresh][-capacity:]},
    )


def _replayed(entry: Entry, file: Sequence[Entry], rules: ReplayRules) -> dict[str, list[str]]:
    """One visit of a task.

    Which stored sample is injected is random, so any sample that was stored is right.
    """
    buffer = ReplayBuffer(ReplaySettings(kind="corrected"), seed=0, rules=rules)
    names: dict[TrajectoryId, str] = {}
    before = _stored_before(entry, file)
    for i, name in enumerate(before):
        stored = make_group(i, [1.0])
        names[stored.members[0].summary.id] = name
        buffer.store(stored)
    group = make_group(len(before), entry.need("evals"))
    names |= {
        member.summary.id: f"{entry.need('step')}_{i}" for i, member in enumerate(group.members)
    }
    batch = [names[member.summary.id] for member in buffer.inject(group).group.members]
    buffer.store(group)
    expected_first = entry.expected["batch_after"][0]
    if batch[0] in before and expected_first in before:
        batch[0] = expected_first
    stored_after = buffer.state().get("task", ())
    return {
        "batch_after": batch,
        "buffer_after": [names[member.summary.id] for member in stored_after],
    }


# Loss ---------------------------------------------------------------------------------------------


def _aggregation(name: str, row_length: int) -> LossSettings:
    found = re.search(r"(?:seq-mean-)?token-(?:mean|sum-norm|sum)", name)
    if not found:
        raise Unknown("the name gives no aggregation")
    mode = found[0]
    return PpoLoss.model_validate({"aggregation": row_length if mode.endswith("norm") else mode})


def _rows(
    values: Any, mask: Any | None, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """A list, or rows of lists, as a table [rows, padded length]; and which of its tokens count
    (bool, the same shape).
    """
    table = torch.tensor(values, dtype=dtype)
    table = table.unsqueeze(0) if table.dim() == 1 else table
    where = (
        torch.ones_like(table)
        if mask is None
        else torch.tensor(mask, dtype=dtype).reshape(table.shape)
    )
    return table, where > 0


def _segments(where: torch.Tensor) -> torch.Tensor:
    """The row of each token that counts."""
    return torch.arange(len(where)).unsqueeze(1).expand_as(where)[where]


EMPTY_ROW = (
    "a trajectory without loss tokens adds nothing to the mean over all; the original divides its 0"
    " by 0"
)
NOTHING_TO_AVERAGE = "an update without a single loss token is refused; the original calls it 0"


def agg_loss(entry: Entry, file: Sequence[Entry]) -> Any:
    entry.only("loss", "mask")
    table, where = _rows(entry.need("loss"), entry.inputs.get("mask"))
    settings = _aggregation(entry.reward, table.shape[1])
    if not where.any():
        return Deviation(
            _refused_update(settings), NOTHING_TO_AVERAGE, instead={"raises": "no loss tokens"}
        )
    weights = token_weights(_segments(where), settings, Denominator(int(where.sum()), len(table)))
    got = float((weights * table[where]).sum())
    if settings.aggregation != "seq-mean-token-mean" or where.any(dim=1).all():
        return got
    rows = [
        float(row[counts].mean()) for row, counts in zip(table, where, strict=True) if counts.any()
    ]
    return Deviation(got, EMPTY_ROW, instead=sum(rows) / len(table))


def _refused_update(settings: LossSettings) -> Any:
    try:
        return token_weights(
            torch.zeros(0, dtype=torch.int64), settings, Denominator(0, 1)
        ).tolist()
    except ValueError as error:
        return {"raises": str(error)}


def _per_token(advantage: Any, table: torch.Tensor) -> torch.Tensor:
    """The advantages [rows, padded length]: of one number, one per row, or one per token."""
    values = torch.as_tensor(advantage, dtype=table.dtype)
    if values.dim() == 1 and len(table) > 1:
        values = values.unsqueeze(1)
    return values.broadcast_to(table.shape)


def policy_gradient(entry: Entry, file: Sequence[Entry]) -> dict[str, float]:
    """verl counts both clips of the first bound in one fraction (clipfrac, clip_hi), the dual clip
    in the other.

    Single precision, as in the original and in our trainer: exp(log(3)) in double precision is
    above 3.
    """
    entry.only("ratios", "advantage", "mask", "clip_low", "clip_high", "dual_clip")
    name = entry.reward
    options = {
        "clip_low": number(r"clip NUMBER/", name, 0.2),
        "clip_high": number(rf"clip {NUMBER[1:-1]}/NUMBER", name, 0.2),
        "dual_clip": number(r"dual(?: clip)? NUMBER", name, None),
    }
    options |= {option: value for option, value in entry.inputs.items() if option in options}
    table, where = _rows(entry.need("ratios"), entry.inputs.get("mask"), torch.float32)
    advantage = _per_token(entry.need("advantage"), table)[where]
    settings = PpoLoss.model_validate(
        _aggregation(name, table.shape[1]).model_dump() | options | {"correction": "none"}
    )
    logprobs = table[where].log()
    old_logprobs = torch.zeros_like(logprobs)
    with refusals():
        result = policy_loss(logprobs, old_logprobs, old_logprobs, advantage, settings)
        weights = token_weights(_segments(where), settings, Denominator(len(logprobs), len(table)))
    metrics = result.metrics.finalize()
    clipped, dual = metrics["clip_low"] + metrics["clip_high"], metrics["clip_dual"]
    return {
        "pg_loss": float((weights * result.loss).sum()),
        "clip_hi": clipped,
        "clip_lo": dual,
        "clipfrac": clipped,
        "clipfrac_lower": dual,
        "ppo_kl": float(-logprobs.mean()),
    }


LOW_VAR_KL = PpoLoss(kl_coef=1.0, kl="low_var_kl")
NOT_CAPPED = (
    "the estimate of one token is bounded by its log-ratio alone, 10 nats below the reference; kl:"
    " low_var_kl is verl's"
)


def low_var_kl(entry: Entry, file: Sequence[Entry]) -> Any:
    entry.only("logp", "ref_logp")
    logprobs, ref_logprobs = (
        torch.tensor(entry.need(name), dtype=torch.float64) for name in ("logp", "ref_logp")
    )
    default = _kl_term(logprobs, ref_logprobs, PpoLoss(kl_coef=1.0)).tolist()
    original = _kl_term(logprobs, ref_logprobs, LOW_VAR_KL).tolist()
    d = ref_logprobs - logprobs
    bounded = d.clamp(max=10)
    by_hand = bounded.exp() - bounded - 1
    beyond = bool(((d.abs() > 10) | (by_hand > 10)).any())
    return Deviation(default, NOT_CAPPED if beyond else "", original, by_hand.tolist())


def _kl_term(
    logprobs: torch.Tensor, ref_logprobs: torch.Tensor, settings: LossSettings
) -> torch.Tensor:
    """What the loss adds per token where the advantage is 0."""
    shape, logprobs, ref_logprobs = logprobs.shape, logprobs.reshape(-1), ref_logprobs.reshape(-1)
    nothing = torch.zeros_like(logprobs)
    return policy_loss(
        logprobs, logprobs, logprobs, nothing, settings, ref_logprobs=ref_logprobs
    ).loss.reshape(shape)


RULES: dict[str, Rule] = {
    r"partial dynamic filtering": partial_filtering,
    r"^ranking": ranking,
    r"^replay step": replay_step,
    r"agg_loss": agg_loss,
    r"policy_loss": policy_gradient,
    r"low_var_kl": low_var_kl,
    r"advantage": group_advantage,
}
"""Patterns searched in the entry's name; the first that is found decides."""
