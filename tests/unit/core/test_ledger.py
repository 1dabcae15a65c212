"""The ledger: legal moves balance, illegal ones are refused, nothing is counted twice."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloop.core.failures import LedgerError
from rayloop.core.groups import Status, TrajectoryState
from rayloop.core.ledger import Ledger
from rayloop.core.types import TrajectoryId

READY = Status(TrajectoryState.READY)
TRAINED = Status(TrajectoryState.TRAINED)
FINAL = [
    TRAINED,
    Status(TrajectoryState.FILTERED, "all_wrong"),
    Status(TrajectoryState.STALE),
    Status(TrajectoryState.CANCELLED, "preempted"),
]


def ids(group: int, n: int = 4) -> list[TrajectoryId]:
    return [TrajectoryId(group, sample) for sample in range(n)]


def test_counts_by_state_and_reason() -> None:
    ledger = Ledger()
    ledger.issue(ids(0))
    for id in ids(0, 3):
        ledger.move(id, READY)
    ledger.move(TrajectoryId(0, 0), TRAINED)
    ledger.move(TrajectoryId(0, 1), Status(TrajectoryState.FILTERED, "all_wrong"))
    ledger.replay()
    ledger.check()
    assert ledger.counts() == {
        "issued": 4,
        "in_flight": 1,
        "ready": 1,
        "trained": 1,
        "filtered[all_wrong]": 1,
        "attempts": 0,
        "replayed": 1,
    }


def test_illegal_moves_are_refused_and_change_nothing() -> None:
    ledger = Ledger()
    ledger.issue(ids(0, 2))
    first, second = ids(0, 2)
    ledger.move(first, READY)
    before = ledger.state()
    for id, status in [
        (first, READY),
        (first, Status(TrajectoryState.IN_FLIGHT)),
        (TrajectoryId(9, 9), TRAINED),
    ]:
        with pytest.raises(LedgerError):
            ledger.move(id, status)
    with pytest.raises(LedgerError, match="issued before"):
        ledger.issue([second])
    with pytest.raises(LedgerError):
        ledger.issue([TrajectoryId(1, 0), TrajectoryId(1, 0)])
    assert ledger.state() == before
    ledger.move(first, TRAINED)
    with pytest.raises(LedgerError, match="not live"):
        ledger.move(first, TRAINED)
    with pytest.raises(LedgerError, match="issued before"):
        ledger.issue([first])


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from([READY, *FINAL])), max_size=60))
def test_balances_under_any_moves_and_refuses_exactly_the_illegal_ones(
    moves: list[tuple[int, Status]],
) -> None:
    ledger, model = Ledger(), {}
    for group in range(5):
        ledger.issue(ids(group))
        model.update(dict.fromkeys(ids(group), TrajectoryState.IN_FLIGHT))
    for number, status in moves:
        id = TrajectoryId(number // 4, number % 4)
        legal = model.get(id) == TrajectoryState.IN_FLIGHT or (
            model.get(id) == TrajectoryState.READY and status != READY
        )
        if legal:
            ledger.move(id, status)
            model[id] = status.state
        else:
            with pytest.raises(LedgerError):
                ledger.move(id, status)
        ledger.check()
    counts = ledger.counts()
    assert counts["issued"] == len(model)
    assert counts["trained"] == list(model.values()).count(TrajectoryState.TRAINED)
    assert counts["in_flight"] + counts["ready"] == len(ledger.state()["live"])


def test_memory_is_bounded_by_what_is_live() -> None:
    ledger = Ledger()
    for group in range(100):
        ledger.issue(ids(group))
        for id in ids(group):
            ledger.move(id, TRAINED)
    state = ledger.state()
    assert (state["live"], state["reissuable"], state["final"]) == ([], [], {"trained": 400})


def test_a_restored_ledger_issues_what_was_in_flight_again() -> None:
    before = Ledger()
    before.issue(ids(0))
    before.move(TrajectoryId(0, 0), TRAINED)
    before.move(TrajectoryId(0, 1), READY)
    ledger = Ledger()
    ledger.restore(json.loads(json.dumps(before.state())))
    assert ledger.counts() == before.counts()
    assert ledger.reissue_live() == (TrajectoryId(0, 2), TrajectoryId(0, 3))
    ledger.check()
    assert (ledger.counts()["issued"], ledger.counts()["attempts"], ledger.counts()["ready"]) == (
        2,
        2,
        1,
    )
    ledger.issue(ids(0)[2:])
    ledger.check()
    assert ledger.counts()["issued"] == 4
    with pytest.raises(LedgerError, match="issued before"):
        ledger.issue([TrajectoryId(0, 3)])


def test_a_ledger_that_does_not_balance_is_refused() -> None:
    ledger = Ledger()
    ledger.issue(ids(0))
    broken = ledger.state() | {"issued": 5}
    with pytest.raises(LedgerError, match="5 trajectories issued, 4 live"):
        Ledger().restore(broken)
