"""The GCS of a head is killed while a run trains on its nodes: the run ends at its steps, and
nobody does anything.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.support.nodes import Nodes, here
from tests.support.runs import settings

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(900)]
BOUND = 300.0
"""Seconds from the kill to the first step after it."""


def gcs(nodes: Nodes) -> list[psutil.Process]:
    """Live GCS processes of the head."""
    below = psutil.Process(nodes.started[0].pid).children(recursive=True)
    return [
        one for one in below if one.name() == "gcs_server" and one.status() != psutil.STATUS_ZOMBIE
    ]


def test_a_killed_gcs_costs_the_steps_since_the_checkpoint_and_nobody_s_sleep(
    tmp_path: Path, digits_model: Path
) -> None:
    config = settings(
        tmp_path, digits_model, steps=40, checkpoint={"every": 2}, recovery={"start_timeout": 90.0}
    )
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")

    def events(name: str) -> list[dict[str, Any]]:
        file = tmp_path / "run" / "events.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == name]

    with here() as nodes:
        nodes.start("head")
        nodes.start("worker", "--num-cpus=6")
        train = nodes.start(
            "worker",
            "--num-cpus=0",
            "--requeue=3",
            "--",
            sys.executable,
            "-m",
            "rayloop",
            "train",
            str(tmp_path / "run.yaml"),
        )
        before = nodes.head()
        assert before.token is not None
        token = Path(before.token).read_text(encoding="utf-8")
        nodes.until(lambda: len(events("checkpoint")) >= 2, "a checkpoint", 300)
        (nodes.place.folder / "head.json").unlink()  # on the way: nobody takes the head for gone
        nodes.until(lambda: nodes.place.head() == before, "the head publishes itself again", 60)

        [killed] = gcs(nodes)
        killed.kill()
        at = time.time()
        after = nodes.until(
            lambda: [e for e in events("trained") if e["time"] > at + 2], "a step after it", BOUND
        )
        seconds = after[0]["time"] - at
        print(f"\n{seconds:.1f} s from the kill of the GCS to the first step after it")
        assert train.wait(300) == 0
        head = (nodes.folder / "head-0.log").read_text(encoding="utf-8")
        assert (
            head.count(f"node: head of here at {before.address}, dashboard {before.dashboard}") == 2
        ), head
        assert "; it is started again, with the same ports and token" in head
        assert Path(before.token).read_text(encoding="utf-8") == token
        if folder := os.environ.get("RAYLOOP_CONSOLE"):
            for log in nodes.folder.glob("*.log"):
                (Path(folder) / log.name).write_text(
                    log.read_text(encoding="utf-8"), encoding="utf-8"
                )

    [failed] = events("failed")
    assert failed["error"] == "HeadDead", failed
    first, second = events("begin")
    assert first["restored"] is None
    assert (
        f"run again to continue from step {int(second['restored'][5:])} ({second['restored']})"
        in failed["saved"]
    )
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in metrics] == list(range(1, 41)), "every step once"
