"""Arms beside the first one at equal updates, equal generated tokens and equal seconds, with
intervals over seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from rayloop.core.groups import Group, Member, Scored

Record = dict[str, Any]
DECIMAL_PLACES = 4
"""Decimals that are kept."""
AXES = ("updates", "tokens", "seconds")
T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Quantiles of the t distribution, by degrees of freedom."""
HABITS = (
    "groups",
    "tokens",
    "seconds",
    "trained",
    "used",
    "advantage",
    "norm",
    "equal",
    "malformed",
)
"""Of a run's steps: groups played, tokens and seconds an update; shares of the played answers that
are trained, and that are used: trained with an advantage; the mean advantage of those; the
gradient's norm; the shares of groups with equal rewards and of malformed answers.
"""
Steps = dict[str, list[float]]


def noted(
    steps: Steps, played: Sequence[Group], trained: Sequence[Member], norm: float, seconds: float
) -> None:
    """Append to ``steps``, by the names of HABITS, what a step played and trained."""
    members = [member for group in played for member in group.members]
    advantages = [member.advantage or 0.0 for member in trained]
    values = {
        "groups": len(played),
        "tokens": sum(member.summary.sampled_tokens for member in members),
        "seconds": seconds,
        "trained": len(trained) / len(members),
        "used": np.count_nonzero(advantages) / len(members),
        "advantage": float(np.mean(advantages)),
        "norm": norm,
        "equal": fmean(len({member.reward for member in group.members}) == 1 for group in played),
        "malformed": fmean(broken(member) for member in members),
    }
    for name, value in values.items():
        steps.setdefault(name, []).append(float(value))


def broken(member: Member) -> bool:
    """Whether the reward found no answer to read."""
    return isinstance(member.outcome, Scored) and "unparsable" in member.outcome.flags


@dataclass(frozen=True)
class Curve:
    """A run's held-out scores, one per evaluation, and its updates, generated tokens and seconds
    until each. ``habits``: means over its first steps.
    """

    updates: Sequence[float]
    tokens: Sequence[float]
    seconds: Sequence[float]
    scores: Sequence[float]
    habits: Mapping[str, float]

    @classmethod
    def of(cls, steps: Steps, scores: Sequence[float], every: int, compared: int) -> Curve:
        """``steps`` are those of ``noted``, ``scores`` from before the first step on and after each
        ``every``. ``habits`` are means over the first ``compared`` steps.
        """
        tokens = [0, *np.cumsum(steps["tokens"]).astype(int).tolist()]
        seconds = [0.0, *np.cumsum(steps["seconds"]).round(3).tolist()]
        habits = {
            name: round(fmean(values[:compared]), DECIMAL_PLACES) for name, values in steps.items()
        }
        return cls(
            [*range(0, len(scores) * every, every)],
            tokens[::every],
            seconds[::every],
            [round(score, DECIMAL_PLACES) for score in scores],
            habits,
        )

    def at(self, axis: str, cost: float) -> float:
        """The score at a cost of an axis; between evaluations on a straight line."""
        return float(np.interp(cost, getattr(self, axis), self.scores))


def compared(curves: Mapping[str, Mapping[str, Curve]]) -> Record:
    """Arm -> means of its habits, its score after as many updates as the shortest run made, and for
    each axis the difference to the first arm over the seeds that both have, as of ``interval``. A
    pair is compared at the largest cost that both reached. ``curves``: arm -> seed -> curve.
    """
    first = next(iter(curves.values()))
    steps = min(curve.updates[-1] for by_seed in curves.values() for curve in by_seed.values())
    found: Record = {}
    for arm, by_seed in curves.items():
        found[arm] = {
            "habits": {
                name: round(fmean(curve.habits[name] for curve in by_seed.values()), DECIMAL_PLACES)
                for name in HABITS
            },
            "score": round(
                fmean(curve.at("updates", steps) for curve in by_seed.values()), DECIMAL_PLACES
            ),
        }
        if by_seed is not first:
            pairs = [(curve, first[seed]) for seed, curve in by_seed.items() if seed in first]
            found[arm] |= {axis: interval([_gap(*pair, axis) for pair in pairs]) for axis in AXES}
    return found


def _gap(ours: Curve, theirs: Curve, axis: str) -> float:
    cost = min(getattr(curve, axis)[-1] for curve in (ours, theirs))
    return ours.at(axis, cost) - theirs.at(axis, cost)


def interval(values: Sequence[float]) -> Record:
    """Mean, half of the 95 % t interval (None for a lone value) and the values."""
    half = (
        T_975[len(values) - 1] * float(np.std(values, ddof=1)) / len(values) ** 0.5
        if len(values) > 1
        else None
    )
    rounded = [round(value, 4) for value in values]
    return {
        "mean": round(float(np.mean(values)), 4),
        "half": half if half is None else round(half, 4),
        "seeds": rounded,
    }


HEAD = (
    (
        "|arm|score|at equal updates|at equal tokens|in equal seconds|groups an update|tokens an"
        " update|seconds an update|trained|used|advantage|gradient norm|equal rewards|malformed|"
    ),
    "|---" * 14 + "|",
)
"""Over ``rows``."""


def rows(found: Record) -> list[str]:
    """A Markdown row for each arm: score, differences, habits."""
    lines = []
    for arm, of_arm in found.items():
        groups, tokens, *others = (of_arm["habits"][name] for name in HABITS)
        numbers = [f"{groups:.1f}", f"{tokens:.0f}", *(f"{value:.2f}" for value in others)]
        lines.append(
            "|"
            + "|".join(
                [
                    arm,
                    f"{of_arm['score']:.3f}",
                    *(_shown(of_arm.get(axis)) for axis in AXES),
                    *numbers,
                ]
            )
            + "|"
        )
    return lines


def _shown(gap: Record | None) -> str:
    return (
        ""
        if gap is None
        else f"{gap['mean']:+.3f}" + ("" if gap["half"] is None else f" ± {gap['half']:.3f}")
    )
