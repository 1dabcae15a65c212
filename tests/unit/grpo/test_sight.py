"""Which changes of log-probs say that a policy looks, and when it has become blind."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from rayloop.core.events import Event
from rayloop.core.types import TrajectoryId
from rayloop.grpo.alarms import Alarms, AlarmSettings
from rayloop.grpo.sight import Sight, blindness, of_screens, sight_metrics

SCREENS = 6
"""Screens of a check of the README's quickstart: every fifth step, 0.5 % of 1,280 turns."""


def sees(chance: random.Random, kind: str) -> float:
    """The change of one turn of a policy that looks: at most screens, at few, or by very unequal
    amounts.
    """
    match kind:
        case "mostly":
            return chance.gauss(0.8, 0.4)
        case "seldom":
            return chance.gauss(2.0, 0.5) if chance.random() < 0.3 else chance.gauss(0.0, 1e-4)
        case _:
            return chance.lognormvariate(-2.0, 2.0) * chance.choice((1, 1, -1))


def first_alarm(kind: str, seed: int, blind_from: int, count: int) -> int | None:
    """The first of ``count`` steps that warns; from ``blind_from`` on pictures change nothing."""
    chance, watch = random.Random(seed), Sight()
    for step in range(count):
        changes = []
        if step % 5 == 0:
            blind = step >= blind_from
            changes = [
                chance.gauss(0.0, 1e-7) if blind else sees(chance, kind) for _ in range(SCREENS)
            ]
        if any(limit.warns(value) for value, limit, _ in watch.step(changes).values()):
            return step
    return None


@pytest.mark.parametrize("kind", ["mostly", "unequal"])
@pytest.mark.parametrize("blind_from", [16, 18, 20])
def test_a_policy_that_becomes_blind_is_noticed_within_five_steps(
    kind: str, blind_from: int
) -> None:
    for seed in range(50):
        step = first_alarm(kind, seed, blind_from, count=60)
        assert step is not None
        assert blind_from <= step < blind_from + 5


def test_where_few_screens_need_a_look_it_takes_longer() -> None:
    found = [first_alarm("seldom", seed, blind_from=30, count=60) for seed in range(20)]
    assert all(step is not None and 30 <= step < 45 for step in found)


@pytest.mark.parametrize("kind", ["mostly", "seldom", "unequal"])
def test_a_policy_that_looks_raises_no_alarm(kind: str) -> None:
    found = [first_alarm(kind, seed, blind_from=99, count=60) for seed in range(50)]
    assert found == [None] * 50


def test_the_probability_is_that_of_the_order_of_the_sizes() -> None:
    sizes = [3.0, 0.02, 1.0, 5.0, 0.03, 0.01, 0.015]
    chance, count = blindness(sizes)
    as_small, orders = 0, list(itertools.permutations(sizes))
    for order in orders:
        newest = set(order[-count:])
        # Not more of the earlier ones are as small as the newest than are here.
        as_small += newest <= set(sorted(sizes)[: 1 + count])
    assert count == 3
    assert chance == pytest.approx(as_small / len(orders))


def test_a_policy_that_never_looked_is_not_called_blind() -> None:
    chance = random.Random(0)
    assert blindness([abs(chance.gauss(0.0, 1e-6)) for _ in range(60)])[0] > 1e-3
    assert blindness([]) == (1.0, 0)


def test_an_alarm_is_emitted_once_and_again_after_a_resume() -> None:
    emitted: list[dict[str, Any]] = []

    def emit(event: Event) -> None:
        emitted.append(event.record())

    alarms = Alarms(AlarmSettings(), 1e-3, "my:Reward", emit)
    alarms.looked([0.5, 0.7, 0.4, 0.6] * 8)
    assert not emitted
    saved = alarms.state()
    for _ in range(3):
        alarms.looked([1e-8, -1e-8])
    (alarm,) = emitted
    assert (alarm["event"], alarm["alarm"]) == ("alarm", "sight")
    assert "does not look any more" in alarm["why"]
    resumed = Alarms(AlarmSettings(), 1e-3, "my:Reward", emit)
    resumed.restore(saved)
    for _ in range(3):
        resumed.looked([1e-8, -1e-8])
    assert len(emitted) == 2


def test_a_checkpoint_without_scored_turns_is_read() -> None:
    alarms = Alarms(AlarmSettings(), 1e-3, "my:Reward", lambda _: None)
    state = alarms.state()
    del state["sight"]
    alarms.restore(state)
    assert not alarms.sight.values


def test_the_metrics_of_a_step_are_by_turn() -> None:
    changes = {
        TrajectoryId(0, 0): (0.5, None, 0.1),
        TrajectoryId(0, 1): (None, None, 0.3),
        TrajectoryId(1, 0): (*[None] * 8, 1.0, None, 2.0),
    }
    assert sight_metrics(changes) == pytest.approx(
        {
            "actor/sight": (0.5 + 0.1 + 0.3 + 1.0 + 2.0) / 5,
            "actor/sight/turn_1": 0.5,
            "actor/sight/turn_3": 0.2,
            "actor/sight/turn_9": 1.5,
        }
    )
    # Members of a group at one turn count as one; those at another turn, and other groups, do not.
    assert of_screens({**changes, TrajectoryId(0, 2): (1.5,)}) == pytest.approx(
        [1.0, 0.2, 1.0, 2.0]
    )
    assert sight_metrics({}) == sight_metrics({TrajectoryId(0, 0): (None,)}) == {}
