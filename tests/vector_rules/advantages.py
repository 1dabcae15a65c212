"""The rule for the advantages' vectors, and how a flat list of rewards is grouped."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rayloop.core.failures import ConfigError
from rayloop.grpo.advantage import advantages
from rayloop.grpo.settings import AdvantageSettings
from tests.vector_rules.entries import Deviation, Entry, Unknown, refusals

NUMBER = r"(\d*\.?\d+(?:e-?\d+)?)"
VERL_GROUP_SIZE = 4
"""Size of the groups of flat reward lists that do not say it."""


def number(pattern: str, name: str, otherwise: float | None) -> float | None:
    """The number that stands in an entry's name where the pattern says NUMBER."""
    found = re.search(pattern.replace("NUMBER", NUMBER), name)
    return float(found[1]) if found else otherwise


def _advantage_settings(entry: Entry) -> AdvantageSettings:
    """verl's GRPO unless the name says otherwise; only its newer code (Arc Vision, PyVision) takes
    a lone sample's reward.
    """
    name, inputs = entry.reward, entry.inputs
    floor = number(r"max\(\s*NUMBER", name, None)
    eps = number(r"(?:eps\s*=?\s*|std\s*\+\s*)NUMBER", name, 1e-6 if floor is None else 0.0)
    return AdvantageSettings(
        normalize_std=inputs.get(
            "norm_by_std", not re.search(r"no std|without std|dr\.?\s?grpo", name, re.I)
        ),
        eps=inputs.get("eps", eps),
        std="population" if "population" in name else "unbiased",
        std_floor=floor or 0.0,
        baseline="binarised" if re.search(r"anb|binari[sz]ed", name) else "mean",
        singleton="raw" if re.search("verl|pyvision|arc_vision", entry.recipe) else "error",
    )


def blocks_of(entry: Entry, file: Sequence[Entry]) -> list[list[int]]:
    """Positions of each group in a flat reward list: by label, else as another entry groups the
    same rewards.
    """
    rewards = entry.need("rewards")
    same = [
        other
        for other in file
        if other.inputs.get("rewards") == rewards and "groups" in other.inputs
    ]
    labels = entry.inputs.get("groups") or (same[0].inputs["groups"] if same else None)
    if labels is None:
        size = entry.inputs.get("group_size", VERL_GROUP_SIZE)
        labels = [i // size for i in range(len(rewards))]
    if len(labels) != len(rewards):
        raise Unknown(f"{len(labels)} group labels for {len(rewards)} rewards")
    return [
        [i for i, label in enumerate(labels) if label == each] for each in dict.fromkeys(labels)
    ]


NO_SPREAD = (
    "a group of successes alone has no spread to divide by; the original divides by eps alone"
)
LONE_RAW = "a lone sample's advantage is its reward as it is; the original divides it by 1 + eps"
LONE_REFUSED = (
    "a lone sample has no baseline: its group is excluded or refused, and 0 is not made up for it"
)
EQUAL_IS_ZERO = (
    "equal rewards have advantage exactly 0; in single precision their mean is another number than"
    " they are"
)


def group_advantage(entry: Entry, file: Sequence[Entry]) -> Any:
    """Advantages of one group (``group_rewards``) or of several in a flat list (``rewards``)."""
    entry.only("group_rewards", "rewards", "groups", "group_size", "norm_by_std", "eps")
    settings = _advantage_settings(entry)
    single = "group_rewards" in entry.inputs
    rewards = entry.need("group_rewards" if single else "rewards")
    blocks = [list(range(len(rewards)))] if single else blocks_of(entry, file)
    groups = [[rewards[i] for i in block] for block in blocks]
    reasons = {_advantage_reason(group, settings): None for group in groups}
    if LONE_REFUSED in reasons and "arpo" not in entry.recipe:
        return Deviation(
            _refusal(groups, settings), LONE_REFUSED, instead={"raises": "a lone sample"}
        )
    with refusals():
        ours = [advantages(group, settings) for group in groups]
    got = _advantage_answer(
        entry, blocks, [(result.values, result.mean, result.std) for result in ours]
    )
    why = "; ".join(filter(None, reasons))
    if not why:
        return got
    return Deviation(
        got, why, instead=_advantage_answer(entry, blocks, [_by_hand(g, settings) for g in groups])
    )


def _refusal(groups: Sequence[Sequence[float]], settings: AdvantageSettings) -> Any:
    try:
        return [advantages(group, settings).values for group in groups]
    except ConfigError as error:
        return {"raises": str(error)}


def _advantage_answer(
    entry: Entry,
    blocks: Sequence[Sequence[int]],
    results: Sequence[tuple[Sequence[float], float, float]],
) -> Any:
    """In the shape of what is expected, from each block's values, mean and std."""
    n = sum(map(len, blocks))
    values, stds = [0.0] * n, [0.0] * n
    for block, (found, _, std) in zip(blocks, results, strict=True):
        for i, value in zip(block, found, strict=True):
            values[i], stds[i] = value, std
    if not isinstance(entry.expected, Mapping):
        return values
    if "group_rewards" in entry.inputs:
        _, mean, std = results[0]
        return {
            "advantages": values,
            "adv": values,
            "std": std,
            "group_std_unbiased": std,
            "mean": mean,
        }
    return {"advantages": values, "adv": values, "std": stds, "group_std_unbiased": stds}


def _advantage_reason(group: Sequence[float], settings: AdvantageSettings) -> str:
    """Why ours may differ from the original for this group; empty when it must not."""
    if len(group) == 1:
        divided = settings.normalize_std and settings.eps > 0
        return LONE_REFUSED if settings.singleton == "error" else LONE_RAW if divided else ""
    if len(group) < 2 or not settings.normalize_std:
        return ""
    if settings.baseline == "binarised":
        return NO_SPREAD if all(reward != 0 for reward in group) else ""
    narrow = torch.tensor(group, dtype=torch.float32)
    return (
        EQUAL_IS_ZERO if max(group) == min(group) and bool((narrow != narrow.mean()).any()) else ""
    )


def _by_hand(
    group: Sequence[float], settings: AdvantageSettings
) -> tuple[Sequence[float], float, float]:
    """Values, mean and std as the text has them, without the function under test."""
    if len(group) == 1:
        return group, 0.0, 1.0
    base = [float(reward != 0) for reward in group] if settings.baseline == "binarised" else group
    mean = math.fsum(base) / len(base)
    squares = math.fsum((value - mean) ** 2 for value in base)
    std = math.sqrt(squares / (len(base) - 1))
    if max(base) == min(base):
        equal = settings.baseline == "mean"
        return [0.0 if equal else reward - base[0] for reward in group], base[0], 0.0
    divisor = std if settings.std == "unbiased" else math.sqrt(squares / len(base))
    divisor = max(settings.std_floor, divisor) + settings.eps if settings.normalize_std else 1.0
    return [(reward - mean) / divisor for reward in group], mean, std
