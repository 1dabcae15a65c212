"""Penalties for length and repetition."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from pydantic import ValidationError

from rayloop.core.groups import Outcome, Scored, Unscored, UnscoredKind
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import EndReason, Sampling, Task, Trajectory, TrajectoryId, Turn, Version
from rayloop.rewards.shaped import ShapedReward, overlong, repeated

TASK = Task("t", ())


def by_text(trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
    """The reward that is written in the text."""
    word = context.texts[-1].split()[0]
    return Unscored(UnscoredKind.TIMEOUT) if word == "lost" else Scored(float(word), {"word": 1.0})


def answer(tokens: int) -> Trajectory:
    turn = Turn("assistant", (1,) * tokens, (), (0.0,) * tokens, Version(0, 0))
    return Trajectory(TrajectoryId(0, 0), 0, "t", 0, (turn,), Sampling(), EndReason.DONE)


def scored(texts: Sequence[str], lengths: Sequence[int], **settings: object) -> list[Outcome]:
    source = {"use": "tests.unit.rewards.test_shaped:by_text"}
    reward = ShapedReward(
        ShapedReward.Settings.model_validate({"source": source, "max_tokens": 100, **settings})
    )
    contexts = [ScoreContext(0, [text]) for text in texts]
    return asyncio.run(reward.score_group([answer(n) for n in lengths], TASK, contexts))


def test_the_soft_punishment_falls_from_0_to_minus_1_over_the_last_tokens() -> None:
    assert [overlong(n, 100, 20) for n in (1, 80, 85, 90, 100, 101)] == [
        0.0,
        0.0,
        -0.25,
        -0.5,
        -1.0,
        -1.0,
    ]
    (outcome,) = scored(["1"], [90], overlong=20)
    assert isinstance(outcome, Scored)
    assert (outcome.value, outcome.components) == (
        0.5,
        {"word": 1.0, "unshaped": 1.0, "overlong": -0.5},
    )


def test_repetition_counts_word_n_grams_that_occurred_before() -> None:
    assert repeated("a b c d", 3) == 0.0
    assert repeated("a b a b a b", 2) == pytest.approx(3 / 5)
    assert repeated("a", 3) == 0.0
    (outcome,) = scored(["1 b 1 b 1 b"], [6], repetition=0.5, ngram=2)
    assert isinstance(outcome, Scored)
    assert outcome.value == pytest.approx(1 - 0.5 * 3 / 5)


def test_length_costs_its_share_of_the_groups_longest_times_its_mean_reward() -> None:
    outcomes = scored(["1", "1", "0.25", "lost"], [100, 200, 400, 900], length=0.5)
    values = [outcome.value for outcome in outcomes if isinstance(outcome, Scored)]
    assert values == pytest.approx([1 - 0.5 * 0.75 / 4, 1 - 0.5 * 0.75 / 2, 0.25 - 0.5 * 0.75])
    assert outcomes[3] == Unscored(UnscoredKind.TIMEOUT)


def test_length_is_never_paid_for() -> None:
    """A group whose mean reward is below 0 would otherwise be paid by the token."""
    values = [
        outcome.value
        for outcome in scored(["-1", "-1"], [100, 200], length=0.5)
        if isinstance(outcome, Scored)
    ]
    assert values == [-1.0, -1.0]


def test_length_comes_after_the_other_penalties_and_looks_at_the_unshaped_reward() -> None:
    (outcome,) = scored(["1"], [90], overlong=20, length=0.5)
    assert isinstance(outcome, Scored)
    assert outcome.components == {"word": 1.0, "unshaped": 1.0, "overlong": -0.5, "length": -0.5}
    assert outcome.value == 0.0


def test_a_part_longer_than_the_whole_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"overlong \(200\) is a part of max_tokens \(100\)"):
        scored(["1"], [1], overlong=200)
