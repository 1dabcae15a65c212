"""The budget that is a rate: what is there, what comes back, and when."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloop.launch.restarts import REFILL_S, Budget


def test_it_is_full_at_first_and_a_unit_comes_back_after_its_share_of_an_hour() -> None:
    budget, now = Budget(3), 17.0
    for _ in range(3):
        assert budget.wait(now) == 0
        budget.take(now)
    assert budget.wait(now) == pytest.approx(REFILL_S / 3)
    with pytest.raises(ValueError, match=r"the budget of 3 an hour has 0\.500 left"):
        budget.take(now + REFILL_S / 6)
    budget.take(now + REFILL_S / 3)
    assert budget.left(now + 10 * REFILL_S) == 3, "never more than an hour's"


def test_a_budget_of_nothing_never_comes_back() -> None:
    assert Budget(0).wait(5.0) == math.inf


@given(st.integers(1, 20), st.lists(st.floats(0, REFILL_S), max_size=60))
def test_no_hour_costs_more_than_twice_the_rate(per_hour: int, pauses: list[float]) -> None:
    """What was saved up, and what comes back meanwhile."""
    budget, now, taken = Budget(per_hour), 0.0, list[float]()
    for pause in pauses:
        now += pause
        if not budget.wait(now):
            budget.take(now)
            taken.append(now)
        assert sum(now - REFILL_S <= at for at in taken) <= 2 * per_hour
        assert 0 <= budget.left(now) <= per_hour
