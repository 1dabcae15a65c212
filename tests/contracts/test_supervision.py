"""What a run does about each failure: what is played again, replaced, left out and counted, and how
the run ends.

The real driver runs in a simulated cluster (tests/support/simulated_cluster.py) whose actors fail
as a schedule says. Nothing here knows how failures are handled inside: a row of supervision.yaml
names the failure, and then what a user sees of it. test_verdict.py has what follows from the
failures of episodes; here is one run of each kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.runs import ledger_closes
from tests.support.simulated_cluster import Ended, Fault, simulate

BAD, ONE = ("train-3",), (1,)
"""The task, and the member of its group, that something is wrong with."""
COMPARED = (
    "episode_failed",
    "worker_lost",
    "worker_replaced",
    "replacement_failed",
    "node_lost",
    "node_avoided",
    "policy_lost",
    "policy_rebuilt",
    "payload_lost",
    "weights_lost",
    "checkpoint_failed",
    "checkpoint_damaged",
    "unscored",
    "probe_failed",
    "silent",
    "preempted",
)
"""Kinds of events whose numbers are compared.

Others are of every run, or depend on how long something took.
"""


def member(cause: str, **selectors: Any) -> Fault:
    """In episodes of one member of one group."""
    return Fault("episode", cause, tasks=BAD, samples=ONE, **selectors)


def once(at: str, cause: str, **selectors: Any) -> Fault:
    """In the first such call after the first step."""
    return Fault(at, cause, step=1, times=1, **selectors)


@dataclass(frozen=True)
class Case:
    """By default a run ends well after three steps of two groups of four.

    ``counts`` are of final states; ``tries``: the highest number of an attempt; ``why``: a part of
    the error's text; ``step``: the last one trained; ``changes``: settings.
    """

    name: str
    faults: tuple[Fault, ...] = ()
    code: int = 0
    counts: Mapping[str, int] = field(default_factory=lambda: {"trained": 24})
    events: Mapping[str, int] = field(default_factory=dict)
    quarantined: tuple[str, ...] = ()
    tries: int = 0
    why: str = ""
    step: int | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)


def read(name: str, row: Mapping[str, Any]) -> Case:
    """A row of supervision.yaml."""
    faults = [
        Fault(at, cause, **dict(*selectors)) for at, cause, *selectors in row.get("faults", ())
    ]
    return Case(name, **{**row, "faults": tuple(faults)})


TABLE = yaml.safe_load(Path(__file__).with_name("supervision.yaml").read_text(encoding="utf-8"))
CASES = [read(name, row) for name, row in TABLE["cases"].items()]
BY_NAME = {case.name: case for case in CASES}


def played(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Ended:
    """Run a case."""
    for fault in case.faults:
        fault.happened = 0
    return simulate(folder, monkeypatch, case.faults, **case.changes)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_failure_has_one_outcome(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = played(case, tmp_path, monkeypatch)
    assert ended.code == case.code, ended.why
    assert case.why in ended.why
    final = {
        name: n
        for name, n in ended.counts.items()
        if name not in ("issued", "in_flight", "ready", "attempts", "replayed")
    }
    assert final == case.counts
    assert {kind: ended.kinds[kind] for kind in COMPARED if ended.kinds[kind]} == case.events
    assert ended.quarantined == set(case.quarantined)
    assert max((episode.attempt for episode in ended.episodes), default=0) == case.tries
    assert case.step in (None, ended.step)
    # Of every run, however it ends:
    live = ended.counts.get("in_flight", 0) + ended.counts.get("ready", 0)
    assert ended.counts.get("issued", 0) == sum(final.values()) + live, (
        "each trajectory is counted once"
    )
    assert ended.unearned == set(), "no infrastructure failure is a reward"
    assert ended.kinds[{0: "finished", 75: "preempted"}.get(ended.code, "failed")] == 1
    if ended.code == 75:
        assert f"from step {ended.step} (step_{ended.step:06d})" in ended.why, (
            "75: this very step is on disk"
        )


RESUMED = [
    case
    for case in CASES
    if case.code in (69, 75) and case.name not in ("every checkpoint is damaged",)
]


@pytest.mark.parametrize("case", RESUMED, ids=lambda case: case.name)
def test_a_run_that_may_go_on_does_so_at_the_next_start(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """69 and 75: what made it end is gone."""
    first = played(case, tmp_path, monkeypatch)
    assert first.code == case.code
    again = simulate(tmp_path, monkeypatch, (), **case.changes)
    assert (again.code, again.why) == (0, "")
    ledger_closes({"in_flight": 0, "ready": 0, **again.counts})
    assert again.step == case.changes.get("steps", 3)
    assert again.counts["trained"] == 8 * again.step


@pytest.mark.parametrize(
    "cause", ["environment raised", "environment hung", "bad data", "network", "bug"]
)
def test_an_episode_is_played_again_elsewhere(
    cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = simulate(tmp_path, monkeypatch, [member(cause, times=1)])
    first, second = (one for one in ended.episodes if (one.task, one.sample) == (BAD[0], ONE[0]))
    assert (first.attempt, second.attempt) == (0, 1)
    assert first.environment != second.environment


def test_an_episode_that_ends_its_actor_takes_the_others_along_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the call that they shared each plays in a call of its own."""
    ended = simulate(tmp_path, monkeypatch, [member("died")])
    assert {len(samples) for _, samples in ended.calls} == {1, 4}
    tries = {
        sample: max(e.attempt for e in ended.episodes if (e.task, e.sample) == (BAD[0], sample))
        for sample in range(4)
    }
    assert tries == {0: 1, 1: 3, 2: 1, 3: 1}


def test_a_request_is_sent_again_to_another_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The episode goes on: nothing of it is played again."""
    ended = simulate(tmp_path, monkeypatch, [once("generate", "died")])
    assert {episode.attempt for episode in ended.episodes} == {0}
    [lost] = ended.named("worker_lost")
    assert lost["role"] == "rollout"
    assert "a request of episode" in lost["why"]


def test_a_stall_is_reported_before_it_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = played(BY_NAME["nothing moves"], tmp_path, monkeypatch)
    assert [event["awaited"].partition(" for ")[0] for event in ended.named("stalled")] == [
        "train of policy rank 0"
    ] * 2
    assert ended.code == 69


def test_a_lost_node_is_named_with_what_was_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = played(BY_NAME["a node costs one unit"], tmp_path, monkeypatch)
    [lost] = ended.named("node_lost")
    assert lost["roles"] == {"rollout": 1, "environment": 1, "reward": 1}
    assert lost["node"] == "b"


def test_what_a_failed_run_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a bug its traceback, and of each end what a resume starts from."""
    ended = played(BY_NAME["train of a rank: bug"], tmp_path, monkeypatch)
    [failed] = ended.named("failed")
    assert "KeyError" in failed["traceback"]
    assert failed["saved"].endswith(
        "step 1 is saved; run again to continue from step 1 (step_000001)"
    )
