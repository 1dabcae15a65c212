"""Staleness: lag, dead lineages, and the bound on what may start."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloop.core.types import Version
from rayloop.grpo.staleness import AcceptanceRate, LengthRatio, is_due, is_stale, lag, open_slots


def test_lag_counts_steps_and_refuses_the_future() -> None:
    assert lag(Version(1, 3), Version(1, 5)) == 2
    with pytest.raises(ValueError, match="ahead"):
        lag(Version(1, 6), Version(1, 5))


def test_stale_beyond_the_bound() -> None:
    assert not is_stale(Version(0, 4), Version(0, 5), 1)
    assert is_stale(Version(0, 3), Version(0, 5), 1)


def test_other_lineages_are_dead_unless_the_present_one_descends_from_them() -> None:
    assert is_stale(Version(0, 5), Version(1, 5), 1)
    assert is_stale(Version(0, 9), Version(1, 5), 1)
    assert not is_stale(Version(0, 5), Version(1, 5), 1, inherited={0: 5})
    assert is_stale(Version(0, 6), Version(1, 5), 1, inherited={0: 5})
    assert is_stale(Version(0, 3), Version(1, 5), 1, inherited={0: 5})


def test_due_is_what_the_present_version_is_the_last_to_train_on() -> None:
    assert is_due(Version(1, 3), Version(1, 5), 2)
    assert not is_due(Version(1, 4), Version(1, 5), 2)
    assert not is_due(Version(1, 2), Version(1, 5), 2), "too old already: waiting would not help"
    assert not is_due(Version(0, 3), Version(1, 5), 2), "a dead lineage"
    assert is_due(Version(0, 3), Version(1, 5), 2, inherited={0: 4})


@given(
    st.integers(0, 3),
    st.integers(1, 64),
    st.integers(0, 300),
    st.integers(0, 300),
    st.floats(0.05, 1),
)
def test_what_starts_stays_within_the_bound(
    max_staleness: int, target: int, ready: int, in_flight: int, acceptance: float
) -> None:
    slots = open_slots(max_staleness, target, ready, in_flight, acceptance)
    bound = (max_staleness + 1) * target
    assert 0 <= slots <= bound
    assert slots == 0 or ready + acceptance * in_flight + slots <= bound + 1e-9


def test_open_slots_by_hand_and_a_rate_that_bounds_nothing() -> None:
    assert open_slots(0, 8, 0, 0, 1.0) == 8
    assert open_slots(1, 8, 3, 10, 0.5) == 8
    assert open_slots(0, 8, 8, 0, 1.0) == 0
    with pytest.raises(ValueError, match="does not bound"):
        open_slots(0, 8, 0, 8, 0.0)


@given(st.lists(st.tuples(st.integers(0, 16), st.integers(0, 16)).map(sorted), max_size=50))
def test_the_acceptance_rate_stays_between_its_floor_and_one(observations: list[list[int]]) -> None:
    rate = AcceptanceRate(memory=32, floor=0.25)
    assert rate.value == 1.0
    for survivors, finished in observations:
        rate.observe(survivors, finished)
        assert 0.25 <= rate.value <= 1.0
    other = AcceptanceRate(memory=32, floor=0.25)
    other.restore(rate.state())
    assert other.value == rate.value


def test_the_acceptance_rate_follows_what_it_observes() -> None:
    rate = AcceptanceRate(memory=8, floor=0.01)
    for _ in range(20):
        rate.observe(4, 8)
    assert rate.value == pytest.approx(0.5, abs=1e-3)
    with pytest.raises(ValueError, match="survivors"):
        rate.observe(2, 1)


def test_the_length_ratio_compares_what_is_trained_with_what_is_played() -> None:
    ratio = LengthRatio(memory=4)
    ratio.observe([10, 30], [])
    assert ratio.value is None
    ratio.observe([10, 30], [10, 30])
    assert ratio.value == pytest.approx(1)
    for _ in range(20):
        ratio.observe([10, 30], [10])
    assert ratio.value == pytest.approx(0.5, abs=0.01)
