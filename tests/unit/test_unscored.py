"""The alarm about trajectories without a reward: their share, and whether source or length explain it."""

from __future__ import annotations

import math

import pytest

from rayloop.core.types import (
    EndReason,
    Member,
    Outcome,
    Scored,
    Summary,
    TrajectoryId,
    Unscored,
    UnscoredKind,
    Version,
)
from rayloop.grpo.unscored import UnscoredAlarm, UnscoredWatch, correlation

LOST = Unscored(UnscoredKind.REWARD_UNAVAILABLE)


def member(outcome: Outcome = Scored(1.0), source: str = "chart", length: int = 100) -> Member:
    summary = Summary(
        TrajectoryId(1, 0), 0, "t", source, EndReason.DONE, length, 10, 1, 0, 0, True, Version(0, 0), Version(0, 0)
    )
    return Member(summary, outcome)


def test_a_few_without_reward_are_no_alarm() -> None:
    watch = UnscoredWatch(UnscoredAlarm())
    assert watch.observe([member()] * 200 + [member(LOST)] * 7) == []


def test_the_share_alarms_once_and_again_after_it_was_well() -> None:
    watch = UnscoredWatch(UnscoredAlarm(window=100))
    (alarm,) = watch.observe([member()] * 80 + [member(LOST)] * 20)
    assert alarm == "20 of the last 100 trajectories have no reward (reward_unavailable 20)"
    assert watch.observe([member(LOST)]) == []
    assert watch.observe([member()] * 100) == []
    assert len(watch.observe([member(LOST)] * 20)) == 1


def test_a_data_source_that_is_hit_is_named() -> None:
    watch = UnscoredWatch(UnscoredAlarm(share=0.5))
    mixed = [member(LOST, "chart"), *[member(source="chart")], *[member(source="math")] * 6]
    (alarm,) = watch.observe(mixed * 10)
    assert alarm.startswith("trajectories of chart have no reward more often (r = 0.6")


@pytest.mark.parametrize(("length", "word"), [(900, "longer"), (10, "shorter")])
def test_a_length_that_is_hit_is_named(length: int, word: str) -> None:
    watch = UnscoredWatch(UnscoredAlarm(share=0.5))
    (alarm,) = watch.observe([member(LOST, length=length), *[member()] * 5] * 10)
    assert alarm.startswith(f"{word} trajectories have no reward more often (r = {'' if length > 100 else '-'}1.00)")


def test_what_was_never_played_does_not_count() -> None:
    watch = UnscoredWatch(UnscoredAlarm())
    failed = member(Unscored(UnscoredKind.ENVIRONMENT_FAILURE), length=0)
    assert watch.observe([member()] * 10 + [failed] * 50) == []


def test_correlation() -> None:
    assert math.isclose(correlation([1, 2, 3], [2, 4, 6]), 1)
    assert math.isclose(correlation([1, 2, 3], [3, 2, 1]), -1)
    assert correlation([1, 1, 1], [1, 2, 3]) == 0
