"""Nodes of a real run are lost, with everything on them, in each of its phases: the same run goes
on, with the spare.
"""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rayloop.recipes.digits.data import rows
from tests.support import node_matrix as matrix
from tests.support.clusters import Cluster, cluster
from tests.support.marks import Marks, marked
from tests.support.runs import Run, run, settings

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(600)]

CARRIES = {
    "engine": ("rollout",),
    "policy": ("policy",),
    "policy + engine": ("policy", "rollout"),
    "environment + reward": ("environment", "reward"),
    "all four": ("rollout", "policy", "environment", "reward"),
}
IN_METHOD = {"training": "train", "weight sync": "export", "checkpoint": "save"}
"""What the policy's rank does in a phase."""
PHASES = ("generation", *IN_METHOD, "evaluation")
SAMPLE = {
    "policy + engine": ("generation", "weight sync", "checkpoint"),
    "environment + reward": ("training", "evaluation"),
    "all four": ("generation", "training", "checkpoint"),
    "engine": ("generation", "weight sync"),
    "policy": ("training", "evaluation"),
}
"""What fits into a lane of minutes; the whole matrix is measured when it is to be written."""
ROLES = CARRIES["all four"]
EVERY = 6
"""Steps between checkpoints where the policy is not lost: a checkpoint is another place where
payloads are.
"""


def configuration(folder: Path, model: Path, carries: tuple[str, ...]) -> dict[str, Any]:
    """Roles that are ``carries`` want the resource of the node that is lost and of its spares."""
    _, held_out = rows(24, 6, 3, 5, seed=0)
    (folder / "eval.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in held_out), encoding="utf-8"
    )
    config = settings(
        folder,
        model,
        steps=10_000,
        data__eval=str(folder / "eval.jsonl"),
        evaluation={"every": 1},
        rollout__sampling={"max_tokens": 100, "min_tokens": 100},
        reward__source__with={"seconds": 0.05},
        algorithm={"group_size": 4, "groups_per_step": 2, "staleness": {"max_staleness": 2}},
        recovery={"start_timeout": 120.0, "health_timeout": 3600.0},
        rollout__engine={"threads": 1},
        checkpoint={"every": 1 if "policy" in carries else EVERY},
    )
    for role in ROLES:
        config.setdefault(role, {})["placement"] = {
            "num_cpus": 0,
            "resources": {"lost" if role in carries else "kept": 1},
        }
    return config


def lose(stage: Cluster, made: Run, marks: Marks, name: str, phase: str) -> float:
    """Lose the node in the middle of the phase. Returns when that was."""
    with ExitStack() as frozen:
        if phase == "training":
            made.until(
                lambda: made.named("trained")[-1]["step"] % EVERY == EVERY // 2,
                "steps since the checkpoint",
            )
        if phase in IN_METHOD:
            frozen.enter_context(stage.frozen("PolicyRank", IN_METHOD[phase], made.until))
        began = time.time()
        if phase == "training":
            until = time.monotonic() + 8.0  # groups for the next steps get ready, and wait
            while time.monotonic() < until and len(marks.since("score", began)) < 8:
                time.sleep(0.1)
            time.sleep(0.5)
        elif phase not in IN_METHOD:
            kind = "train" if phase == "generation" else "eval"
            made.until(
                lambda: [m for m in marks.since("reset", began) if kind in m.name],
                f"episodes of {phase}",
            )
        killed = stage.lose(name)
        time.sleep(0.5)
    return killed


def recovered(made: Run, carries: tuple[str, ...], killed: float) -> float:
    """When all that was on the node serves again. The run trains on after that."""

    def back() -> list[float]:
        times = []
        for role in carries:
            event = (
                {"event": "begin"}
                if role == "policy"
                else {"event": "worker_replaced", "role": role}
            )
            found = [
                e["time"] for e in made.events if e["time"] > killed and event.items() <= e.items()
            ]
            times += found[-1:] or [0.0]
        return times if all(times) else []

    times = made.until(back, f"{carries} serve again")
    made.until(
        lambda: [e for e in made.named("trained") if e["time"] > max(times)], "the run trains on"
    )
    return float(max(times))


@pytest.mark.parametrize("what", SAMPLE)
def test_the_same_run_goes_on(tmp_path: Path, digits_model: Path, what: str) -> None:
    phases = PHASES if os.environ.get(matrix.WRITE) else SAMPLE[what]
    carries, marks = CARRIES[what], Marks(tmp_path / "marks")
    config = marked(configuration(tmp_path, digits_model, carries), marks)
    room = {"lost": float(len(carries))}
    with cluster() as stage:
        stage.join("kept", kept=4.0)
        stage.join("node 0", **room)
        with run(config, ["--address", stage.address, "--insecure"]) as made:
            for number, phase in enumerate(phases):
                made.until_event("checkpoint")
                stage.join(f"node {number + 1}", **room)
                events = len(made.events)
                killed = lose(stage, made, marks, f"node {number}", phase)
                seconds = recovered(made, carries, killed) - killed
                since = made.events[events:]
                matrix.record(what, phase, seconds, since)
                [lost] = [e for e in since if e["event"] == "node_lost"]
                assert lost["roles"] == dict.fromkeys(carries, 1), lost
                assert seconds < 120
            made.process.send_signal(signal.SIGTERM)
            assert made.wait() == 75, made.text
    assert len({e["lineage"] for e in made.named("begin")}) == (
        1 + len(phases) if "policy" in carries else 1
    )
    counts = made.named("preempted")[0]["ledger"]
    assert counts["issued"] == sum(
        n for name, n in counts.items() if name not in ("issued", "attempts", "replayed")
    ), counts
    played = [
        record for record in made.metrics if record["rollout/groups"]
    ]  # others train on what was ready
    assert played
    assert all(record["reward/min"] > 0 for record in played), "a failure became a reward of 0"
