"""The driver's part of a checkpoint: plain data, whose every field comes back, and which the code
of tomorrow still reads.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayloop.core.events import Event
from rayloop.core.failures import CheckpointError, DataFailure
from rayloop.core.groups import (
    Credit,
    Group,
    Member,
    Scored,
    Status,
    TrajectoryState,
    Unscored,
    UnscoredKind,
)
from rayloop.core.ledger import Ledger
from rayloop.core.token_mask import TokenMask
from rayloop.core.types import (
    EndReason,
    FinishReason,
    ImageRef,
    ImagesSent,
    Sampling,
    Streams,
    Summary,
    Task,
    Trajectory,
    TrajectoryId,
    Turn,
    Version,
)
from rayloop.rollout import plain
from rayloop.rollout.failed_episodes import FailureHistory
from rayloop.rollout.manager import RolloutManager
from rayloop.rollout.scheduler import GroupRequest
from rayloop.run.checkpoint import STRUCTURE, TENSORS, Checkpoint
from rayloop.run.config import RunConfig
from rayloop.run.identity import READABLE_SCHEMA_VERSIONS
from rayloop.run.order import training_rows
from rayloop.run.records import plain_files
from rayloop.run.reporter import Reporter
from tests.support.plain import saved_and_read
from tests.support.runs import ROOT, settings

ID = TrajectoryId(7, 3)
SUMMARY = Summary(
    ID,
    2,
    "train-5",
    "digits",
    EndReason.TOOL_DEADLINE,
    length=90,
    sampled_tokens=4,
    turns=3,
    images=2,
    observation_images=1,
    images_consistent=False,
    first_version=Version(2, 5),
    last_version=Version(2, 6),
    env_result=0.1,
    seconds=1.5,
    prompt_tokens=80,
    repeated_tokens=7,
    cut=True,
    sent=ImagesSent(3, 1000, 1),
    turn_rewards=(0.5, -2.0 / 3.0),
    states=("00c0ffee00c0ffee",) * 2,
    actions=("5eed5eed5eed5eed",) * 2,
    order=(1, 0, 2),
    spans=(("reset", 1.5, 2.25), ("step", 3.0, 3.5)),
)
IMAGE = ImageRef("3fa2", 28, 56, (1, 2, 4), 2, path="images/a.png")
SAMPLED = Turn(
    "assistant",
    (5, 6, 151643),
    (),
    (-0.1, -1e-300, -2.0 / 3.0),
    Version(2, 5),
    FinishReason.STOP_STRING,
    True,
    True,
    -2.0 / 3.0,
    TokenMask.of([[5, 8], [6], [2, 9, 151643]]),
    (1.5, 2.25, 3.0),
    ((7,), (IMAGE,)),
    (("user", ("Look:", None)),),
)
TRAJECTORY = Trajectory(
    ID,
    2,
    "train-5",
    2**63 + 11,
    (Turn("user", (1, 2), (IMAGE,)), SAMPLED, Turn("tool", ())),
    Sampling(0.7, 9, 2, ("</a>", "\n"), (3,), (4, 5), 0.9, 50),
    EndReason.TOOL_DEADLINE,
    0.1,
    {"3fa2": b"\x00png", "77": b""},
    order=(0,),
)
REFERENCE = np.array([0.5, -0.25, 1e-7], np.float32)
CREDIT = Credit(-1.25, (0.5, -3.0), Streams(0.5, 0.0, 2.0), base=0.1)
MEMBERS = (
    Member(
        SUMMARY,
        Scored(0.3, {"iou": 0.1}, ("unparsable",), "Traceback"),
        TRAJECTORY,
        CREDIT,
        REFERENCE,
        True,
    ),
    Member(
        SUMMARY,
        Unscored(UnscoredKind.TIMEOUT, "60 s", "Traceback"),
        status=Status(TrajectoryState.EXCLUDED, "timeout"),
    ),
)
GROUP = Group(7, Task("train-5", ()), MEMBERS, 0.5, 0.25, TrajectoryId(1, 2), 4)


def differing(value: Any, default: Any) -> list[str]:
    """The fields in which ``value`` is as if nobody had set it."""
    return [
        f.name
        for f in dataclasses.fields(value)
        if repr(getattr(value, f.name)) == repr(getattr(default, f.name))
    ]


def test_the_examples_set_every_field() -> None:
    """So that a field which is added, and forgotten in plain.py, fails the next test."""
    bare = Summary(
        TrajectoryId(0, 0),
        0,
        "",
        "",
        EndReason.DONE,
        0,
        0,
        0,
        0,
        0,
        True,
        Version(0, 0),
        Version(0, 0),
    )
    assert differing(SUMMARY, bare) == []
    assert (
        differing(
            TRAJECTORY, Trajectory(TrajectoryId(0, 0), 0, "", 0, (), Sampling(), EndReason.DONE)
        )
        == []
    )
    assert differing(SAMPLED, Turn("", ())) == ["images"]
    assert differing(TRAJECTORY.sampling, Sampling()) == []
    assert differing(IMAGE, ImageRef("", 0, 0, (0, 0, 0), 0)) == []
    assert differing(GROUP, Group(0, Task("", ()), ())) == []
    assert differing(MEMBERS[0], Member(bare, Scored(0.0))) == ["status"]


def test_a_group_comes_back_as_it_was(tmp_path: Path) -> None:
    found = plain.group_from_plain(
        saved_and_read(plain.plain_group(GROUP), tmp_path),
        lambda payload: payload,
        lambda id: Task(id, ()),
    )
    assert isinstance(found.members[0].ref_logprobs, np.ndarray)
    assert found.members[0].ref_logprobs.dtype == np.float32
    assert found.members[0].ref_logprobs.tobytes() == REFERENCE.tobytes()
    plain_only = [
        group.map({0: dataclasses.replace(group.members[0], ref_logprobs=None)})
        for group in (found, GROUP)
    ]  # arrays have no equality of their own
    assert plain_only[0] == plain_only[1]
    assert found.members[0].summary.spans == SUMMARY.spans
    assert found.members[0].payload.turns[1].times == SAMPLED.times
    assert found.members[0].payload.turns[1].said == SAMPLED.said
    traces = [member.outcome.trace for member in found.members]  # which equality leaves out
    assert traces == ["Traceback", "Traceback"]


# Files --------------------------------------------------------------------------------------------


def test_reading_runs_no_code(tmp_path: Path) -> None:
    """What a pickle would do, a state cannot even ask for."""
    folder = tmp_path / "step_000001"
    folder.mkdir()
    for name in (STRUCTURE, TENSORS):
        (folder / name).write_bytes(pickle.dumps(print))
    with pytest.raises(
        CheckpointError, match=r"driver\.json and driver\.safetensors in its folder cannot be read"
    ):
        Checkpoint(folder, 1, 1).state()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"a": [1, {2, 3}]}, r"state\.a\[1\] is a set"),
        ({"a": {1: 2}}, r"state\.a has keys that cannot be saved: 1"),
        ({"a": {"$bytes": "0"}}, r"state\.a has keys that cannot be saved: '\$bytes'"),
        ({"task": Task("t", ())}, r"state\.task is a Task, which cannot be saved as plain data"),
    ],
)
def test_what_is_not_plain_is_refused_by_its_place(value: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=says):
        plain_files.write(tmp_path / "a.json", tmp_path / "a.safetensors", value)


def test_equal_bytes_are_written_once(tmp_path: Path) -> None:
    picture = bytes(range(256)) * 1000
    tensors = tmp_path / "a.safetensors"
    plain_files.write(tmp_path / "a.json", tensors, [{"image": bytes(picture)} for _ in range(4)])
    assert tensors.stat().st_size < 2 * len(picture)
    assert plain_files.read(tmp_path / "a.json", tensors) == [{"image": picture}] * 4


# The parts of the loop ----------------------------------------------------------------------------


class Quiet:
    def event(self, event: Event) -> None: ...

    def bad_row(self, failure: DataFailure) -> None: ...


OF_THE_PROCESS = {
    "RolloutManager": {
        "config",
        "ledger",
        "dataset",
        "scheduler",
        "ready",
        "finished",
        "_reporter",
        "_group_rollout",
        "_taken",
        "_collecting",
        "_stopping",
        "_change_waiters",
        "_last_commit",
        "in_flight",
    },
    "GroupScheduler": {"config", "dataset", "ledger", "bad", "_on_bad_row"},
    "ReadyGroups": {"settings", "ledger", "_counted_groups", "_survivors", "_fresh", "_fresh_for"},
    "FinishedGroups": {"ledger", "ready", "alarms", "history", "_injected"},
    "Alarms": {
        "lost_episodes",
        "settings",
        "_reward",
        "_emit",
        "_drift_limit",
        "_finished",
        "_drift",
        "_steps_without_samples",
        "_active",
        "_kinds",
        "_raised_trace",
        "_dropout",
        "_returned_trace",
        "_raised",
        "_raised_held_out",
        "collapse",
        "sight",
    },
    "Collapse": {"_settings", "_last", "_watched"},
    "Sight": set(),
    "FailureHistory": {"_settings", "successes", "_groups", "processes", "lost_episodes"},
    "ReplayBuffer": {"_settings", "_rules", "_seed"},
    "AcceptanceRate": {"_memory", "_floor"},
    "TaskCursor": {"_count", "_seed", "_shuffle", "_tiers"},
    "Ledger": set(),
    "Reporter": {
        "config",
        "folder",
        "updates",
        "gaps",
        "tokens",
        "sight",
        "_evaluation",
        "_step",
        "_unwritten",
        "_left_out",
        "_longest",
        "_warned_of_grace",
        "loggers",
    },
    "LengthRatio": {"_decay"},
}
"""Attributes that a checkpoint does not hold: what the configuration says, and what begins anew
with a process.
"""


def rollouts(folder: Path) -> RolloutManager:
    config = RunConfig.model_validate(
        settings(folder, folder, algorithm__replay={"kind": "corrected"})
    )
    return RolloutManager(
        config,
        Ledger(),
        training_rows(config, Quiet()),
        Quiet(),
        FailureHistory(config.environment),
    )


def full(made: RolloutManager) -> None:
    """Every field of ``made`` is as no new one has it."""
    made.ledger.issue(
        [TrajectoryId(group, sample) for group in (1, 2, 3, 7) for sample in range(4)]
    )
    made.ledger.reissue_live()
    made.ledger.issue([TrajectoryId(group, sample) for group in (3, 7) for sample in range(4)])
    for sample in range(4):
        made.ledger.move(TrajectoryId(7, sample), Status(TrajectoryState.READY))
    made.ledger.move(TrajectoryId(7, 0), Status(TrajectoryState.STALE))
    made.ledger.replay()
    for _ in range(30):  # a second epoch
        made.scheduler.cursor.next()
    made.scheduler.next_number, made.scheduler.issued_this_step = 9, 5
    made.scheduler.make_up_for(1)
    made.scheduler.reissue, made.scheduler.one_round = (
        [GroupRequest(1, 4, 2), GroupRequest(2, 5, 2)],
        False,
    )
    made.in_flight = {3: GroupRequest(3, 6, 2)}
    made.scheduler.quarantine(made.dataset[8], "/a.png", "cannot be read")
    made.ready.groups = [GROUP]
    made.ready.dropped["stale/digits"] = 3
    made.finished.groups = [GROUP.bare()]
    stored = dataclasses.replace(MEMBERS[0], ref_logprobs=None)
    made.finished.buffer.restore({"train-5": [stored], "train-6": [stored, stored]})
    made.finished.acceptance.observe(3, 16)
    made.alarms.graded = True
    made.alarms.collapse.first["response_length/mean"] = [38.0, 20.0]
    made.alarms.sight.values.append(0.75)
    made.finished.history.groups_failed["train-9"] = 2


def parts(made: RolloutManager) -> dict[str, Any]:
    finished = made.finished
    found = (
        made,
        made.scheduler,
        made.scheduler.cursor,
        made.ready,
        finished,
        finished.buffer,
        finished.acceptance,
        made.alarms,
        made.alarms.collapse,
        made.alarms.sight,
        made.finished.history,
        made.ledger,
    )
    return {type(part).__name__: part for part in found}


def fields(part: Any) -> Mapping[str, Any]:
    """What a checkpoint has of ``part``: an attribute that is added is one of these until it is
    named in OF_THE_PROCESS.
    """
    nested = (*parts_of_loop, "LengthRatio")
    return {
        name: value
        for name, value in vars(part).items()
        if name not in OF_THE_PROCESS[type(part).__name__] and type(value).__name__ not in nested
    }


parts_of_loop = tuple(OF_THE_PROCESS)


def shown(value: Any) -> str:
    """Comparable: payloads have arrays."""
    return repr(sorted(value) if isinstance(value, set) else value)


def test_every_field_of_every_part_comes_back(tmp_path: Path) -> None:
    new, before, after = (rollouts(tmp_path) for _ in range(3))
    full(before)
    for name, part in parts(before).items():
        unset = [
            key
            for key, value in fields(part).items()
            if shown(value) == shown(fields(parts(new)[name])[key])
        ]
        assert not unset, (
            f"{name}: {unset}: give it in `full` another value than a new one has, "
            "or list it as not in a checkpoint, in OF_THE_PROCESS"
        )
    state = {"rollouts": before.state(), "ledger": before.ledger.state()}
    read = saved_and_read(state, tmp_path)
    after.ledger.restore(read["ledger"])
    after.restore(read["rollouts"], lambda payload: payload)
    expected = {name: dict(fields(part)) for name, part in parts(before).items()}
    expected["GroupScheduler"]["reissue"] = [
        GroupRequest(1, 4, 2),
        GroupRequest(2, 5, 2),
        GroupRequest(3, 6, 2),
    ]
    task = after.dataset[[task.id for task in after.dataset].index("train-5")]
    for part, groups in (("ReadyGroups", [GROUP]), ("FinishedGroups", [GROUP.bare()])):
        expected[part]["groups"] = [dataclasses.replace(group, task=task) for group in groups]
    for name, part in parts(after).items():
        found = fields(part)
        lost = [key for key, value in expected[name].items() if shown(value) != shown(found[key])]
        assert lost == [], name


def test_the_reporter_goes_on_where_it_was(tmp_path: Path) -> None:
    config = RunConfig.model_validate(settings(tmp_path, tmp_path))
    new, before, after = (Reporter(config, tmp_path, lambda *_: Silent()) for _ in range(3))
    before.best, before.worse = {"reward": 0.75, "step": 10}, [12, 14]
    before._lengths.observe([4, 5], [6])
    for part in (lambda r: r, lambda r: r._lengths):
        assert all(
            shown(value) != shown(fields(part(new))[name])
            for name, value in fields(part(before)).items()
        )
    after.restore(saved_and_read(before.state(), tmp_path))
    for part in (lambda r: r, lambda r: r._lengths):
        assert shown(fields(part(after))) == shown(fields(part(before)))


class Silent:
    """A logger."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


# What was saved once ------------------------------------------------------------------------------


def without_alone(trajectory: Trajectory) -> Trajectory:
    """The trajectory as files had it before turns had observations by themselves."""
    turns = tuple(dataclasses.replace(turn, alone=None) for turn in trajectory.turns)
    return dataclasses.replace(trajectory, turns=turns)


def without_later_fields(trajectory: Trajectory) -> Trajectory:
    """The trajectory as schema 2 had it."""
    turns = tuple(
        dataclasses.replace(turn, restart=False, executed=None, reward=0.0, token_mask=None)
        for turn in without_alone(trajectory).turns
    )
    sampling = dataclasses.replace(trajectory.sampling, top_p=1.0, top_k=None)
    return dataclasses.replace(trajectory, turns=turns, sampling=sampling, order=())


@pytest.mark.parametrize("schema", READABLE_SCHEMA_VERSIONS)
def test_what_was_saved_once_is_read_for_ever(schema: int, tmp_path: Path) -> None:
    """The files were written by the code that made this schema.

    Never write them again: raise CHECKPOINT_SCHEMA_VERSION instead.
    """
    folder = ROOT / f"tests/data/checkpoints/schema_{schema}"
    state = plain.with_present_keys(Checkpoint(folder, 13, 2).state())
    made = rollouts(tmp_path)
    made.ledger.restore(state["ledger"])
    made.restore(state["rollouts"], lambda payload: payload)
    (group,) = made.ready.groups
    first, second = group.members
    if schema == 2:
        assert first.payload == without_later_fields(TRAJECTORY)
        assert (first.summary.turn_rewards, first.summary.states) == ((), ())
        assert first.credit == Credit(CREDIT.advantage)
    else:
        assert first.payload == without_alone(TRAJECTORY)
        # These schemas do not have the fields.
        assert first.summary == dataclasses.replace(SUMMARY, repeated_tokens=0, actions=())
        assert first.credit == CREDIT
    assert first.ref_logprobs.tobytes() == REFERENCE.tobytes()
    assert (first.status, second.status) == (None, MEMBERS[1].status)
    assert (group.number, group.replay_of) == (GROUP.number, GROUP.replay_of)
    assert made.scheduler._replaced_groups == 1
    assert [number.number for number in made.scheduler.reissue] == [1, 2, 3]
    assert made.scheduler.quarantined == {"train-8"}
    assert len(made.finished.buffer) == 3
    made.ledger.check()
    assert (state["step"], state["version"], state["inherited"]) == (13, [2, 13], [[1, 8]])
    assert state["reporter"]["best"] == {"reward": 0.75, "step": 10}
    Reporter(made.config, tmp_path, lambda *_: Silent()).restore(state["reporter"])
    json.dumps(state["ledger"])


def test_an_array_that_no_file_can_hold_is_a_failed_save(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the arrays of the state cannot be saved"):
        plain_files.write(
            tmp_path / "a.json",
            tmp_path / "a.safetensors",
            {"x": np.array([object()], dtype=object)},
        )


def test_nesting_beyond_reason_is_a_broken_file(tmp_path: Path) -> None:
    plain_files.write(tmp_path / "a.json", tmp_path / "a.safetensors", {})
    (tmp_path / "a.json").write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(CheckpointError, match="cannot be read"):
        plain_files.read(tmp_path / "a.json", tmp_path / "a.safetensors")
