"""What every advantage keeps to: the shipped ones, and the one of docs/bring_your_own/advantage.md."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayloop.config.explain import members
from rayloop.config.settings import check_components, load
from rayloop.core.failures import AdvantageBroken, ConfigError
from rayloop.core.groups import Credit, Group, Member, Scored
from rayloop.core.protocols import TrainItem
from rayloop.core.types import (
    EndReason,
    Sampling,
    Streams,
    Task,
    Trajectory,
    TrajectoryId,
    Turn,
    Version,
)
from rayloop.grpo.advantage import CheckedAdvantage, build_advantage, over_step, with_advantages
from rayloop.grpo.batch import make_sample, segmented
from rayloop.grpo.settings import AdvantageChoice
from rayloop.run.config import RunConfig
from tests.support.pages import write_snippets
from tests.unit.groups import make_member

(_kinds,) = members(AdvantageChoice.model_fields["kind"].annotation)
KINDS: tuple[str, ...] = get_args(_kinds)
PAGE = "the page's"
EVERY = (*KINDS, PAGE)
WITH = {"gdpo": {"weights": {"iou": 1.0, "format": 0.5}}}

NOT_SHIFTED = {
    "maxrl": "divides by the mean",
    "binarised": "asks whether a score is 0",
    PAGE: "pays for rewards above 0",
}
NOT_PERMUTED = {"permuted": "draws which member has which reward"}
NOT_ZERO = {
    "binarised": "rewards equal successes",
    "turns": "discounts returns by turn",
    "gigpo": "discounts returns by turn",
}


@pytest.fixture(autouse=True, scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("page")
    write_snippets("bring_your_own/advantage.md", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.chdir(folder)
        yield folder


def advantage(kind: str, **with_: Any) -> CheckedAdvantage:
    chosen = {"use": "my_advantages:quick"} if kind == PAGE else {"kind": kind}
    return build_advantage(
        AdvantageChoice.model_validate({**chosen, "with": WITH.get(kind, {}) | with_})
    )


def member(i: int, reward: float, turns: int = 2, seed: int = 0, *, shift: float = 0.0) -> Member:
    """``turns`` sampled turns, of which the first saw what those of the other members saw.

    ``shift`` is added to the reward, to its components and to what the environment paid for the
    last turn.
    """
    chance = random.Random(100 * seed + i)
    paid = [chance.randint(0, 4) / 4 for _ in range(turns)]
    if paid:
        paid[-1] += shift
    return make_member(
        TrajectoryId(7, i),
        Scored(reward + shift, {"iou": reward + shift, "format": chance.randint(0, 1) + shift}),
        turns=turns,
        turn_rewards=tuple(paid),
        states=tuple(
            ["start", *(f"screen {chance.randint(0, 2)}" for _ in range(turns - 1))][:turns]
        ),
    )


def group(
    rewards: Sequence[float],
    turns: Sequence[int] | None = None,
    seed: int = 0,
    *,
    shift: float = 0.0,
) -> list[Member]:
    turns = turns or [2] * len(rewards)
    return [
        member(i, r, n, seed, shift=shift)
        for i, (r, n) in enumerate(zip(rewards, turns, strict=True))
    ]


def values(how: CheckedAdvantage, *groups: Sequence[Member]) -> list[list[tuple[float, ...]]]:
    """Of each member of a step, its advantages: one, or one for each turn."""
    found = how.over_step([how.credits(one) for one in groups])
    return [[credit.turns or (credit.advantage,) for credit in credits] for credits in found]


def near(found: Any, expected: Any) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a == pytest.approx(b, abs=1e-9)


each = pytest.mark.parametrize("kind", EVERY)
rewards = st.lists(st.integers(0, 8).map(lambda n: n / 4), min_size=2, max_size=8)
quick = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


@each
@quick
@given(rewards, st.integers(1, 40).map(float))
def test_a_constant_added_to_every_reward_changes_nothing(
    kind: str, values_: list[float], shift: float
) -> None:
    """With one turn each: a discount weighs a constant by the turns behind it."""
    turns = [1] * len(values_)
    before = values(advantage(kind), group(values_, turns))
    after = values(advantage(kind), group(values_, turns, shift=shift))
    if kind in NOT_SHIFTED:
        return
    if kind in (
        "batch_std",
        "reinforce_pp",
        "gdpo",
        "grpo",
        "raw",
        "permuted",
    ):  # 1e-6 beside a deviation that rounds
        assert after[0] == [pytest.approx(one, abs=1e-7) for one in before[0]]
    else:
        near(after[0], before[0])


def test_the_kinds_that_a_constant_changes_are_those_named() -> None:
    for kind in NOT_SHIFTED:
        before, after = (
            values(advantage(kind), group([0.0, 1.0, 2.0], shift=shift)) for shift in (0.0, 5.0)
        )
        assert before != after, NOT_SHIFTED[kind]


@each
@quick
@given(rewards, st.randoms(use_true_random=False))
def test_each_member_keeps_its_advantage_in_any_order(
    kind: str, values_: list[float], chance: Any
) -> None:
    made = group(values_, [1 + i % 3 for i in range(len(values_))], seed=3)
    order = list(range(len(made)))
    chance.shuffle(order)
    (straight,), (shuffled,) = (
        values(advantage(kind), made),
        values(advantage(kind), [made[i] for i in order]),
    )
    if kind in NOT_PERMUTED:
        assert sorted(shuffled) == sorted(straight), NOT_PERMUTED[kind]
    else:
        near(shuffled, [straight[i] for i in order])


@each
def test_equal_members_have_equal_advantages(kind: str) -> None:
    made = group([0.25, 1.0, 0.5], seed=5)
    twin = replace(made[1], summary=replace(made[1].summary, id=TrajectoryId(7, 9)))
    (found,) = values(advantage(kind), [made[0], made[1], twin, made[2]])
    if kind not in NOT_PERMUTED:
        assert found[1] == found[2]


@each
@given(st.integers(-8, 8).map(lambda n: n / 10), st.integers(2, 6))
@quick
def test_equal_rewards_give_zeros(kind: str, reward: float, n: int) -> None:
    same = member(0, abs(reward) if kind == "maxrl" else reward, 3)
    (found,) = values(
        advantage(kind),
        [replace(same, summary=replace(same.summary, id=TrajectoryId(7, i))) for i in range(n)],
    )
    assert all(one == found[0] for one in found)
    if kind not in NOT_ZERO:
        assert set(found) == {(0.0,)}


def test_the_kinds_that_equal_rewards_teach_are_those_named() -> None:
    for kind, why in NOT_ZERO.items():
        (found,) = values(advantage(kind), group([2.0, 2.0, 2.0]))
        assert any(any(one) for one in found), why


@each
@pytest.mark.parametrize("broken", [math.inf, -math.inf, math.nan])
def test_a_reward_that_is_not_finite_ends_the_run_with_its_name(kind: str, broken: float) -> None:
    if kind == "distill":
        pytest.skip("distill reads no reward")
    with pytest.raises(
        AdvantageBroken,
        match=(
            rf"algorithm.advantage: {'my_advantages:quick' if kind == PAGE else kind}"
            r" .*(finite|below)|maxrl"
        ),
    ):
        values(advantage(kind), group([0.5, broken, 1.0]))


@each
def test_trajectories_may_differ_in_turns_and_have_none(kind: str) -> None:
    """One advantage for all tokens, or as many as turns."""
    turns = [0, 1, 5, 2]
    (found,) = values(advantage(kind), group([0.0, 1.0, 0.5, 0.25], turns))
    whole = all(len(one) == 1 for one in found)
    assert whole or [len(one) for one in found[1:]] == turns[1:]


@each
def test_the_step_keeps_each_groups_members(kind: str) -> None:
    """Also where filters have taken members out of groups, or all of them."""
    how = advantage(kind)
    groups = [
        with_advantages(Group(n, Task("task", ()), tuple(group([0.0, 1.0, 0.5], seed=n))), how)
        for n in range(3)
    ]
    after = over_step(groups, how)
    assert [[m.summary for m in one.members] for one in after] == [
        [m.summary for m in one.members] for one in groups
    ]
    assert all(m.credit is not None for one in after for m in one.members)
    assert how.over_step([[], [Credit(1.0, base=1.0)]])[0] == []
    assert how.over_step([]) == []


@each
def test_a_group_that_is_too_small_is_excluded(kind: str) -> None:
    how = advantage(kind)
    lone = with_advantages(Group(0, Task("task", ()), tuple(group([0.5]))), how)
    assert bool(lone.kept) == (how.min_group == 1) == (kind in ("raw", "distill"))
    if not lone.kept:
        assert [m.status.reason for m in lone.members if m.status] == ["min_group"]


# Answers that are none ----------------------------------------------------------------------------


def few(members: Sequence[Member]) -> list[float]:
    return [0.0]


def words(members: Sequence[Member]) -> list[str]:
    return ["good"] * len(members)


def endless(members: Sequence[Member]) -> list[float]:
    return [math.inf] * len(members)


def turns_of_another(members: Sequence[Member]) -> list[Credit]:
    return [Credit.of_turns([1.0, 2.0, 3.0])] * len(members)


class Step:
    """Zeros, and an answer for the step."""

    min_group = 3

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer

    def credits(self, members: Sequence[Member]) -> list[float]:
        return [0.0] * len(members)

    def over_step(self, steps: Sequence[Sequence[Credit]]) -> Any:
        return self.answer(steps)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("few", "returned 1 advantages for 2 members of group 7"),
        ("words", "raised on group 7 .*ValueError"),
        ("endless", "returned Credit.* for trajectory .*, which is not finite"),
        ("turns_of_another", "returned 3 advantages for the 2 turns of trajectory"),
    ],
)
def test_another_answer_is_an_error_that_names_the_advantage(name: str, said: str) -> None:
    how = build_advantage(AdvantageChoice(use=f"{__name__}:{name}"))
    with pytest.raises(AdvantageBroken, match=rf"algorithm.advantage: {__name__}:{name} {said}"):
        how.credits(group([0.0, 1.0]))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda steps: steps[:1], r"returned \[1\] credits for groups of \[1, 2\]"),
        (lambda steps: [steps[1], steps[0]], r"returned \[2, 1\] credits for groups of \[1, 2\]"),
        (
            lambda steps: [[Credit(math.nan)] * len(one) for one in steps],
            r"returned Credit.advantage=nan.*; expected a Credit of finite",
        ),
        (lambda steps: [[0.5] * len(one) for one in steps], "returned 0.5; expected a Credit"),
        (lambda steps: None, "raised TypeError"),
        (lambda steps: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_another_answer_for_the_step_is_an_error_too(answer: Any, said: str) -> None:
    how = CheckedAdvantage(Step(answer), "algorithm.advantage: mine:Step")
    assert how.min_group == 3
    with pytest.raises(AdvantageBroken, match=f"algorithm.advantage: mine:Step: over_step {said}"):
        how.over_step([[Credit(0.0)], [Credit(0.0)] * 2])


@pytest.mark.parametrize("kind", ["turns", "gigpo"])
@pytest.mark.parametrize("paid", [1, 3])
def test_rewards_of_other_turns_are_refused_with_the_trajectory(kind: str, paid: int) -> None:
    first, second = group([0.0, 1.0])
    wrong = replace(first, summary=replace(first.summary, turn_rewards=(0.5,) * paid))
    with pytest.raises(
        AdvantageBroken, match=rf"trajectory .* has {paid} turn_rewards for 2 sampled turns"
    ):
        advantage(kind).credits([wrong, second])


def test_gigpo_needs_states_and_gdpo_its_components() -> None:
    first, second = group([0.0, 1.0])
    with pytest.raises(AdvantageBroken, match=r"by their states, which trajectory .* has not"):
        advantage("gigpo").credits(
            [replace(first, summary=replace(first.summary, states=())), second]
        )
    with pytest.raises(
        AdvantageBroken, match=r"'colour'; the components of trajectory .* are: iou, format"
    ):
        advantage("gdpo", weights={"colour": 1.0}).credits([first, second])


def test_gdpo_leaves_out_a_component_that_is_equal() -> None:
    """Its scale stays that of the other, which the step's deviation then sets to 1."""
    made = [member(i, reward) for i, reward in enumerate([0.0, 1.0, 0.25, 0.5])]
    same = [
        replace(m, outcome=replace(m.outcome, components={"iou": m.reward, "format": 1.0}))
        for m in made
    ]  # type: ignore[type-var]
    both = values(advantage("gdpo"), same)
    alone = values(advantage("gdpo", weights={"iou": 3.0}), same)
    assert both[0] == [pytest.approx(one, abs=1e-5) for one in alone[0]]


# From the credit to the tokens --------------------------------------------------------------------


def played(lengths: Sequence[int], restarts: Sequence[int] = ()) -> Trajectory:
    """Turns of ``lengths`` sampled tokens, each behind two of context; before those in ``restarts``
    all is forgotten.
    """
    turns: list[Turn] = []
    for i, n in enumerate(lengths):
        turns.append(Turn("user", (1, 2), restart=i in restarts))
        turns.append(Turn("assistant", (3,) * n, (), (-1.0,) * n, Version(0, 0)))
    return Trajectory(TrajectoryId(7, 0), 0, "task", 0, tuple(turns), Sampling(), EndReason.DONE)


def tokens(item: TrainItem) -> list[float]:
    found = []
    for part in segmented([[item]])[0]:
        flat = part.trajectory.flatten()
        sample = make_sample(part, flat, torch.arange(len(flat.token_ids))[None])
        assert len(sample.advantages) == len(sample.predict)
        found += sample.advantages.tolist()
    return found


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6).filter(any), st.sets(st.integers(1, 5)))
@settings(max_examples=60)
def test_a_turns_advantage_is_that_of_its_tokens_in_every_segment(
    lengths: list[int], restarts: set[int]
) -> None:
    trajectory = played(lengths, sorted(restarts))
    credit = Credit.of_turns([float(i + 1) for i in range(len(lengths))])
    item = TrainItem(trajectory, credit.advantage, np.zeros(sum(lengths)), turns=credit.turns)
    assert tokens(item) == [float(i + 1) for i, n in enumerate(lengths) for _ in range(n)]
    assert tokens(replace(item, turns=())) == pytest.approx([credit.advantage] * sum(lengths))


@pytest.mark.parametrize("restarts", [(), (1, 2)])
@pytest.mark.parametrize("count", [2, 4])
def test_advantages_of_other_turns_are_refused_in_segments_too(
    count: int, restarts: tuple[int, ...]
) -> None:
    item = TrainItem(played([2, 1, 1], restarts), 0.5, turns=(0.5,) * count)
    with pytest.raises(ValueError, match=f"{count} advantages for 3 sampled turns"):
        tokens(item)


def test_a_turn_alone_may_teach_where_the_mean_is_zero() -> None:
    credit = Credit.of_turns([1.0, -1.0])
    trajectory = played([1, 1])
    flat = trajectory.flatten()
    item = TrainItem(trajectory, credit.advantage, turns=credit.turns)
    assert credit.advantage == 0.0
    assert make_sample(item, flat, torch.arange(6)[None]).teaches
    assert not make_sample(
        replace(item, streams=Streams(rl=0.0)), flat, torch.arange(6)[None]
    ).teaches
    assert make_sample(
        replace(item, streams=Streams(rl=0.0, ce=1.0)), flat, torch.arange(6)[None]
    ).teaches


# The page -----------------------------------------------------------------------------------------


def test_thepages_configuration_is_one(page: Path) -> None:
    lines = (page / "advantage.yaml").read_text(encoding="utf-8")
    reward = "reward: {source: {use: 'rayloop.recipes.digits.data:SortReward'}}\n"
    (page / "run.yaml").write_text(
        f"name: own\nsteps: 1\nmodel: {{path: m}}\ndata: {{train: t}}\n{reward}{lines}",
        encoding="utf-8",
    )
    config = load(page / "run.yaml", [], RunConfig)
    check_components(config)
    (found,) = values(build_advantage(config.algorithm.advantage), group([1.0, 0.0]))
    assert found == [
        (pytest.approx(0.4996),),
        (pytest.approx(-0.4996),),
    ], "four tokens of a right answer cost 0.2 * 4 / 1000"
    with pytest.raises(ConfigError, match="does not take the arguments in `with`"):
        advantage(PAGE, malus=1.0)
