"""``status``, ``stacks``, ``logs`` and ``stop`` of a run that trains, as a person types them in
another shell.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.models import digits_model as digits_model
from tests.support.runs import ROOT, run, settings

FROM_ELSEWHERE = """
import sys
from rayloop.commands.arguments import live_cluster
from rayloop.run.folder import RunFolder
with live_cluster(RunFolder.at(sys.argv[1])) as place:
    from rayloop.cluster.stages.live import stop_driver
    stop_driver(place)
"""
"""What `stop` does for a run of another machine; tests/unit/cluster/test_live.py has one of this
machine.
"""


def typed(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "rayloop", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow_faults
@pytest.mark.timeout(600)
def test_a_live_run_is_looked_at_and_stopped(digits_model: Path, tmp_path: Path) -> None:
    config = settings(tmp_path, digits_model, steps=100_000)
    with run(config) as made:
        made.until(lambda: made.metrics, "the first step", deadline=240)
        folder = str(made.folder)
        status = typed("status", folder)
        assert f"process {made.process.pid} on" in status
        assert "of 100000, last progress" in status
        stacks = typed("stacks", folder, "--role", "rollout")
        assert stacks.count("=== rollout-0-") == 1
        assert "environment-0" not in stacks
        assert "MainThread" in stacks
        logs = typed("logs", folder, "--lines", "3")
        assert {"driver", "rollout", "policy"} <= {
            line[4:].partition("-")[0] for line in logs.splitlines() if line[:4] == "=== "
        }
        asked = [sys.executable, "-c", FROM_ELSEWHERE, folder]
        subprocess.run(
            asked, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=180
        )
        made.ends(75)
        assert "ended: preempted" in typed("status", folder)
