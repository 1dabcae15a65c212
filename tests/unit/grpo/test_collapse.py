"""Alarms about a collapsing policy: each warns once, when the mean of five steps has passed its
limit, and may end the run.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

import pytest
from pydantic import ValidationError

from rayloop.core.events import Event
from rayloop.core.failures import AlarmStopped
from rayloop.core.groups import Group, Member, Outcome, Scored, Unscored, UnscoredKind
from rayloop.core.types import EndReason, Summary, Task, TrajectoryId, Version
from rayloop.grpo.advantage import with_advantages
from rayloop.grpo.alarms import Alarms, AlarmSettings
from rayloop.grpo.collapse import (
    DONE,
    ENTROPY,
    EQUAL,
    LENGTH,
    MEAN_STEPS,
    PAID,
    RIGHT,
    WRONG,
    Collapse,
    CollapseSettings,
)
from rayloop.grpo.settings import AdvantageSettings
from rayloop.run.records.step_metrics import Collected, step_metrics

WELL = {ENTROPY: 0.6, LENGTH: 38.0, DONE: 0.9, EQUAL: 0.3, RIGHT: 0.1, WRONG: 0.2}


class Watched:
    def __init__(self, **settings: Any) -> None:
        self.emitted: list[dict[str, Any]] = []
        self.alarms = Alarms(AlarmSettings(**settings), 1e-3, "my:Reward", self._emit)

    def _emit(self, event: Event) -> None:
        self.emitted.append(event.record())

    def steps(self, count: int, **changes: float) -> list[str]:
        """The alarms that ``count`` steps raise, by name."""
        self.emitted.clear()
        for _ in range(count):
            self.alarms.recorded({**WELL, **changes})
        return [event["alarm"] for event in self.emitted]


def test_a_run_that_is_well_says_nothing() -> None:
    assert Watched().steps(50) == []


@pytest.mark.parametrize(
    ("name", "metric", "value", "says"),
    [
        ("entropy", ENTROPY, 0.001, "entropy is 0.001 nats per token, mean of 5 steps"),
        (
            "response_length",
            LENGTH,
            10.0,
            "answers have 21 tokens, mean of 5 steps, and had 38 at first",
        ),
        ("completed", DONE, 0.1, "26% of the last 5 steps' trajectories were completed"),
        (
            "equal_groups",
            EQUAL,
            0.95,
            "95% of the last 5 steps' groups have advantages that are all 0",
        ),
        ("all_right", RIGHT, 0.9, "90% of the last 5 steps' groups have only right answers"),
        ("all_wrong", WRONG, 0.9, "90% of the last 5 steps' groups have only wrong answers"),
    ],
)
def test_each_collapse_is_emitted_once_and_can_end_the_run(
    name: str, metric: str, value: float, says: str
) -> None:
    watch = Watched()
    watch.steps(MEAN_STEPS)
    assert watch.steps(20, **{metric: value}) == [name]
    assert says in watch.emitted[0]["why"]
    assert watch.steps(20) == []
    assert watch.steps(20, **{metric: value}) == [name], "again after it was well"
    limit = {
        "warn": None,
        "stop": {"entropy": 0.1, "response_length": 0.5, "completed": 0.2}.get(name, 0.5),
    }
    strict = Watched(**{name: limit})
    strict.steps(MEAN_STEPS)
    with pytest.raises(AlarmStopped, match=rf"alarms\.{name}\.stop is {limit['stop']}"):
        strict.steps(MEAN_STEPS, **{metric: value})


def test_episodes_that_are_paid_at_their_last_turn_are_complete() -> None:
    """A game of three turns whose end ``max_turns`` sets."""
    watch = Watched()
    assert watch.steps(20, **{DONE: 0.01, PAID: 0.9}) == []
    assert watch.steps(20, **{DONE: 0.01, PAID: 0.1}) == ["completed"]
    assert "returns done=True" in watch.emitted[0]["why"]


def test_one_odd_step_is_no_collapse() -> None:
    watch = Watched()
    assert watch.steps(1, **{EQUAL: 1.0, WRONG: 1.0, ENTROPY: 0.0}) == []
    assert watch.steps(MEAN_STEPS) == []
    assert watch.steps(1, **{EQUAL: 1.0, WRONG: 1.0, ENTROPY: 0.0, LENGTH: 1.0}) == []


def test_lengths_are_compared_with_those_before_a_resume() -> None:
    before, after = Watched(), Watched()
    before.steps(MEAN_STEPS)
    after.alarms.restore(before.alarms.state())
    assert after.steps(MEAN_STEPS, **{LENGTH: 10.0}) == ["response_length"]
    fresh = Watched()
    fresh.alarms.restore({"graded": True})  # a checkpoint from before these alarms
    assert fresh.steps(MEAN_STEPS, **{LENGTH: 10.0}) == []


def test_entropy_is_compared_with_the_runs_own_start() -> None:
    watch = Watched()
    assert watch.steps(20, **{ENTROPY: 0.004}) == [], "answers that are a fixed form from the start"
    fell, resumed = Watched(), Watched()
    fell.steps(MEAN_STEPS, **{ENTROPY: 2.2})
    resumed.alarms.restore(fell.alarms.state())
    assert resumed.steps(MEAN_STEPS, **{ENTROPY: 0.05}) == ["entropy"]
    assert (
        "entropy is 0.05 nats per token, mean of 5 steps, and was 2.2 at first"
        in resumed.emitted[0]["why"]
    )


def test_steps_that_compute_nothing_are_an_alarm() -> None:
    """As with ``filters: []`` when every group is equal: nothing has a gradient, and no entropy is
    known.
    """
    watch = Watched()
    watch.steps(MEAN_STEPS)
    empty = {name: value for name, value in WELL.items() if name != ENTROPY}
    for _ in range(2 * MEAN_STEPS):
        watch.alarms.recorded(empty)
    assert [event["alarm"] for event in watch.emitted] == ["entropy"]
    assert "none of the last 5 steps had a trajectory with gradient" in watch.emitted[0]["why"]
    assert watch.steps(MEAN_STEPS) == []


def test_a_mean_holds_only_values_of_the_last_five_steps() -> None:
    """A gap without them makes none of the earlier ones new: they would hide what the policy has
    become.
    """
    watch = Watched()
    watch.steps(MEAN_STEPS)
    empty = {name: value for name, value in WELL.items() if name != ENTROPY}
    found = []
    for entropy in (None, None, None, 0.02, 0.04, 0.03):
        metrics = empty if entropy is None else empty | {ENTROPY: entropy}
        found.append(watch.alarms.collapse.step(metrics)["entropy"])
    known = [[0.6] * 4, [0.6] * 3, [0.6] * 2, [0.6, 0.02], [0.02, 0.04], [0.02, 0.04, 0.03]]
    assert [value for value, _, _ in found] == pytest.approx(
        [mean(values) / 0.6 for values in known]
    )
    assert "entropy is 0.03 nats per token, mean of 2 steps" in found[4][2]


def test_a_run_that_ends_after_steps_without_gradient_names_no_old_entropy() -> None:
    watch = Watched()
    watch.steps(MEAN_STEPS, **{ENTROPY: 2.2})
    watch.steps(MEAN_STEPS, **{ENTROPY: 0.05})
    assert watch.alarms.collapse.cause(1e-5)
    for _ in range(MEAN_STEPS):
        watch.alarms.recorded({name: value for name, value in WELL.items() if name != ENTROPY})
    assert watch.alarms.collapse.cause(1e-5) == ""


def test_a_run_without_groups_to_train_names_entropy_and_learning_rate() -> None:
    watch = Watched()
    assert watch.alarms.collapse.cause(1e-5) == ""
    watch.steps(MEAN_STEPS, **{ENTROPY: 2.2})
    assert watch.alarms.collapse.cause(1e-5) == ""
    watch.steps(MEAN_STEPS, **{ENTROPY: 0.05})
    said = watch.alarms.collapse.cause(1e-5)
    assert (
        "was 2.2 at first: it has collapsed. The learning rate is 1e-05. A lower"
        " policy.optimizer.lr" in said
    )


def test_a_floor_that_stops_before_it_warns_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"stop \(0.5\) is above warn \(0.1\)"):
        AlarmSettings.model_validate({"entropy": {"warn": 0.1, "stop": 0.5}})


def test_states_that_no_turn_shares_are_an_alarm_where_they_are_compared() -> None:
    split, shared = {**WELL, "rollout/shared_states": 0.0}, {**WELL, "rollout/shared_states": 0.02}
    for compares, metrics, warns in (
        (True, split, True),
        (True, shared, False),
        (False, split, False),
    ):
        watch, found = Collapse(CollapseSettings(), compares_states=compares), dict[str, Any]()
        for _ in range(MEAN_STEPS):
            found = watch.step(metrics)
        assert ("shared_states" in found) == compares
        if compares:
            value, limit, text = found["shared_states"]
            assert limit.warns(value) == warns
            assert "gigpo has nothing to compare there. A clock" in text


def test_states_that_do_not_repeat_are_an_alarm_where_they_are_compared() -> None:
    def warnings(shared: float, repeated: float, *, compares: bool = True) -> list[str]:
        watch, found = Collapse(CollapseSettings(), compares_states=compares), dict[str, Any]()
        states = {"rollout/shared_states": shared, "rollout/repeated_states": repeated}
        for _ in range(MEAN_STEPS):
            found = watch.step({**WELL, **states})
        return [text for value, limit, text in found.values() if limit.warns(value)]

    (text,) = warnings(0.1, 0.25)
    assert text.startswith("the same actions led to the same state in 25% of the cases, mean of 5")
    assert "A clock" in text
    assert warnings(0.1, 0.25, compares=False) == warnings(0.6, 0.9) == []
    # One alarm says it where nothing is shared at all.
    (text,) = warnings(0.0, 0.0)
    assert "gigpo has nothing to compare there" in text


# The shares of groups -----------------------------------------------------------------------------


def group(*outcomes: Outcome, replayed: bool = False) -> Group:
    version = Version(0, 0)
    summary = Summary(
        TrajectoryId(1, 0), 0, "t", "", EndReason.DONE, 9, 3, 1, 0, 0, True, version, version
    )
    members = tuple(Member(summary, outcome) for outcome in outcomes)
    extra = (Member(summary, Scored(1.0), replayed=True),) if replayed else ()
    return with_advantages(Group(1, Task("t", ()), (*extra, *members)), AdvantageSettings())


def test_groups_that_teach_nothing_are_counted_before_any_filter() -> None:
    """A stored success gives a group of failures something to teach; its fresh answers are all
    wrong nonetheless.
    """
    groups = (
        group(Scored(1.0), Scored(1.5)),
        group(Scored(1.0), Scored(1.0)),
        group(Scored(0.0), Scored(0.0), replayed=True),
        group(Scored(0.1), Scored(0.1)),
        group(Scored(0.0), Scored(1.0)),
        group(Scored(0.0), Unscored(UnscoredKind.TIMEOUT)),
    )
    found = step_metrics(Collected((), groups), target=4)
    assert (found[EQUAL], found[RIGHT], found[WRONG]) == (2 / 5, 1 / 5, 1 / 5)
    assert EQUAL not in step_metrics(Collected((), groups[-1:]), target=4)
