"""Rules for the algorithm's vectors: the original's name and inputs become the options that express it here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rayloop.core.types import EndReason, Group, Scored, Task, TrajectoryId
from rayloop.grpo.advantage import advantages, with_advantages
from rayloop.grpo.filtering import apply_filters, select
from rayloop.grpo.loss import Denominator, policy_loss, token_weights
from rayloop.grpo.replay import ReplayBuffer
from rayloop.grpo.settings import (
    AdvantageSettings,
    EqualRewards,
    Filter,
    FilteringSettings,
    ImagesConsistent,
    KeepEndReasons,
    LossSettings,
    MaxLength,
    PositiveNegativeAdvantage,
    ReplaySettings,
    ToolImage,
)
from tests.unit.groups import make_group, make_member
from tests.vector_rules.entries import Deviation, Entry, Rule, Unknown

NUMBER = r"(\d*\.?\d+(?:e-?\d+)?)"
VERL_GROUP_SIZE = 4
"""Size of the groups of flat reward lists that do not say it."""


def _number(pattern: str, name: str, otherwise: float | None) -> float | None:
    found = re.search(pattern.replace("NUMBER", NUMBER), name)
    return float(found[1]) if found else otherwise


# Advantages --------------------------------------------------------------------------------------------------------


def _advantage_settings(entry: Entry) -> AdvantageSettings:
    """verl's GRPO unless the name says otherwise; only verl's newer code takes a lone sample's reward as it is."""
    name, inputs = entry.reward, entry.inputs
    floor = _number(r"max\(\s*NUMBER", name, None)
    eps = _number(r"(?:eps\s*=?\s*|std\s*\+\s*)NUMBER", name, 1e-6 if floor is None else 0.0)
    return AdvantageSettings(
        normalize_std=inputs.get("norm_by_std", not re.search(r"no std|without std|dr\.?\s?grpo", name, re.I)),
        eps=inputs.get("eps", eps),
        std="population" if "population" in name else "unbiased",
        std_floor=floor or 0.0,
        baseline="binarised" if re.search(r"anb|binari[sz]ed", name) else "mean",
        singleton="error" if "arpo" in entry.recipe else "raw",
    )


def _blocks(entry: Entry, file: Sequence[Entry]) -> list[list[int]]:
    """Positions of each group in a flat reward list: by label, else as another entry groups the same rewards."""
    rewards = entry.need("rewards")
    same = [other for other in file if other.inputs.get("rewards") == rewards and "groups" in other.inputs]
    labels = entry.inputs.get("groups") or (same[0].inputs["groups"] if same else None)
    if labels is None:
        size = entry.inputs.get("group_size", VERL_GROUP_SIZE)
        labels = [i // size for i in range(len(rewards))]
    if len(labels) != len(rewards):
        raise Unknown(f"{len(labels)} group labels for {len(rewards)} rewards")
    return [[i for i, label in enumerate(labels) if label == each] for each in dict.fromkeys(labels)]


def group_advantage(entry: Entry, file: Sequence[Entry]) -> Any:
    """Advantages of one group (``group_rewards``) or of several in a flat list (``rewards``)."""
    entry.only("group_rewards", "rewards", "groups", "group_size", "norm_by_std", "eps")
    settings = _advantage_settings(entry)
    if "group_rewards" in entry.inputs:
        result = advantages(entry.need("group_rewards"), settings)
        values, std = list(result.values), result.std
        answer = {"advantages": values, "adv": values, "std": std, "group_std_unbiased": std, "mean": result.mean}
    else:
        rewards = entry.need("rewards")
        values, stds = [0.0] * len(rewards), [0.0] * len(rewards)
        for block in _blocks(entry, file):
            result = advantages([rewards[i] for i in block], settings)
            for i, value in zip(block, result.values, strict=True):
                values[i], stds[i] = value, result.std
        answer = {"advantages": values, "adv": values, "std": stds, "group_std_unbiased": stds}
    return answer if isinstance(entry.expected, Mapping) else values


# Filtering ---------------------------------------------------------------------------------------------------------

END_REASONS = {
    "DONE": EndReason.DONE,
    "ERROR_IN_ACTION": EndReason.ACTION_ERROR,
    "OVER_LENGTH": EndReason.OVER_LENGTH,
    "EXCEED_MAX_TURNS": EndReason.MAX_TURNS,
    "EXCEED_MAX_IMAGE_NUM_32": EndReason.MAX_IMAGES,
}


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
    return [table[name] for name in entry.need("filters")]


def partial_filtering(entry: Entry, file: Sequence[Entry]) -> list[int]:
    """Positions that survive, in order. A column that the entry leaves out lets its filter keep everything."""
    columns = ("end_reason", "hasimage", "trajlength", "vtoken_images_num_consis")
    entry.only("groups", "group_size", "rewards", "filters", "reserve", *columns)
    rewards, n = entry.need("rewards"), len(entry.need("rewards"))
    ends, images, lengths, consistent = (
        entry.inputs.get(name, [usual] * n) for name, usual in zip(columns, ("DONE", 1, 1, 1), strict=True)
    )
    settings = AdvantageSettings(normalize_std=False, min_group=1, singleton="raw")
    kept: list[int] = []
    for issue, block in enumerate(_blocks(entry, file)):
        members = tuple(
            make_member(
                TrajectoryId(issue, i),
                Scored(rewards[i]),
                end_reason=_end_reason(ends[i]),
                observation_images=int(images[i]),
                length=lengths[i],
                images_consistent=bool(consistent[i]),
            )
            for i in block
        )
        group = apply_filters(with_advantages(Group(issue, Task("t", ()), members), settings), _filters(entry))
        kept += [member.summary.id.sample for member in group.kept]
    return sorted(kept)


def ranking(entry: Entry, file: Sequence[Entry]) -> list[int]:
    """The first trajectories by group std. Any order among equal stds is right: the original's sort is not stable."""
    entry.only("kept_idx", "std")
    indices, stds = entry.need("kept_idx"), dict(zip(entry.need("kept_idx"), entry.need("std"), strict=True))
    target = int(_number(r"top NUMBER", entry.reward, None) or len(entry.expected))
    groups: list[Group] = []
    for index in indices:
        member = make_member(TrajectoryId(0, index), Scored(0.0))
        if groups and groups[-1].std == stds[index]:
            groups[-1] = replace(groups[-1], members=(*groups[-1].members, member))
        else:
            groups.append(Group(len(groups), Task("t", ()), (member,), std=stds[index]))
    selection = select(groups, target, FilteringSettings())
    order = sorted(selection.train, key=lambda group: (-group.std, group.issue))
    chosen = [member.summary.id.sample for group in order for member in group.kept]
    distinct = len(set(entry.expected)) == len(entry.expected) and set(entry.expected) <= set(stds)
    if distinct and [stds[i] for i in entry.expected] == [stds[i] for i in chosen]:
        return list(entry.expected)
    return chosen


# Replay ------------------------------------------------------------------------------------------------------------


def _step_number(entry: Entry) -> int:
    return int(re.sub(r"\D", "", entry.need("step")))


def _stored_before(entry: Entry, file: Sequence[Entry]) -> list[str]:
    """The buffer's names before this step: what the preceding step left, else what this one's outcome implies."""
    if _step_number(entry) == 1:
        return []
    for other in file:
        if other.reward == entry.reward and _step_number(other) == _step_number(entry) - 1:
            return list(other.expected["buffer_after"])
    own = f"{entry.need('step')}_"
    implied = [name for name in entry.expected["buffer_after"] if not name.startswith(own)]
    injected = entry.expected["batch_after"][0]
    return implied if injected.startswith(own) or injected in implied else [injected, *implied]


SINGLE_PRECISION = "a result of exactly 0.1 is not above 0.1: the original rounds results to single precision first"


def replay_step(entry: Entry, file: Sequence[Entry]) -> Deviation:
    entry.only("step", "evals")
    capacity = int(_number(r"buffer NUMBER", entry.reward, 8) or 8)
    settings = ReplaySettings(enabled=True, capacity=capacity)
    original = settings.model_copy(update={"success_above": 0.0999999})
    why = SINGLE_PRECISION if 0.1 in entry.need("evals") else ""
    return Deviation(_replayed(entry, file, settings), why, _replayed(entry, file, original))


def _replayed(entry: Entry, file: Sequence[Entry], settings: ReplaySettings) -> dict[str, list[str]]:
    """One visit of a task. Which stored sample is injected is random, so any sample that was stored is right."""
    buffer = ReplayBuffer(settings, seed=0)
    names: dict[TrajectoryId, str] = {}
    before = _stored_before(entry, file)
    for i, name in enumerate(before):
        stored = make_group(i, [1.0])
        names[stored.members[0].summary.id] = name
        buffer.store(stored)
    group = make_group(len(before), entry.need("evals"))
    names |= {member.summary.id: f"{entry.need('step')}_{i}" for i, member in enumerate(group.members)}
    batch = [names[member.summary.id] for member in buffer.inject(group, step=0).group.members]
    buffer.store(group)
    expected_first = entry.expected["batch_after"][0]
    if batch[0] in before and expected_first in before:
        batch[0] = expected_first
    stored_after = buffer.state().get("task", ())
    return {"batch_after": batch, "buffer_after": [names[member.summary.id] for member in stored_after]}


# Loss --------------------------------------------------------------------------------------------------------------


def _aggregation(name: str, row_length: int) -> LossSettings:
    found = re.search(r"(?:seq-mean-)?token-(?:mean|sum-norm|sum)", name)
    if not found:
        raise Unknown("the name gives no aggregation")
    mode = found[0]
    return LossSettings(aggregation=mode, norm_length=row_length if mode.endswith("norm") else None)


def _rows(values: Any, mask: Any | None) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Flat loss tokens [N], their row [N], the number of rows and their padded length, from a list or rows of lists."""
    table = torch.tensor(values, dtype=torch.float64)
    table = table.unsqueeze(0) if table.dim() == 1 else table
    where = torch.ones_like(table) if mask is None else torch.tensor(mask, dtype=torch.float64).reshape(table.shape)
    segment = torch.arange(len(table)).unsqueeze(1).expand_as(table)
    return table[where > 0], segment[where > 0], table.shape[0], table.shape[1]


def agg_loss(entry: Entry, file: Sequence[Entry]) -> float:
    entry.only("loss", "mask")
    loss, segment, rows, length = _rows(entry.need("loss"), entry.inputs.get("mask"))
    weights = token_weights(segment, _aggregation(entry.reward, length), Denominator(len(loss), rows))
    return float((weights * loss).sum())


def policy_gradient(entry: Entry, file: Sequence[Entry]) -> dict[str, float]:
    """verl counts both clips of the first bound in one fraction (clipfrac, clip_hi), the dual clip in the other."""
    entry.only("ratios", "advantage", "mask", "clip_low", "clip_high", "dual_clip")
    name = entry.reward
    options = {
        "clip_low": _number(r"clip NUMBER/", name, 0.2),
        "clip_high": _number(rf"clip {NUMBER[1:-1]}/NUMBER", name, 0.2),
        "dual_clip": _number(r"dual(?: clip)? NUMBER", name, None),
    }
    options |= {option: value for option, value in entry.inputs.items() if option in options}
    ratios, segment, rows, length = _rows(entry.need("ratios"), entry.inputs.get("mask"))
    advantage = torch.as_tensor(entry.need("advantage"), dtype=torch.float64).reshape(-1)
    settings = LossSettings.model_validate(_aggregation(name, length).model_dump() | options | {"correction": "none"})
    old = torch.zeros_like(ratios)
    result = policy_loss(ratios.log(), old, old, advantage.expand_as(ratios), settings)
    weights = token_weights(segment, settings, Denominator(len(ratios), rows))
    metrics = result.metrics.finalize()
    clipped, dual = metrics["clip_low"] + metrics["clip_high"], metrics["clip_dual"]
    return {
        "pg_loss": float((weights * result.loss).sum()),
        "clip_hi": clipped,
        "clip_lo": dual,
        "clipfrac": clipped,
        "clipfrac_lower": dual,
        "ppo_kl": float(-ratios.log().mean()),
    }


LOW_VAR_KL = LossSettings(kl_coef=1.0, kl_bound=20.0, kl_cap=10.0)
NOT_CAPPED = (
    "the estimate of one token is bounded by its log-ratio alone, ±10; kl_cap: 10 and kl_bound: 20 are verl's bounds"
)


def low_var_kl(entry: Entry, file: Sequence[Entry]) -> Any:
    entry.only("logp", "ref_logp")
    current, reference = (torch.tensor(entry.need(name), dtype=torch.float64) for name in ("logp", "ref_logp"))
    default = _kl_term(current, reference, LossSettings(kl_coef=1.0))
    original = _kl_term(current, reference, LOW_VAR_KL)
    return Deviation(default.tolist(), NOT_CAPPED if not default.equal(original) else "", original.tolist())


def _kl_term(current: torch.Tensor, reference: torch.Tensor, settings: LossSettings) -> torch.Tensor:
    """What the loss adds per token where the advantage is 0."""
    shape, current, reference = current.shape, current.reshape(-1), reference.reshape(-1)
    nothing = torch.zeros_like(current)
    return policy_loss(current, current, current, nothing, settings, reference=reference).loss.reshape(shape)


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
