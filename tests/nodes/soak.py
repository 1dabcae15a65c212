"""A run of 20 minutes with a fault every two, beside the same without, in turn, three times.

    python -m tests.nodes.soak [--minutes 20] [--every 120] [--rounds 3] [--out FILE] [--note TEXT]
    python -m tests.nodes.soak --tables FILE       # of such a file, for docs/reliability.md

A head and two nodes of this machine, each with a raylet of its own: one with policy and engine, one
with environment and reward; when one is lost, another joins. Of ten faults three take a node with
everything on it, the others a process. Reported of each run: steps, how it ended, tasks in
quarantine, seconds from each fault to the next trained step. What is aimed at: 0.80 of the
undisturbed steps, no end by itself, code 75 with the step on disk, no task in quarantine.
"""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measure import machine
from rayloop.engines.tiny_vlm import write_tiny_vlm
from rayloop.run.checkpoint import complete
from tests.support.clusters import Cluster, cluster
from tests.support.marks import kill
from tests.support.models import SIZES, TEXTS
from tests.support.runs import Run, pause, run, settings

HEAVY, LIGHT = ("rollout", "policy"), ("environment", "reward")
"""Roles of one node each: the node of the weights, and the node of the tasks."""


@dataclass
class Stage:
    """The nodes of a run, and which of them carries it now, by kind."""

    nodes: Cluster
    carries: dict[str, str] = field(default_factory=dict)
    joined: int = 0

    def join(self, kind: str) -> None:
        """A node with room for the two roles of its kind."""
        self.joined += 1
        self.carries[kind] = f"{kind} {self.joined}"
        self.nodes.join(self.carries[kind], **{kind: 2.0})

    def lose(self, kind: str) -> None:
        """Lose the node; another of its kind comes at once."""
        before = self.carries[kind]
        self.join(kind)
        self.nodes.lose(before)

    def kill(self, actor: str) -> None:
        kill(self.nodes.processes(actor)[0])

    def hang(self, actor: str) -> None:
        pause(self.nodes.processes(actor)[0])


FAULTS: Sequence[tuple[str, Callable[[Stage], None]]] = (
    ("engine killed", lambda stage: stage.kill("RolloutActor")),
    ("node with policy and engine lost", lambda stage: stage.lose("heavy")),
    ("environment killed", lambda stage: stage.kill("EnvironmentActor")),
    ("rank killed", lambda stage: stage.kill("PolicyRank")),
    ("node with environment and reward lost", lambda stage: stage.lose("light")),
    ("reward killed", lambda stage: stage.kill("RewardActor")),
    ("driver killed", lambda stage: stage.kill("DriverActor")),
    ("engine hangs", lambda stage: stage.hang("RolloutActor")),
    ("node with policy and engine lost", lambda stage: stage.lose("heavy")),
    ("environment killed", lambda stage: stage.kill("EnvironmentActor")),
)


def configuration(folder: Path, model: Path) -> dict[str, Any]:
    """Defaults of ``recovery``, but for the health check.

    It hardly learns: tasks that are all solved would be filtered.
    """
    config = settings(
        folder,
        model,
        steps=1_000_000,
        rollout__sampling={"max_tokens": 100, "min_tokens": 100},
        algorithm={"group_size": 4, "groups_per_step": 4},
        checkpoint={"every": 5},
        recovery={"health_timeout": 15.0},
        policy__optimizer={"lr": 1.0e-7},
    )
    for kind, roles in (("heavy", HEAVY), ("light", LIGHT)):
        for role in roles:
            config.setdefault(role, {})["placement"] = {"num_cpus": 0, "resources": {kind: 1}}
    return config


def measured(folder: Path, minutes: float, every: float, disturbed: bool) -> dict[str, Any]:
    """One run from its first step on, for so many minutes, and then SIGTERM."""
    folder.mkdir()
    injected: list[dict[str, Any]] = []
    with cluster() as nodes:
        stage = Stage(nodes)
        stage.join("heavy")
        stage.join("light")
        config = configuration(
            folder, write_tiny_vlm(folder / "model", TEXTS, vision=False, **SIZES)
        )
        with run(config, ["--address", nodes.address, "--insecure"]) as made:
            made.until_event("trained", 300)
            began = time.monotonic()
            for number, (name, fault) in enumerate(FAULTS if disturbed else ()):
                at = (number + 0.5) * every
                if at > minutes * 60:
                    break
                _sleep(made, began + at)
                if made.process.poll() is not None:
                    break
                fault(stage)
                injected.append({"fault": name, "at_s": round(at), "time": time.time()})
            _sleep(made, began + minutes * 60)
            seconds = time.monotonic() - began
            ended = made.process.poll() is not None
            if not ended:
                made.process.send_signal(signal.SIGTERM)
            code = made.wait(300)
            if ended:
                print(made.text[-6000:], flush=True)
            return {
                "disturbed": disturbed,
                "seconds": round(seconds, 1),
                **_summary(made, code, ended, injected),
            }


def _sleep(made: Run, until: float) -> None:
    while time.monotonic() < until and made.process.poll() is None:
        time.sleep(0.5)


def _summary(made: Run, code: int, ended: bool, injected: list[dict[str, Any]]) -> dict[str, Any]:
    steps = [record["step"] for record in made.metrics]
    trained = [event["time"] for event in made.named("trained")]
    for fault in injected:
        after = [moment for moment in trained if moment > fault["time"] + 1]
        fault["next_step_s"] = round(after[0] - fault.pop("time"), 1) if after else None
    last = max(steps, default=0)
    on_disk = complete(made.folder / "checkpoints" / f"step_{last:06d}") is not None
    return {
        "steps": last,
        "code": code,
        "ended_by_itself": ended,
        "false_75": code == 75 and not on_disk,
        "quarantined": len(made.records("quarantine")),
        "events": {
            name: len(made.named(name))
            for name in ("worker_lost", "node_lost", "policy_lost", "driver_lost")
        },
        "faults": injected,
    }


def tables(rounds: list[dict[str, Any]]) -> str:
    """Two tables: the runs, and seconds from each fault to the next trained step."""
    runs = [
        "| round | steps without faults | with | share | with faults: exit code, in quarantine |",
        "|---|---|---|---|---|",
    ]
    for number, pair in enumerate(rounds, 1):
        beside, run = pair["undisturbed"], pair["disturbed"]
        ended = (
            f"{run['code']}{' by itself' if run['ended_by_itself'] else ''}, {run['quarantined']}"
        )
        runs.append(
            f"| {number} | {beside['steps']} | {run['steps']} | {pair['share_of_steps']:.2f} |"
            f" {ended} |"
        )
    found = ["| fault | seconds to the next step, by round |", "|---|---|"]
    for faults in zip(*(pair["disturbed"]["faults"] for pair in rounds), strict=False):
        found.append(
            f"| {faults[0]['fault']} | {', '.join(str(fault['next_step_s']) for fault in faults)} |"
        )
    return "\n".join([*runs, "", *found])


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Runs with a fault every two minutes beside runs without."
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="of each run")
    parser.add_argument("--every", type=float, default=120.0, help="seconds between faults")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs")
    parser.add_argument("--note", default="", help="what else the machine did meanwhile")
    parser.add_argument("--out", type=Path, help="a file of JSON to write")
    parser.add_argument("--tables", type=Path, help="print what such a file says, and end")
    chosen = parser.parse_args()
    if chosen.tables:
        print(tables(json.loads(chosen.tables.read_text(encoding="utf-8"))["rounds"]))
        return
    rounds = []
    for number in range(chosen.rounds):
        pair = {}
        for disturbed in (number % 2 == 0, number % 2 == 1):
            with tempfile.TemporaryDirectory() as folder:
                pair[disturbed] = measured(
                    Path(folder) / "runs", chosen.minutes, chosen.every, disturbed
                )
            print(json.dumps(pair[disturbed]), flush=True)
        rounds.append(
            {
                "share_of_steps": round(pair[True]["steps"] / max(pair[False]["steps"], 1), 3),
                "disturbed": pair[True],
                "undisturbed": pair[False],
            }
        )
        if chosen.out:
            chosen.out.write_text(
                json.dumps({"machine": machine(), "note": chosen.note, "rounds": rounds}, indent=1)
                + "\n",
                encoding="utf-8",
            )
    print("shares of the undisturbed steps:", [found["share_of_steps"] for found in rounds])


if __name__ == "__main__":
    main()
