"""Advantages, written from their papers in plain loops over the groups of a step.

Nothing of the product is imported. Divisors have 1e-6 added, as in verl's GRPO.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

EPS = 1e-6


@dataclass(frozen=True)
class One:
    """A scored trajectory: its reward, the reward's components, and for each sampled turn the
    environment's reward and what the policy saw.
    """

    reward: float
    components: dict[str, float] = field(default_factory=dict)
    turn_rewards: list[float] = field(default_factory=list)
    states: list[str] = field(default_factory=list)


Group = Sequence[One]
Step = Sequence[Group]


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def std(values: Sequence[float], less: int = 1) -> float:
    middle = mean(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / (len(values) - less))


def normalised(values: Sequence[float]) -> list[float]:
    """arXiv:2402.03300, section 4.1.2; equal values have 0."""
    middle, divisor = mean(values), std(values) + EPS
    return [0.0 if max(values) == min(values) else (value - middle) / divisor for value in values]


def grpo(group: Group) -> list[float]:
    return normalised([one.reward for one in group])


def dr_grpo(group: Group) -> list[float]:
    """arXiv:2503.20783, equation 4."""
    return [one.reward - mean([each.reward for each in group]) for one in group]


def binarised(group: Group) -> list[float]:
    """PyVision's ``grpo_w_anb``: mean and deviation of whether there is a score."""
    hits = [1.0 if one.reward != 0 else 0.0 for one in group]
    divisor = 1.0 if min(hits) == max(hits) else std(hits) + EPS
    return [(one.reward - mean(hits)) / divisor for one in group]


def chart_rvr(group: Group) -> list[float]:
    """arXiv:2510.10973: the population's deviation, 1 at least."""
    rewards = [one.reward for one in group]
    return [(reward - mean(rewards)) / (max(1.0, std(rewards, 0)) + EPS) for reward in rewards]


def raw(group: Group) -> list[float]:
    """verl: a lone sample has mean 0 and deviation 1."""
    return [group[0].reward] if len(group) == 1 else grpo(group)


def rloo(group: Group) -> list[float]:
    """arXiv:2402.14740, equation 8."""
    return [
        one.reward - mean([other.reward for j, other in enumerate(group) if j != i])
        for i, one in enumerate(group)
    ]


def maxrl(group: Group) -> list[float]:
    """arXiv:2602.02710."""
    middle = mean([one.reward for one in group])
    return [0.0 if middle == 0 else (one.reward - middle) / middle for one in group]


def reinforce_pp(step: Step) -> list[list[float]]:
    """arXiv:2501.03262, with baseline: the reward minus its group's mean, normalised over the step."""
    everything = [value for group in step for value in dr_grpo(group)]
    return [
        [(value - mean(everything)) / (std(everything) + EPS) for value in dr_grpo(group)]
        for group in step
    ]


def scalerl(step: Step) -> list[list[float]]:
    """arXiv:2510.13786: the reward minus its group's mean, over the deviation of all of these."""
    divisor = std([value for group in step for value in dr_grpo(group)]) + EPS
    return [[value / divisor for value in dr_grpo(group)] for group in step]


def gdpo(step: Step, weights: dict[str, float]) -> list[list[float]]:
    """arXiv:2601.05242, equations 4 to 6."""
    sums = [[0.0] * len(group) for group in step]
    for name, weight in weights.items():
        for g, group in enumerate(step):
            for i, value in enumerate(normalised([one.components[name] for one in group])):
                sums[g][i] += weight * value
    everything = [value for group in sums for value in group]
    return [
        [(value - mean(everything)) / (std(everything) + EPS) for value in group] for group in sums
    ]


def discounted(one: One, gamma: float) -> list[float]:
    """Each turn's return.

    What the reward is above the environment's own is paid with the last turn.
    """
    rewards = list(one.turn_rewards)
    rewards[-1] += one.reward - sum(rewards)
    return [
        sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards)))
        for t in range(len(rewards))
    ]


def turns(group: Group, gamma: float = 0.95) -> list[list[float]]:
    """Discounted returns, normalised over all turns of the group."""
    returns = [discounted(one, gamma) for one in group]
    scaled = normalised([value for each in returns for value in each])
    found = []
    for each in returns:
        found.append(scaled[: len(each)])
        scaled = scaled[len(each) :]
    return found


def gigpo(group: Group, gamma: float = 0.95, omega: float = 1.0) -> list[list[float]]:
    """arXiv:2505.10978, equations 3 to 8: the episode's advantage, and each turn's among those that
    began at the same state.
    """
    found = []
    for episode, one in zip(grpo(group), group, strict=True):
        row = []
        for t, state in enumerate(one.states):
            same = [
                discounted(other, gamma)[k]
                for other in group
                for k, seen in enumerate(other.states)
                if seen == state
            ]
            mine = discounted(one, gamma)[t]
            step = (
                0.0
                if len(same) == 1 or max(same) == min(same)
                else (mine - mean(same)) / (std(same) + EPS)
            )
            row.append(episode + omega * step)
        found.append(row)
    return found


WEIGHTS = {"iou": 1.0, "format": 0.5}
PER_GROUP: dict[str, Callable[[Group], list[float] | list[list[float]]]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "binarised": binarised,
    "chart_rvr": chart_rvr,
    "raw": raw,
    "rloo": rloo,
    "maxrl": maxrl,
    "turns": turns,
    "gigpo": gigpo,
    "distill": lambda group: [0.0] * len(group),
}
OVER_STEP: dict[str, Callable[[Step], list[list[float]]]] = {
    "reinforce_pp": reinforce_pp,
    "batch_std": scalerl,
    "gdpo": lambda step: gdpo(step, WEIGHTS),
}
