"""Whom asynchronous training trains: the real Production with long-tailed episodes, on a virtual
clock (seconds of real time).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from benchmarks.evidence import staleness

PACE = {(1, 0.7): 0.613, (2, 0.0): 0.724}
"""Steps per time when waiting over those when dropping, from a simulation of its own of 300 steps
without this code.
"""


@cache
def simulate(bound: int, when_late: str, shared: float) -> dict[str, Any]:
    return staleness.simulate(bound, when_late, shared, steps=40)


@pytest.mark.parametrize(("bound", "shared"), [(1, 0.7), (2, 0.0), (4, 0.7), (8, 0.0)])
def test_long_episodes_are_trained_as_often_as_they_are_played(bound: int, shared: float) -> None:
    waiting = simulate(bound, "wait", shared)
    assert waiting["long_ratio"] >= 0.97
    assert waiting["length_ratio"] >= 0.98
    assert waiting["stale"] + waiting["surplus"] <= 0.02


@pytest.mark.parametrize(("bound", "shared"), PACE)
def test_dropping_is_faster_and_prefers_the_short(bound: int, shared: float) -> None:
    waiting, dropping = (simulate(bound, late, shared) for late in ("wait", "drop"))
    assert dropping["long_ratio"] < 0.9, "the simulation must be able to see the bias"
    assert dropping["stale"] > 0.03
    assert waiting["steps_per_mean"] / dropping["steps_per_mean"] == pytest.approx(
        PACE[bound, shared], abs=0.05
    )
