"""Partial dynamic filtering: what filters remove and count, who gets into a step, when refilling
ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloop.core.failures import GenerationBudgetSpent
from rayloop.core.groups import Group, Scored, Status, TrajectoryState
from rayloop.core.types import EndReason, Task, TrajectoryId, Version
from rayloop.grpo.advantage import build_advantage, with_advantages
from rayloop.grpo.filters import (
    EqualRewards,
    ImagesConsistent,
    KeepEndReasons,
    MaxLength,
    PositiveNegativeAdvantage,
    ToolImage,
)
from rayloop.grpo.selection import apply_filters, enough, select
from rayloop.grpo.settings import AdvantageChoice, AdvantageSettings, FilteringSettings
from rayloop.run.records.step_metrics import Collected, step_metrics
from tests.unit.groups import make_group, make_member

ALL = (
    EqualRewards(),
    ToolImage(),
    ImagesConsistent(),
    MaxLength(tokens=10),
    KeepEndReasons(),
    PositiveNegativeAdvantage(),
)


def scored(number: int, rewards: Sequence[float | None], **changes: object) -> Group:
    return with_advantages(make_group(number, rewards, **changes), AdvantageSettings())


@st.composite
def groups(draw: st.DrawFn, number: int = 0) -> Group:
    """A group with advantages whose members differ in everything a filter looks at."""
    group = scored(number, draw(st.lists(st.sampled_from([None, 0.0, 0.5, 1.0]), max_size=6)))
    summaries = [
        replace(
            member.summary,
            length=draw(st.sampled_from([9, 10, 11])),
            observation_images=draw(st.integers(0, 1)),
            images_consistent=draw(st.booleans()),
            end_reason=draw(st.sampled_from(list(EndReason))),
        )
        for member in group.members
    ]
    return group.map(
        {i: replace(group.members[i], summary=summary) for i, summary in enumerate(summaries)}
    )


def reasons(group: Group) -> list[str | None]:
    return [None if member.status is None else member.status.reason for member in group.members]


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([1.0, 1.0], "all_right"),
        ([1.2, 1.2], "all_right"),
        ([0.0, 0.0], "all_wrong"),
        ([0.5, 0.5], "all_equal"),
    ],
)
def test_equal_rewards_are_counted_by_what_they_are(rewards: list[float], reason: str) -> None:
    assert [m.status for m in apply_filters(scored(0, rewards), (EqualRewards(),)).members] == [
        Status(TrajectoryState.FILTERED, reason)
    ] * 2


EQUAL_REWARDS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "gdpo": (
        {"weights": {"a": 1.0, "b": 0.5}},
        [{"components": {"a": 1.0, "b": 0.0}}, {"components": {"a": 0.2, "b": 0.8}}],
    ),
    "gigpo": ({}, [{"turns": 2, "states": ("x", "y")}, {"turns": 3, "states": ("x", "z", "y")}]),
    "turns": ({}, [{"turns": 2}, {"turns": 3}]),
    "distill": ({}, [{}, {}]),
    "grpo": ({}, [{}, {}]),
    "rloo": ({}, [{}, {}]),
    "reinforce_pp": ({}, [{}, {}]),
    "batch_std": ({}, [{}, {}]),
    "maxrl": ({}, [{}, {}]),
}
TEACH = ("gdpo", "gigpo", "turns", "distill")
"""Kinds that learn from these groups, all of whose rewards are 1."""


@pytest.mark.parametrize("kind", EQUAL_REWARDS)
def test_a_group_of_equal_rewards_stays_where_its_advantage_teaches(kind: str) -> None:
    with_, members = EQUAL_REWARDS[kind]
    how = build_advantage(AdvantageChoice.model_validate({"kind": kind, "with": with_}))
    made = tuple(
        make_member(TrajectoryId(0, i), Scored(1.0, one.pop("components", {})), **one)
        for i, one in enumerate(map(dict, members))
    )
    group = with_advantages(Group(0, Task("t", ()), made), how)
    kept = apply_filters(group, (EqualRewards(),)).kept
    assert len(kept) == (2 if kind in TEACH else 0)
    equal = step_metrics(Collected((), (group,)), target=2)["rollout/equal_rewards"]
    assert equal == (0.0 if kind in TEACH else 1.0)


def test_rewards_within_the_tolerance_are_a_group_without_contrast() -> None:
    group = with_advantages(make_group(0, [0.5, 0.55]), AdvantageSettings(tolerance=0.1))
    assert reasons(apply_filters(group, (EqualRewards(),))) == ["all_equal", "all_equal"]


def test_a_filter_that_asks_for_advantages_says_when_there_are_none() -> None:
    with pytest.raises(ValueError, match="filters come after advantages"):
        apply_filters(make_group(0, [1.0, 1.0]), (EqualRewards(),))


def test_turns_that_share_a_state_are_counted_beside_the_first_ones() -> None:
    """Two of four later turns share a screen; the first turn of both began at the prompt."""

    def shared(*states: tuple[str, ...]) -> dict[str, float]:
        made = [
            make_member(TrajectoryId(0, i), Scored(float(i)), turns=len(s), states=s)
            for i, s in enumerate(states)
        ]
        return step_metrics(Collected((), (Group(0, Task("t", ()), tuple(made)),)), target=2)

    assert shared(("p", "a", "b", "c"), ("p", "a"))["rollout/shared_states"] == 0.5
    assert shared(("p", "12:00", "12:01"), ("p", "12:02"))["rollout/shared_states"] == 0.0
    assert "rollout/shared_states" not in shared(("p",), ("p",))


def test_an_environment_that_repeats_has_the_same_states_after_the_same_actions() -> None:
    def repeated(*played: tuple[str, str]) -> float | None:
        """The share for members with these states and actions, a letter each."""
        made = [
            make_member(
                TrajectoryId(0, i),
                Scored(float(i)),
                turns=len(states),
                states=tuple(states),
                actions=tuple(actions),
            )
            for i, (states, actions) in enumerate(played)
        ]
        collected = Collected((), (Group(0, Task("t", ()), tuple(made)),))
        return step_metrics(collected, target=2).get("rollout/repeated_states")

    assert repeated(("pab", "xyz"), ("pab", "xyw")) == 1.0
    # Each screen shows another time.
    assert repeated(("p12", "xyz"), ("p34", "xyz")) == 0.0
    # The second turns repeat. One third turn of three differs from the other two, after the same.
    third = (1 / 2 + 1 / 2 + 0) / 3
    assert repeated(("pab", "xyz"), ("pab", "xyz"), ("pac", "xyz")) == (3 * 1.0 + 3 * third) / 6
    # What they did differs at once, or nothing follows.
    assert repeated(("pa", "xy"), ("pb", "zy")) is None
    assert repeated(("p", "x"), ("p", "x")) is None


def test_different_rewards_and_lone_samples_pass_the_group_filter() -> None:
    assert len(apply_filters(scored(0, [0.0, 0.5]), (EqualRewards(),)).kept) == 2
    lone = with_advantages(make_group(0, [1.0]), AdvantageSettings(min_group=1, singleton="raw"))
    assert len(apply_filters(lone, (EqualRewards(),)).kept) == 1


def test_group_filters_see_the_whole_group_wherever_they_stand() -> None:
    group = scored(0, [1.0, 0.0, 0.0])
    long = replace(group.members[0], summary=replace(group.members[0].summary, length=11))
    filtered = apply_filters(group.map({0: long}), (MaxLength(tokens=10), EqualRewards()))
    assert reasons(filtered) == ["max_length", None, None]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"observation_images": 0}, "tool_image"),
        ({"images_consistent": False}, "images_consistent"),
        ({"length": 11}, "max_length"),
        ({"end_reason": EndReason.OVER_LENGTH}, "end_reason"),
    ],
)
def test_trajectory_filters_leave_a_partial_group_with_its_advantages(
    change: dict[str, object], reason: str
) -> None:
    group = scored(0, [1.0, 0.0, 0.0])
    odd = replace(group.members[1], summary=replace(group.members[1].summary, **change))
    filtered = apply_filters(group.map({1: odd}), ALL)
    assert reasons(filtered) == [None, reason, None]
    assert [m.advantage for m in filtered.members] == [m.advantage for m in group.members]
    assert filtered.std == group.std


def test_a_right_answer_below_the_mean_is_dropped() -> None:
    assert reasons(apply_filters(scored(0, [1.0, 0.25, 0.0]), (PositiveNegativeAdvantage(),))) == [
        None,
        "positive_negative_advantage",
        None,
    ]
    with pytest.raises(ValueError, match="no advantage yet"):
        apply_filters(make_group(0, [1.0, 0.0]), (PositiveNegativeAdvantage(),))


@given(groups(), st.lists(st.sampled_from(ALL), max_size=8))
def test_filters_only_remove_and_change_nothing_else(group: Group, filters: list[object]) -> None:
    filtered = apply_filters(group, filters)
    for before, after in zip(group.members, filtered.members, strict=True):
        assert replace(after, status=before.status) == before
        assert after.status == before.status or (
            before.kept and after.status.state == TrajectoryState.FILTERED
        )
    assert (
        apply_filters(filtered, [f for f in filters if not isinstance(f, EqualRewards)]) == filtered
    )


ready_groups = st.lists(st.integers(0, 30), unique=True, max_size=8).flatmap(
    lambda issues: st.tuples(*(groups(number) for number in issues))
)
filtering = st.builds(FilteringSettings, ranking=st.sampled_from(["std", "fifo"]))


@given(ready_groups, st.integers(0, 20), filtering, st.randoms(use_true_random=False))
def test_select_takes_the_target_and_ignores_the_order_of_its_input(
    ready: tuple[Group, ...], target: int, settings: FilteringSettings, random
) -> None:
    selection = select(ready, target, settings)
    kept = sum(len(group.kept) for group in ready)
    assert sum(len(group.kept) for group in selection.train) == min(target, kept)
    assert all(group.kept for group in selection.train)
    issues = [group.number for group in selection.train]
    assert issues == sorted(issues)
    whole = {group.number: group for group in ready}
    assert all(whole[group.number] == group for group in selection.left_over)
    assert {g.number for g in ready if g.kept} == {
        *issues,
        *(g.number for g in selection.left_over),
    }
    shuffled = list(ready)
    random.shuffle(shuffled)
    assert select(shuffled, target, settings) == selection


def test_the_largest_spread_trains_first_and_the_cut_is_surplus() -> None:
    plain, wide = scored(3, [1.0, 0.0, 0.0, 0.0]), scored(7, [4.0, 0.0, 0.0])
    rest = scored(9, [1.0, 0.0, 0.0, 0.0])
    selection = select([rest, wide, plain], 4, FilteringSettings())
    assert [group.number for group in selection.train] == [3, 7]
    assert selection.train[1] == wide
    assert [m.status for m in selection.train[0].members] == [None] + [
        Status(TrajectoryState.SURPLUS, "cut")
    ] * 3
    assert selection.train[0].kept[0].summary.id == TrajectoryId(3, 0)
    assert selection.left_over == (rest,)


@pytest.mark.parametrize("kind", ["gdpo", "gigpo", "turns"])
def test_a_group_of_equal_rewards_ranks_by_what_its_advantages_differ(kind: str) -> None:
    """It is asked for later than a group whose advantages differ less, and is trained first."""
    with_, members = EQUAL_REWARDS[kind]
    how = build_advantage(AdvantageChoice.model_validate({"kind": kind, "with": with_}))
    outcomes = [Scored(1.0, one.get("components", {})) for one in members]
    summaries = [
        {name: value for name, value in one.items() if name != "components"} for one in members
    ]
    alike = [(outcomes[0], summaries[0])] * 3
    other = (outcomes[1], summaries[1])

    def made(number: int, played: Sequence[tuple[Scored, dict[str, Any]]]) -> Group:
        rows = tuple(
            make_member(TrajectoryId(number, i), outcome, **summary)
            for i, (outcome, summary) in enumerate(played)
        )
        return with_advantages(Group(number, Task("t", ()), rows), how)

    flat, differing = made(1, alike), made(2, [*alike[:2], other])
    assert select([flat, differing], 3, FilteringSettings()).train == (differing,)
    assert select([flat, differing], 3, FilteringSettings()).left_over == (flat,)


def test_issue_order_ignores_the_spread_and_ranking_needs_one() -> None:
    narrow, wide = scored(1, [0.5, 0.0]), scored(2, [1.0, 0.0])
    assert select([wide, narrow], 2, FilteringSettings(ranking="fifo")).train == (narrow,)
    with pytest.raises(ValueError, match="no std"):
        select([make_group(0, [1.0])], 1, FilteringSettings())


def test_where_groups_are_carried_over_none_is_passed_over_until_it_is_stale() -> None:
    old = [
        scored(4, [0.5, 0.0], first_version=Version(0, 1)),
        scored(5, [0.6, 0.0], first_version=Version(0, 1)),
    ]
    new = scored(3, [9.0, 0.0], first_version=Version(0, 2))
    chosen = select([new, *old], 4, FilteringSettings(), oldest_first=True)
    assert [group.number for group in chosen.train] == [4, 5]
    chosen = select([new, *old], 2, FilteringSettings(), oldest_first=True)
    assert [group.number for group in chosen.train] == [5], "of one version, the largest spread"
    replayed = new.map({i: replace(member, replayed=True) for i, member in enumerate(new.members)})
    assert select([replayed, *old], 4, FilteringSettings(), oldest_first=True).left_over == (
        replayed,
    )
    partial = new.map(
        {
            0: replace(
                new.members[0], summary=replace(new.members[0].summary, first_version=Version(0, 0))
            )
        }
    )
    assert select([partial, *old], 2, FilteringSettings(), oldest_first=True).train == (partial,)
    without = partial.map(
        {0: replace(partial.members[0], status=Status(TrajectoryState.FILTERED, "max_length"))}
    )
    assert select([without, *old], 4, FilteringSettings(), oldest_first=True).left_over == (
        without,
    )


def test_refilling_goes_on_within_the_budget_then_trains_less_or_stops_with_counts() -> None:
    settings = FilteringSettings(max_generation_batches=3, min_fraction=0.5)
    assert enough(8, 8, 1, settings, {})
    assert not enough(0, 8, 2, settings, {})
    assert enough(4, 8, 3, settings, {})
    with pytest.raises(
        GenerationBudgetSpent, match=r"3 of 8 .* 3 generation batches.*filtered\[all_wrong\] 21"
    ):
        enough(3, 8, 3, settings, {"filtered[all_wrong]": 21})


def test_a_budget_that_cut_answers_spent_is_not_blamed_on_the_tasks() -> None:
    settings, counts = FilteringSettings(max_generation_batches=3), {"filtered[all_wrong]": 256}
    said = r"All of these 256 answers were cut.*raise rollout\.sampling\.max_tokens"
    with pytest.raises(GenerationBudgetSpent, match=said) as all_cut:
        enough(0, 8, 3, settings, counts, cut=256)
    assert "choose tasks" not in str(all_cut.value)
    with pytest.raises(GenerationBudgetSpent, match="200 of these 256 answers were cut"):
        enough(0, 8, 3, settings, counts, cut=200)
    with pytest.raises(
        GenerationBudgetSpent, match="choose tasks that the policy sometimes solves"
    ):
        enough(0, 8, 3, settings, counts, cut=20)


@given(st.integers(1, 64), st.integers(1, 6), st.data())
def test_refilling_always_ends(target: int, budget: int, data: st.DataObject) -> None:
    settings = FilteringSettings(max_generation_batches=budget)
    survivors = 0
    for batch in range(1, budget + 1):
        survivors += data.draw(st.integers(0, 8))
        try:
            ended = enough(survivors, target, batch, settings, {})
        except GenerationBudgetSpent:
            ended = True
        if ended:
            break
    assert ended, "more was asked for beyond the budget"
