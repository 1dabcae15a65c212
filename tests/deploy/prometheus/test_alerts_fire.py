"""A real Prometheus scrapes a real run in which something goes wrong: the alert fires, and resolves
when it is mended.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.prometheus.server import Prometheus, faster, prometheus
from tests.support.marks import kill
from tests.support.models import digits_model as digits_model
from tests.support.runs import ROOT, Run, eventually, pause, resume, run, settings

pytestmark = [
    pytest.mark.alerts,
    pytest.mark.timeout(500),
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="Debian's package prometheus is not installed"
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a disk that fills"),
]
ABSENT = {
    "ray_node_gpus_utilization / 100",
    *(
        f'sum by ({by}) (ray_rayloop_{what}{{run=~"run"}})'
        for by, what in (("reason", "filtered"), ("reason", "excluded"), ("source", "stale"))
    ),
}
"""Queries of the dashboard about what this machine lacks, and about trajectories that no fault of
this test makes.
"""


def empty(queries: set[str], server: Prometheus) -> set[str]:
    """The queries without a value."""
    return {query for query in queries if not server.query(query)}


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A disk of 96 MiB for the run folder."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def configuration(disk: Path, model: Path, drift: Path) -> dict[str, Any]:
    """A run that does not end by itself."""
    return settings(
        disk,
        model,
        steps=100_000,
        policy__optimizer__lr=1.0e-9,
        rollout__actors=2,
        checkpoint__every=2,
        checkpoint__keep=1,
        evaluation={"every": 2, "samples": 1},
        data__eval=str(disk / "train.jsonl"),
        rollout__engine={
            "use": "tests.support.drifting:DriftingEngine",
            "with": {"drift": str(drift)},
        },
        recovery__replacements=100,
    )


def until(made: Run, server: Prometheus, name: str, firing: bool) -> float:
    """Wait until the alert fires, or fires no more, while the run goes on. Returns the seconds."""
    began = time.monotonic()
    made.until(
        lambda: (name in server.firing()) == firing,
        f"{name} {'fires' if firing else 'is resolved'}",
        120,
    )
    return round(time.monotonic() - began, 1)


def stall(made: Run, server: Prometheus) -> dict[str, float]:
    """Both engines stand still."""
    engines = made.actors("RolloutActor")
    for engine in engines:
        pause(engine)
    fired = until(made, server, "RunStandsStill", True)
    for engine in engines:
        resume(engine)
    return {"fired": fired, "resolved": until(made, server, "RunStandsStill", False)}


def dead_engine(made: Run, server: Prometheus) -> dict[str, float]:
    """An engine dies, and each that takes its place, until somebody is called."""
    seen = made.actors("RolloutActor")
    kill(seen[0])

    def called() -> bool:
        for engine in made.actors("RolloutActor"):
            if engine not in seen:
                seen.append(engine)
                kill(engine)
        return "ActorsMissing" in server.firing()

    made.until(called, "ActorsMissing fires", 120)
    return {"killed": len(seen) - 1, "resolved": until(made, server, "ActorsMissing", False)}


def full_disk(made: Run, server: Prometheus) -> dict[str, float]:
    """The disk of the run folder is 94 % full; checkpoints still fit."""
    filler, disk = made.folder.parent / "filler", shutil.disk_usage(made.folder)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, disk.free - disk.total * 6 // 100)
    fired = until(made, server, "DiskNearlyFull", True)
    filler.unlink()
    return {"fired": fired, "resolved": until(made, server, "DiskNearlyFull", False)}


def drift(made: Run, server: Prometheus, file: Path) -> dict[str, float]:
    """The engines have other weights than the trainer."""
    file.touch()
    fired = until(made, server, "LogprobMismatch", True)
    file.unlink()
    return {"fired": fired, "resolved": until(made, server, "LogprobMismatch", False)}


def test_every_injected_fault_calls_somebody_and_every_panel_has_values(
    tmp_path: Path, digits_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "RAY_metrics_report_interval_ms", "4000"
    )  # a gauge is set every 3 s; Ray drops it after this time
    file, found = tmp_path / "drift", dict[str, dict[str, float]]()
    with (
        small_disk(tmp_path / "disk") as disk,
        run(configuration(disk, digits_model, file)) as made,
    ):
        made.until((ports := made.folder / "prometheus.json").exists, "the run names its ports")
        with prometheus(tmp_path, ports) as server:
            made.until(
                lambda: server.query("ray_rayloop_step > 2"), "Prometheus has the third step"
            )
            made.until(lambda: not server.firing(), "nothing is wrong", 60)
            panels = json.loads((ROOT / "deploy/grafana/run.json").read_text(encoding="utf-8"))[
                "panels"
            ]
            queries = {
                target["expr"].replace("$run", "run")
                for panel in panels
                for target in panel.get("targets", ())
            }
            eventually(
                lambda: not empty(queries, server) - ABSENT, "all panels have values", 60, 1.0
            )
            found["stall"] = stall(made, server)
            found["drift"] = drift(made, server, file)
            found["full disk"] = full_disk(made, server)
            found["dead engine"] = dead_engine(made, server)
            left = server.firing() & {
                "RunStandsStill",
                "LogprobMismatch",
                "DiskNearlyFull",
                "ActorsMissing",
            }
            assert left == set(), "each was resolved, and stays so"
        step = made.metrics[-1]["step"]
        made.until(lambda: made.metrics[-1]["step"] > step, "the run goes on after all of it")
        made.killed()
    print(json.dumps(found))
    assert found["dead engine"]["killed"] >= 1
    assert all(times["fired"] > 1 for name, times in found.items() if name != "dead engine"), (
        "no alert fires before its time"
    )


def test_faster_rules_differ_in_their_durations_alone() -> None:
    text = "expr: a_progress_age > 900 and increase(b[1h]) > 5\nfor: 10m\nfor: 30s\n"
    assert faster(text) == "expr: a_progress_age > 15 and increase(b[60s]) > 5\nfor: 10s\nfor: 1s\n"
