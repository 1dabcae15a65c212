"""Arms at equal cost: what a step is noted as, interpolation, pairs over seeds, and the interval,
against figures made by hand.
"""

from __future__ import annotations

from math import sqrt

import pytest

from benchmarks.evidence.costs import HABITS, HEAD, Curve, Steps, compared, interval, noted, rows
from rayloop.core.groups import Credit, Group, Member, Scored
from rayloop.core.types import EndReason, Summary, Task, TrajectoryId, Version


def curve(tokens: float, rise: float, updates: int = 4) -> Curve:
    """A score that rises with each of ``updates`` updates, which cost ``tokens`` tokens and two
    seconds each.
    """
    steps = {name: [float(tokens if name == "tokens" else 2)] * updates for name in HABITS}
    return Curve.of(steps, [rise * step for step in range(updates + 1)], 1, 4)


def group(number: int, rewards: dict[float, float]) -> Group:
    """Rewards with their advantages; a reward of 0 was no answer to read. Ten tokens an answer."""

    def member(sample: int, reward: float, advantage: float) -> Member:
        summary = Summary(
            TrajectoryId(number, sample),
            0,
            "t",
            "",
            EndReason.DONE,
            length=20,
            sampled_tokens=10,
            turns=1,
            images=0,
            observation_images=0,
            images_consistent=True,
            first_version=Version(1, 0),
            last_version=Version(1, 0),
        )
        return Member(
            summary, Scored(reward, {}, () if reward else ("unparsable",)), None, Credit(advantage)
        )

    return Group(
        number, Task("t", ()), tuple(member(i, *pair) for i, pair in enumerate(rewards.items()))
    )


def test_a_pair_is_compared_at_the_largest_cost_that_both_reached() -> None:
    found = compared({"none": {"0": curve(10, 0.1, updates=8)}, "dear": {"0": curve(30, 0.15)}})[
        "dear"
    ]
    assert found["updates"]["mean"] == pytest.approx(4 * 0.15 - 4 * 0.1)
    assert found["tokens"]["mean"] == pytest.approx(80 / 30 * 0.15 - 0.8, abs=1e-4), (
        "80 tokens, between two evaluations"
    )
    assert found["seconds"]["mean"] == pytest.approx(4 * 0.15 - 4 * 0.1)
    assert found["updates"]["half"] is None
    assert found["score"] == pytest.approx(0.6)


def test_the_interval_is_students_over_seeds_that_both_arms_have() -> None:
    half = pytest.approx(4.303 * 0.1 / sqrt(3), abs=1e-4)
    assert interval([0.1, 0.2, 0.3]) == {"mean": 0.2, "half": half, "seeds": [0.1, 0.2, 0.3]}
    none = {str(seed): curve(10, 0.1) for seed in range(3)}
    found = compared(
        {"none": none, "other": {"1": curve(10, 0.2), "2": curve(10, 0.3), "9": curve(10, 9.0)}}
    )
    assert found["other"]["tokens"]["seeds"] == [0.4, 0.8]
    assert "tokens" not in found["none"]


def test_an_answer_without_an_advantage_is_trained_and_not_used() -> None:
    steps, differing, alike = Steps(), group(1, {1.0: 0.7, 0.0: -0.7}), group(2, {1.0: 0.0})
    noted(steps, [differing, alike], [*differing.members, *alike.members], 0.5, 2.0)
    noted(steps, [differing, alike], differing.members[:1], 0.5, 2.0)
    assert steps["groups"] == [2, 2]
    assert steps["tokens"] == [30, 30]
    assert steps["trained"] == pytest.approx([1, 1 / 3])
    assert steps["used"] == pytest.approx([2 / 3, 1 / 3])
    assert steps["advantage"] == pytest.approx([0, 0.7])
    assert steps["equal"] == [0.5, 0.5]
    assert steps["malformed"] == pytest.approx([1 / 3, 1 / 3])


def test_a_row_has_a_cell_for_each_column() -> None:
    found = compared(
        {
            "none": {"0": curve(10, 0.1), "1": curve(10, 0.1)},
            "other": {"0": curve(10, 0.2), "1": curve(10, 0.2)},
        }
    )
    assert [row.count("|") for row in (*HEAD, *rows(found))] == [15] * 4
    assert rows(found)[1].startswith("|other|0.800|+0.400 ± 0.000|")
