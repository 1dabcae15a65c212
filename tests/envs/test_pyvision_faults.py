"""The interpreter's fork server is killed under a real run of the recipe: the run ends, and nothing of it becomes a reward."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from rayloop.run.folder import RunFolder
from recipes.pyvision import prepare
from tests.support.runs import eventually, ledger_closes

pytestmark = [pytest.mark.env, pytest.mark.timeout(500)]

SERVER = "rayloop.sandbox.server"


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(prepare, "ROWS", {"train": 64, "val": 8})
    assert prepare.main(["--out", str(tmp_path / "rows")]) == 0
    return tmp_path / "rows"


def servers(run: psutil.Process) -> list[psutil.Process]:
    """The fork servers below a run: of each, the process that was started first."""
    found = []
    for process in run.children(recursive=True):
        try:
            if SERVER in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return sorted(found, key=lambda process: process.create_time())


def test_a_run_outlives_its_interpreters(rows: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "cluster", "train", "recipes/pyvision/quickstart.yaml", f"output={tmp_path / 'runs'}",
        f"data.train={rows / 'train.jsonl'}", f"data.eval={rows / 'val.jsonl'}", "steps=3", "evaluation.every=0",
        "checkpoint.every=3", "algorithm.group_size=4", "algorithm.groups_per_step=4", "publish.parity=warn",
    ]  # fmt: skip
    run = subprocess.Popen(command, start_new_session=True)
    folder = RunFolder(tmp_path / "runs", "pyvision")
    try:
        eventually(lambda: folder.last_step() >= 1, "the first step", 300)
        killed = 0
        for server in servers(psutil.Process(run.pid)):
            os.kill(server.pid, signal.SIGKILL)
            killed += 1
        assert killed
        assert run.wait(200) == 0
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
    events: list[dict[str, Any]] = list(folder.events)
    assert [record["step"] for record in folder.metrics] == [1, 2, 3]
    counts = next(event["ledger"] for event in events if event["event"] == "finished")
    ledger_closes(counts)
    failed = [event for event in events if event["event"] == "episode_failed"]
    assert failed, "the kill was noticed by nobody"
    assert all("sandbox" in event["why"] or "interpreter" in event["why"] for event in failed), failed
    for file in folder.rollouts.files().values():
        for line in file.read_text().splitlines():
            record = json.loads(line)
            assert record["reward"] is None or record["end_reason"] != "environment_failure"
