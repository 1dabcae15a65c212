"""The group-relative advantage: formulas, invariances, exclusions."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import mean, stdev
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloop.config.explain import members
from rayloop.core.failures import ConfigError
from rayloop.core.groups import Status, TrajectoryState
from rayloop.grpo.advantage import advantages, build_advantage, over_step, with_advantages
from rayloop.grpo.settings import ADVANTAGES, AdvantageChoice, AdvantageSettings
from tests.unit.groups import make_group

rewards = st.lists(st.integers(-20, 20).map(lambda n: n / 4), min_size=2, max_size=12)
settings = st.builds(
    AdvantageSettings,
    normalize_std=st.booleans(),
    std=st.sampled_from(["unbiased", "population"]),
    std_floor=st.sampled_from([0.0, 1.0]),
)


def test_normalises_by_the_unbiased_std() -> None:
    result = advantages([1, 0, 0, 0], AdvantageSettings())
    assert result.values == pytest.approx([1.499997, -0.499999, -0.499999, -0.499999], abs=1e-6)
    assert (result.mean, result.std) == (0.25, 0.5)


def test_without_normalisation_is_the_distance_from_the_mean_and_std_is_still_reported() -> None:
    result = advantages([1.2, 1.1, 0, 0], AdvantageSettings(normalize_std=False))
    assert result.values == pytest.approx([0.625, 0.525, -0.575, -0.575])
    assert result.std == pytest.approx(0.665207, abs=1e-6)


def test_population_std_with_floor_and_its_reported_std_is_unbiased() -> None:
    result = advantages([11, 9, 3, 2], AdvantageSettings(std="population", std_floor=1.0, eps=0))
    assert result.values == pytest.approx([1.239423, 0.717561, -0.848026, -1.108958], abs=1e-6)
    assert result.std == pytest.approx(4.425306, abs=1e-6)
    floored = advantages([1, 0], AdvantageSettings(std="population", std_floor=1.0, eps=0))
    assert floored.values == (0.5, -0.5)


def test_binarised_baseline_keeps_the_score_in_the_numerator() -> None:
    binarised = AdvantageSettings(baseline="binarised", normalize_std=False)
    assert advantages([1.3, 1.1, 0, 0], binarised).values == pytest.approx([0.8, 0.6, -0.5, -0.5])
    assert advantages([1.3, 1.3], binarised).values == pytest.approx([0.3, 0.3])
    assert advantages([1.3, 1.1], AdvantageSettings(baseline="binarised")).values == pytest.approx(
        [0.3, 0.1]
    )


def test_the_binarised_baselines_mean_and_std_are_reported() -> None:
    binarised = AdvantageSettings(baseline="binarised", normalize_std=False)
    mixed, failures_alone = (
        advantages([-0.2, 1, -0.2, 0.5], binarised),
        advantages([0, 0], binarised),
    )
    assert (mixed.mean, mixed.std) == (1.0, 0.0)
    assert (failures_alone.mean, failures_alone.std) == (0.0, 0.0)
    assert advantages([1.3, 1.1, 0, 0], binarised).std == pytest.approx(0.577350, abs=1e-6)
    group = with_advantages(make_group(0, [1.3, 1.1, 0, 0]), binarised)
    assert (group.mean, group.std) == (0.5, pytest.approx(0.577350, abs=1e-6))


@given(rewards, settings, st.integers(-50, 50).map(float))
def test_a_constant_added_to_all_rewards_changes_nothing(
    values: list[float], settings: AdvantageSettings, shift: float
) -> None:
    shifted = advantages([value + shift for value in values], settings)
    assert shifted.values == pytest.approx(advantages(values, settings).values, abs=1e-9)


@given(rewards, st.sampled_from([0.5, 2.0, 1024.0]))
def test_normalised_advantages_do_not_depend_on_the_scale(
    values: list[float], scale: float
) -> None:
    exact = AdvantageSettings(eps=0)
    scaled = advantages([value * scale for value in values], exact)
    assert scaled.values == pytest.approx(advantages(values, exact).values, abs=1e-9)


@given(rewards, settings, st.randoms(use_true_random=False))
def test_each_reward_keeps_its_advantage_in_any_order(
    values: list[float], settings: AdvantageSettings, random
) -> None:
    order = list(range(len(values)))
    random.shuffle(order)
    straight, shuffled = (
        advantages(values, settings),
        advantages([values[i] for i in order], settings),
    )
    assert shuffled.values == tuple(straight.values[i] for i in order)
    assert (shuffled.mean, shuffled.std) == (straight.mean, straight.std)


@given(rewards, settings)
def test_advantages_sum_to_zero(values: list[float], settings: AdvantageSettings) -> None:
    assert sum(advantages(values, settings).values) == pytest.approx(0, abs=1e-6)


@given(st.floats(-1e300, 1e300), st.integers(2, 9), settings)
def test_equal_rewards_give_exact_zeros(value: float, n: int, settings: AdvantageSettings) -> None:
    assert advantages([value] * n, settings).values == (0.0,) * n


def test_rewards_within_the_tolerance_are_equal() -> None:
    tolerant = AdvantageSettings(tolerance=0.01)
    assert advantages([0.5, 0.51 - 1e-9], tolerant).values == (0.0, 0.0)
    assert advantages([0.5, 0.52], tolerant).values != (0.0, 0.0)


def test_huge_rewards_are_exact_and_impossible_ones_are_refused() -> None:
    assert advantages([1e300, -1e300], AdvantageSettings()).values == pytest.approx(
        [math.sqrt(0.5), -math.sqrt(0.5)]
    )
    with pytest.raises(ValueError, match="not finite"):
        advantages([1.7e308, -1.7e308, -1.7e308], AdvantageSettings(normalize_std=False))
    for broken in (math.nan, math.inf):
        with pytest.raises(ValueError, match="not all finite"):
            advantages([broken, 0.0], AdvantageSettings())
    with pytest.raises(ValueError, match="no rewards"):
        advantages([], AdvantageSettings())


def test_a_lone_sample_is_an_error_or_its_own_advantage() -> None:
    with pytest.raises(ConfigError, match=r"advantage\.kind: raw"):
        advantages([0.1], AdvantageSettings())
    with pytest.raises(ValueError, match="set singleton: raw"):
        AdvantageSettings(min_group=1)
    lone = advantages([0.1], AdvantageSettings(singleton="raw"))
    assert (lone.values, lone.mean, lone.std) == ((0.1,), 0.0, 1.0)


@given(rewards, st.integers(0, 12))
def test_an_unscored_member_is_excluded_and_changes_nothing_for_its_siblings(
    values: list[float], at: int
) -> None:
    at = min(at, len(values))
    with_loss = with_advantages(
        make_group(0, [*values[:at], None, *values[at:]]), AdvantageSettings()
    )
    alone = with_advantages(make_group(0, values), AdvantageSettings())
    lost = with_loss.members[at]
    assert lost.status == Status(TrajectoryState.EXCLUDED, "reward_unavailable")
    assert lost.advantage is None
    assert [member.advantage for member in with_loss.kept] == [
        member.advantage for member in alone.members
    ]
    assert (with_loss.mean, with_loss.std) == (alone.mean, alone.std)


def test_too_few_scored_members_are_excluded_together() -> None:
    group = with_advantages(make_group(0, [1.0, None, 0.0]), AdvantageSettings(min_group=3))
    statuses = [member.status for member in group.members]
    lonely = Status(TrajectoryState.EXCLUDED, "min_group")
    assert statuses == [lonely, Status(TrajectoryState.EXCLUDED, "reward_unavailable"), lonely]
    assert (group.mean, group.std) == (None, None)
    assert with_advantages(make_group(0, [None, None]), AdvantageSettings()).kept == ()


def test_a_group_of_one_trains_on_its_reward_when_asked_to() -> None:
    group = with_advantages(make_group(0, [0.7]), AdvantageSettings(min_group=1, singleton="raw"))
    assert group.kept[0].advantage == 0.7


def test_permuted_rewards_keep_their_values_but_leave_their_members() -> None:
    values = [i / 10 for i in range(10)]
    plain = with_advantages(make_group(0, values), AdvantageSettings())
    control = with_advantages(make_group(0, values), AdvantageSettings(permuted=True))
    assert sorted(m.advantage for m in control.members) == sorted(
        m.advantage for m in plain.members
    )
    assert [m.advantage for m in control.members] != [m.advantage for m in plain.members]
    assert [m.reward for m in control.members] == values
    assert control == with_advantages(make_group(0, values), AdvantageSettings(permuted=True))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("grpo", (1.5, -0.5, -0.5, -0.5)),
        ("dr_grpo", (0.75, -0.25, -0.25, -0.25)),
        ("chart_rvr", (0.75, -0.25, -0.25, -0.25)),
        ("binarised", (1.5, -0.5, -0.5, -0.5)),
        ("raw", (1.5, -0.5, -0.5, -0.5)),
    ],
)
def test_a_run_chooses_a_formula_by_its_name(kind: str, expected: tuple[float, ...]) -> None:
    chosen = build_advantage(AdvantageChoice.model_validate({"kind": kind}))
    group = with_advantages(make_group(0, [1.0, 0.0, 0.0, 0.0]), chosen)
    assert [member.advantage for member in group.members] == pytest.approx(expected, abs=1e-5)
    assert (chosen.min_group == 1) == (kind == "raw")


def test_every_formula_is_a_choice() -> None:
    assert AdvantageChoice.model_validate({}).kind == "grpo"
    (names,) = members(AdvantageChoice.model_fields["kind"].annotation)
    assert set(ADVANTAGES) == set(get_args(names))


STEP = ((1.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 0.0), (1.0, 0.0, 0.0, 0.0))


def over_the_step(kind: str, with_: dict[str, Any], *, without: int = 0) -> list[float]:
    """The advantages of ``STEP``, of which the first ``without`` members are filtered."""
    how = build_advantage(AdvantageChoice.model_validate({"kind": kind, "with": with_}))
    groups = [
        with_advantages(make_group(number, rewards), how) for number, rewards in enumerate(STEP)
    ]
    gone = {
        i: replace(groups[0].members[i], status=Status(TrajectoryState.FILTERED, "x"))
        for i in range(without)
    }
    return [
        m.advantage or 0.0
        for g in over_step([groups[0].map(gone), *groups[1:]], how)
        for m in g.kept
    ]


def test_batch_std_divides_by_the_deviation_of_the_steps_advantages() -> None:
    """ScaleRL's (arXiv:2510.13786); LitePPO's is that of the rewards."""
    differences = [reward - mean(group) for group in STEP for reward in group]
    assert (
        over_the_step("batch_std", {})[0]
        == pytest.approx(0.75 / stdev(differences), rel=1e-5)
        == pytest.approx(1.6583, abs=1e-4)
    )
    rewards = [reward for group in STEP for reward in group]
    assert over_the_step("batch_std", {"of": "rewards"})[0] == pytest.approx(
        0.75 / stdev(rewards), rel=1e-5
    )


def test_reinforce_pp_subtracts_the_steps_mean_which_partial_groups_have() -> None:
    assert over_the_step("reinforce_pp", {}) == pytest.approx(over_the_step("batch_std", {}))
    partial = over_the_step("reinforce_pp", {}, without=1)
    assert mean(partial) == pytest.approx(0.0, abs=1e-12)
    assert mean(over_the_step("batch_std", {}, without=1)) < -0.05
