"""Alarms: shares without reward, excluded and flagged, what explains them, drift of log-probs, and
a broken grader.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from rayloop.core.events import Event
from rayloop.core.failures import AlarmStopped, GraderBroken
from rayloop.core.groups import (
    Member,
    Outcome,
    Scored,
    Status,
    TrajectoryState,
    Unscored,
    UnscoredKind,
)
from rayloop.core.types import EndReason, Summary, TrajectoryId, Version
from rayloop.grpo.alarms import DRIFT, UNSEEN_STEPS, Alarms, AlarmSettings, correlation, reasons
from rayloop.grpo.collapse import Limit
from rayloop.rewards.functions import as_outcome

LOST = Unscored(UnscoredKind.REWARD_UNAVAILABLE)
CRASHED = Unscored(
    UnscoredKind.GRADER_ERROR, "my:Reward: KeyError: 'x'", "Traceback\n  in score\nKeyError: 'x'"
)


def member(
    outcome: Outcome = Scored(1.0), source: str = "chart", length: int = 100, **changes: Any
) -> Member:
    summary = Summary(
        TrajectoryId(1, 0),
        0,
        "t",
        source,
        EndReason.DONE,
        length,
        10,
        1,
        0,
        0,
        True,
        Version(0, 0),
        Version(0, 0),
    )
    return replace(Member(summary, outcome), **changes)


class Watched:
    """Alarms, and what they emitted."""

    def __init__(self, **settings: Any) -> None:
        self.emitted: list[dict[str, Any]] = []
        self.alarms = Alarms(AlarmSettings(**settings), 1e-3, "my:Reward", self._emit)

    def _emit(self, event: Event) -> None:
        self.emitted.append(event.record())

    def observe(self, members: list[Member]) -> list[str]:
        """The alarms that these members raise, in words."""
        self.emitted.clear()
        self.alarms.groups(members)
        return [event["why"] for event in self.emitted if event["event"] == "alarm"]

    def drift(self, *values: float) -> list[str]:
        self.emitted.clear()
        for value in values:
            self.alarms.step({DRIFT: value})
        return [event["why"] for event in self.emitted]


def test_a_few_without_reward_are_no_alarm() -> None:
    assert Watched().observe([member()] * 200 + [member(LOST)] * 7) == []


def test_the_share_alarms_once_and_again_after_it_was_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayloop.grpo.alarms.WINDOW_TRAJECTORIES", 100)
    watch = Watched()
    (alarm,) = watch.observe([member()] * 80 + [member(LOST)] * 20)
    assert alarm == "20 of the last 100 trajectories have no reward (reward_unavailable 20)"
    assert watch.emitted[-1]["alarm"] == "unscored"
    assert watch.observe([member(LOST)]) == []
    assert watch.observe([member()] * 100) == []
    assert len(watch.observe([member(LOST)] * 20)) == 1


def test_the_reason_is_emitted_with_the_first_of_a_kind_and_with_the_alarm() -> None:
    watch, why = Watched(), "the reward source returned None, not a finite number"
    (alarm,) = watch.observe([member(Unscored(UnscoredKind.INVALID_REWARD, why))] * 20)
    assert alarm == f"20 of the last 20 trajectories have no reward (invalid_reward 20: {why})"
    first = {
        "event": "unscored",
        "trajectory": "1/0",
        "task": "t",
        "outcome": "invalid_reward",
        "why": why,
    }
    assert [event for event in watch.emitted if event["event"] == "unscored"] == [first]


def test_episodes_that_failed_before_they_were_scored_count() -> None:
    """A quarter of all episodes times out: a bias towards short ones that nobody would see."""
    failed = member(Unscored(UnscoredKind.ENVIRONMENT_FAILURE, "no end within 3600 s"), length=0)
    (alarm,) = Watched().observe([member(), member(), member(), failed] * 25)
    assert (
        "25 of the last 100 trajectories have no reward (environment_failure 25: no end within"
        " 3600 s)" in alarm
    )


def test_replayed_members_are_not_counted_again() -> None:
    assert Watched().observe([member(LOST, replayed=True)] * 50) == []


@pytest.mark.parametrize("flag", ["grader_error", "judge_invalid"])
def test_flags_of_failing_graders_alarm_early(flag: str) -> None:
    watch = Watched()
    assert watch.observe([member()] * 192 + [member(Scored(0.0, {}, (flag,)))] * 8) == []
    (alarm,) = watch.observe([member(Scored(0.0, {}, (flag,)))] * 8)
    assert alarm == f"16 of the last 208 scored trajectories carry the flag {flag}"
    assert watch.emitted[-1]["alarm"] == f"flags.{flag}"


def test_flags_about_the_policy_alarm_when_nearly_all_carry_them() -> None:
    bad = member(Scored(0.0, {}, ("unparsable",)))
    assert Watched().observe([bad] * 80 + [member()] * 20) == []
    assert len(Watched().observe([bad] * 95 + [member()] * 5)) == 1


def test_excluded_members_alarm_whether_they_have_a_reward_or_not() -> None:
    lonely = member(status=Status(TrajectoryState.EXCLUDED, "min_group"))
    filtered = member(status=Status(TrajectoryState.FILTERED, "all_equal"))
    (alarm,) = Watched().observe([lonely] * 30 + [filtered] * 30)
    assert alarm == "30 of the last 60 trajectories were excluded from training"


def test_what_is_lost_after_it_was_scored_is_excluded_and_emitted_with_the_next_group() -> None:
    watch, kept = Watched(), [member() for _ in range(40)]
    lost = {TrajectoryId(9, sample) for sample in range(20)}
    watch.observe(
        [
            *kept,
            *(
                replace(m, summary=replace(m.summary, id=id))
                for m, id in zip(kept, lost, strict=False)
            ),
        ]
    )
    watch.alarms.lost(lost)
    assert watch.emitted == [], "a checkpoint may be the one who found out: it must be saved first"
    assert watch.observe([member()]) == [
        "20 of the last 61 trajectories were excluded from training"
    ]


@pytest.mark.parametrize(
    ("settings", "bad", "message"),
    [
        (
            {"unscored": {"stop": 0.3}},
            member(LOST),
            r"20 of the last 40 .* no reward .*; alarms\.unscored\.stop is 0\.3",
        ),
        (
            {"excluded": {"stop": 0.3}},
            member(LOST, status=Status(TrajectoryState.EXCLUDED)),
            r"excluded from training; alarms\.excluded",
        ),
    ],
)
def test_a_limit_that_stops_ends_the_run(
    settings: dict[str, Any], bad: Member, message: str
) -> None:
    watch = Watched(**settings)
    watch.observe([member()] * 20)
    with pytest.raises(AlarmStopped, match=message):
        watch.observe([bad] * 20)


def test_a_stop_below_the_warning_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"stop \(0.1\) is below warn \(0.5\)"):
        Limit(warn=0.5, stop=0.1)


def test_a_data_source_that_is_hit_is_named() -> None:
    mixed = [member(LOST, "chart"), *[member(source="chart")], *[member(source="math")] * 6]
    (alarm,) = Watched(unscored={"warn": 0.5}).observe(mixed * 10)
    assert alarm.startswith("trajectories of chart have no reward more often (r = 0.6")


@pytest.mark.parametrize(("length", "word"), [(900, "longer"), (10, "shorter")])
def test_a_length_that_is_hit_is_named(length: int, word: str) -> None:
    (alarm,) = Watched(unscored={"warn": 0.5}).observe(
        [member(LOST, length=length), *[member()] * 5] * 10
    )
    assert alarm.startswith(
        f"{word} trajectories have no reward more often (r = {'' if length > 100 else '-'}1.00)"
    )


def test_what_was_never_played_explains_nothing_by_its_length() -> None:
    failed = member(Unscored(UnscoredKind.ENVIRONMENT_FAILURE), length=0)
    assert Watched(unscored={"warn": 1}).observe([member()] * 10 + [failed] * 50) == []


def test_correlation() -> None:
    assert math.isclose(correlation([1, 2, 3], [2, 4, 6]), 1)
    assert math.isclose(correlation([1, 2, 3], [3, 2, 1]), -1)
    assert correlation([1, 1, 1], [1, 2, 3]) == 0


def test_drift_is_emitted_after_some_steps_once_until_it_is_well() -> None:
    watch = Watched()
    assert watch.drift(0.5, 0.5) == [], "two steps prove nothing"
    (alarm,) = watch.drift(0.5)
    assert "differ by 5.00e-01 nats" in alarm
    assert watch.drift(0.5) == []
    assert watch.drift(1e-6, 1e-6, 1e-6, 1e-6) == []
    assert len(watch.drift(0.5)) == 1


def test_samples_of_older_weights_are_no_drift() -> None:
    watch = Watched()
    for _ in range(5):
        watch.alarms.step(
            {"actor/logprob_mismatch_mean": 0.5, "actor/logprob_mismatch_mean/lag_1": 0.5}
        )
    assert watch.emitted == []


def test_without_samples_of_the_present_weights_others_are_asked_for() -> None:
    watch, unseen = Watched(logprobs={"stop": 0.5}), []
    for _ in range(2 * UNSEEN_STEPS):
        watch.alarms.step({"actor/logprob_mismatch_mean/lag_1": 0.5})
        unseen.append(watch.alarms.unseen)
        if watch.alarms.unseen:
            watch.alarms.compared(5.0 if len(unseen) > UNSEEN_STEPS else None)
    assert [i for i, asked in enumerate(unseen, start=1) if asked] == [
        UNSEEN_STEPS,
        2 * UNSEEN_STEPS,
    ]
    watch.alarms.compared(5.0)
    with pytest.raises(AlarmStopped, match=r"alarms\.logprobs\.stop is 0\.5"):
        watch.alarms.compared(5.0)


def test_steps_of_which_one_is_fresh_ask_for_nothing() -> None:
    watch = Watched()
    for step in range(5 * UNSEEN_STEPS):
        watch.alarms.step({} if step % 5 else {DRIFT: 1e-6})
        assert not watch.alarms.unseen


def test_drift_may_stop_the_run_below_the_usual_warning() -> None:
    with pytest.raises(AlarmStopped, match=r"alarms\.logprobs\.stop is 0\.0001"):
        Watched(logprobs={"stop": 1e-4}).drift(2e-4, 2e-4, 2e-4)


def test_the_first_traceback_is_an_event_the_others_are_not() -> None:
    watch = Watched()
    watch.observe([member(CRASHED), member(CRASHED), member()])
    (emitted,) = [event for event in watch.emitted if event["event"] == "grader_error"]
    assert emitted["why"] == "KeyError: 'x'"
    assert emitted["traceback"] == CRASHED.trace


FAILED = Scored(0.0, {}, ("grader_error",), CRASHED.trace)


def test_a_grader_that_fails_on_all_of_the_first_group_ends_the_run() -> None:
    never_played = member(Unscored(UnscoredKind.ENVIRONMENT_FAILURE), length=0)
    watch = Watched()
    watch.observe([never_played])
    with pytest.raises(
        GraderBroken, match=r"my:Reward raised on each of the 3 trajectories.*: KeyError: 'x' \("
    ) as broken:
        watch.observe([member(CRASHED)] * 3 + [never_played])
    assert "reward.on_error=0.0" in str(broken.value)
    assert "try CONFIG" in str(broken.value)
    assert "Traceback" not in str(broken.value), "that was an event"


@pytest.mark.parametrize("given", [None, float("nan"), "0.5"])
def test_a_reward_that_returns_no_number_for_all_of_the_first_group_ends_the_run(
    given: object,
) -> None:
    none = member(as_outcome(given))
    with pytest.raises(
        GraderBroken,
        match=r"my:Reward returned no number on each of the 3 .*: the reward source returned",
    ):
        Watched().observe([none] * 3)
    silent = member(
        Unscored(UnscoredKind.INVALID_REWARD, "the environment's evaluate returned None")
    )
    assert Watched().observe([silent] * 3) == [], "of an environment or a judge, which may recover"


def test_with_the_failing_value_a_grader_that_fails_is_an_alarm_and_no_end() -> None:
    watch = Watched()
    assert watch.observe([member(FAILED)] * 8) == [
        "8 of the last 8 scored trajectories carry the flag grader_error"
    ]
    for answer in [member(FAILED)] * 2:
        watch.alarms.held_out(answer)
    watch.alarms.evaluated(first=True)


def test_a_held_out_failure_is_emitted_and_its_training_like_is_not_emitted_again() -> None:
    watch = Watched()
    for answer in (member(CRASHED), member(), member(CRASHED)):
        watch.alarms.held_out(answer)
    watch.alarms.evaluated(first=True)
    assert [event["event"] for event in watch.emitted] == ["grader_error", "unscored"]
    assert watch.emitted[0]["traceback"] == CRASHED.trace
    watch.observe([member(CRASHED), member()])
    assert watch.emitted == []


def test_a_grader_that_fails_on_all_of_the_first_evaluation_ends_the_run() -> None:
    watch, never_played = Watched(), member(Unscored(UnscoredKind.ENVIRONMENT_FAILURE), length=0)
    for first, answers in ((False, [CRASHED] * 3), (True, [CRASHED]), (True, [])):
        for answer in answers:
            watch.alarms.held_out(member(answer))
        watch.alarms.evaluated(first)
    for one in (never_played, member(CRASHED), member(CRASHED)):
        watch.alarms.held_out(one)
    with pytest.raises(
        GraderBroken, match=r"raised on each of the 2 answers to held-out rows: KeyError: 'x'"
    ):
        watch.alarms.evaluated(first=True)


def test_a_later_group_on_which_the_grader_fails_does_not_end_the_run() -> None:
    watch = Watched()
    watch.observe([member(CRASHED), member()])
    assert watch.observe([member(CRASHED)] * 4) == []


def test_one_trajectory_on_which_the_grader_fails_does_not_end_the_run() -> None:
    never_played = member(Unscored(UnscoredKind.ENVIRONMENT_FAILURE), length=0)
    watch = Watched()
    watch.observe([member(CRASHED), never_played])
    watch.observe([member()])
    watch.observe([member(CRASHED)] * 4)
    broken = Watched()
    broken.observe([member(CRASHED)])
    with pytest.raises(GraderBroken, match="on each of the 2 trajectories"):
        broken.observe([member(CRASHED)])


def test_reasons_are_the_most_frequent_kinds_with_an_example() -> None:
    lost = [LOST, CRASHED, replace(CRASHED, reason="KeyError: 'y'")]
    assert reasons(lost) == ["grader_error 2: my:Reward: KeyError: 'x'", "reward_unavailable 1"]
