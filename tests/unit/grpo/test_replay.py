"""Replay: when a stored success takes a place, which one, and what is stored."""

from __future__ import annotations

import pickle
from dataclasses import replace

from rayloop.core.groups import Credit, Status, TrajectoryState
from rayloop.core.types import TrajectoryId, Version
from rayloop.grpo.advantage import with_advantages
from rayloop.grpo.replay import ReplayBuffer, ReplayRules
from rayloop.grpo.settings import AdvantageSettings, ReplaySettings
from tests.unit.groups import make_group

ON = ReplaySettings(kind="corrected")


def buffer_with_success(
    settings: ReplaySettings = ON, rules: ReplayRules = ReplayRules(), **changes: object
) -> ReplayBuffer:
    buffer = ReplayBuffer(settings, seed=1, rules=rules)
    buffer.store(make_group(0, [0.0, 1.0, 0.0, 0.0], **changes))
    return buffer


def test_a_failed_group_gets_one_stored_success_before_the_statistics() -> None:
    injection = buffer_with_success().inject(make_group(1, [0.0] * 8))
    first = injection.group.members[0]
    assert (first.summary.id, first.replayed, first.status) == (TrajectoryId(0, 1), True, None)
    assert injection.group.replay_of == TrajectoryId(0, 1)
    assert injection.displaced is not None
    assert injection.displaced.summary.id == TrajectoryId(1, 0)
    assert injection.displaced.status == Status(TrajectoryState.SURPLUS, "replaced_by_replay")
    advantages = [
        m.advantage for m in with_advantages(injection.group, AdvantageSettings()).members
    ]
    assert [round(a, 3) for a in advantages] == [2.475] + [-0.354] * 7


def test_a_displaced_member_without_a_reward_counts_as_its_own_failure() -> None:
    injection = buffer_with_success().inject(make_group(1, [None, 0.0, 0.0]))
    assert injection.group.members[0].replayed
    assert injection.displaced is not None
    assert injection.displaced.status == Status(TrajectoryState.EXCLUDED, "reward_unavailable")


def test_other_groups_and_other_tasks_are_left_alone() -> None:
    buffer = buffer_with_success()
    for group in (
        make_group(1, [0.0, 1.0]),
        make_group(2, [1.0, 1.0]),
        make_group(3, [0.0, 0.0], task_id="other"),
        make_group(4, [None, None]),
    ):
        injection = buffer.inject(group)
        assert (injection.group, injection.displaced) == (group, None)


def test_results_are_compared_as_they_are_written() -> None:
    """0.05 and 0.15 lie exactly 0.05 around their mean, 0.1 and 0.3 exactly around 0.2; as binary
    fractions they would not.
    """
    buffer = buffer_with_success()
    assert buffer.inject(make_group(1, [0.05, 0.15])).displaced is None
    assert (
        buffer_with_success(rules=ReplayRules(max_std=0.2))
        .inject(make_group(1, [0.1, 0.3]))
        .displaced
        is None
    )
    assert buffer.inject(make_group(1, [0.05, 0.14])).displaced is not None


def test_off_by_default() -> None:
    buffer = buffer_with_success(ReplaySettings())
    group = make_group(1, [0.0, 0.0])
    assert buffer.inject(group).group == group
    assert len(buffer) == 0


def test_the_environments_result_decides_not_the_reward() -> None:
    buffer = buffer_with_success()
    rewarded_failure = make_group(1, [0.9, 0.9], env_result=0.0)
    assert buffer.inject(rewarded_failure).displaced is not None
    assert len(buffer) == 1


def test_the_displaced_member_is_stored_when_it_was_a_small_success() -> None:
    buffer = buffer_with_success()
    group = make_group(1, [0.15] * 4)
    assert buffer.inject(group).displaced is not None
    buffer.store(group)
    stored = [str(member.summary.id) for member in buffer.state()["task"]]
    assert stored == ["0/1", "1/0", "1/1", "1/2", "1/3"]


def test_first_in_first_out_per_task() -> None:
    buffer = ReplayBuffer(ON, seed=0, rules=ReplayRules(capacity=3))
    for number in range(3):
        buffer.store(make_group(number, [1.0, 1.0]))
    assert [str(member.summary.id) for member in buffer.state()["task"]] == ["1/1", "2/0", "2/1"]


def test_a_resumed_run_draws_the_same() -> None:
    buffer = ReplayBuffer(ON, seed=7)
    buffer.store(make_group(0, [1.0] * 8))
    resumed = ReplayBuffer(ON, seed=7)
    resumed.restore(pickle.loads(pickle.dumps(buffer.state())))
    failed = [make_group(number, [0.0, 0.0]) for number in range(1, 30)]
    drawn = [buffer.inject(group).group.replay_of for group in failed]
    assert drawn == [resumed.inject(group).group.replay_of for group in failed]
    assert len(set(drawn)) > 4


def test_a_stored_sample_forgets_its_groups_statistics() -> None:
    group = make_group(0, [1.0, 0.0])
    annotated = group.map(
        {0: replace(group.members[0], credit=Credit(0.7), ref_logprobs="its log-probs")}
    )
    buffer = ReplayBuffer(ON, seed=0)
    buffer.store(annotated)
    (stored,) = buffer.state()["task"]
    assert (stored.advantage, stored.ref_logprobs) == (None, None)


def test_it_says_what_it_holds_and_nothing_when_it_is_off() -> None:
    buffer = buffer_with_success()
    buffer.store(make_group(1, [1.0, 1.0, 0.0], task_id="other", first_version=Version(0, 7)))
    stats = buffer.stats()
    assert (stats["stored"], stats["tasks"]) == (3, 2)
    assert stats["per_task"]["other"] == {"stored": 2, "oldest_step": 7, "newest_step": 7}
    assert ReplayBuffer(ReplaySettings(), seed=1).stats() == {}
    again = ReplayBuffer(ReplaySettings(kind="corrected"), seed=1)
    again.restore(buffer.state())
    assert again.stats() == stats
