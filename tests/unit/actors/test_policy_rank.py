"""The reference's log-probs of a rank's share: an actor's, or those of the model without its
adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rayloop.actors.assignments import Assignment
from rayloop.actors.policy import PolicyRank, _Share
from rayloop.core.groups import Credit
from rayloop.core.protocols import TrainItem
from rayloop.core.types import TrajectoryId

VALUES = {"p0": "trajectory 0", "p1": "trajectory 1", "r0": "of an actor 0", "r1": "of an actor 1"}


class Engine:
    """It keeps what it is called with."""

    def __init__(self) -> None:
        self.gaps: dict[TrajectoryId, Any] = {}
        self.updates: Sequence[Sequence[TrainItem]] = ()
        self.scored: list[str] = []

    def logprobs(self, trajectories: list[str], *, reference: bool) -> list[str]:
        assert reference
        self.scored += trajectories
        return [f"without the adapter {trajectory[-1]}" for trajectory in trajectories]

    def train(self, updates: Sequence[Sequence[TrainItem]]) -> dict[str, float]:
        self.updates = updates
        return {}


@pytest.mark.parametrize(
    ("adapter_reference", "keys", "expected"),
    [
        (True, (None, None), ["without the adapter 0", "without the adapter 1"]),
        (False, ("r0", "r1"), ["of an actor 0", "of an actor 1"]),
        (False, (None, None), [None, None]),
    ],
)
def test_an_item_has_the_log_probs_of_its_trajectorys_reference(
    adapter_reference: bool, keys: tuple[Any, Any], expected: list[str | None]
) -> None:
    settings: Any = SimpleNamespace(adapter_reference=adapter_reference)
    rank = PolicyRank(settings, 0, 1)
    rank.engine = Engine()  # type: ignore[assignment]
    payloads: tuple[Any, ...] = ("p0", "p1")
    update = [
        Assignment(TrajectoryId(1, n), payloads[n], Credit(0.5), keys[n]) for n in range(len(keys))
    ]
    rank._share = _Share([update, update], VALUES)
    rank.train()
    for items in rank.engine.updates:  # type: ignore[attr-defined]
        assert [item.ref_logprobs for item in items] == expected
    # With two epochs a trajectory is in two updates, and is scored once.
    scored = ["trajectory 0", "trajectory 1"] if adapter_reference else []
    assert rank.engine.scored == scored  # type: ignore[attr-defined]
