"""The interpreter's fork server is killed under a real run of the recipe: the run ends, and nothing
of it becomes a reward.
"""

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

from rayloop.recipes.pyvision import prepare
from rayloop.run.folder import RunFolder
from tests.support.runs import eventually, ledger_closes

pytestmark = [pytest.mark.env, pytest.mark.timeout(500)]

SERVER = "rayloop.sandbox.server"


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(prepare, "ROWS", {"train": 64, "val": 8})
    assert prepare.main(["--out", str(tmp_path / "rows")]) == 0
    return tmp_path / "rows"


def killed(run: psutil.Process) -> int:
    """How many processes of fork servers below a run were there, and are killed now."""
    count = 0
    for process in run.children(recursive=True):
        try:
            if SERVER in " ".join(process.cmdline()):
                process.kill()
                count += 1
        except psutil.Error:
            continue
    return count


def failures(folder: RunFolder) -> list[dict[str, Any]]:
    return [event for event in folder.events if event["event"] == "episode_failed"]


def test_a_run_outlives_its_interpreters(rows: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "rayloop",
        "train",
        "recipes/pyvision/quickstart.yaml",
        f"output={tmp_path / 'runs'}",
        f"data.train={rows / 'train.jsonl'}",
        f"data.eval={rows / 'val.jsonl'}",
        "steps=6",
        "evaluation.every=0",
        "checkpoint.every=6",
        "algorithm.group_size=4",
        "algorithm.groups_per_step=4",
        "weight_sync.logprob_check=warn",
    ]
    run = subprocess.Popen(command, start_new_session=True)
    folder = RunFolder(tmp_path / "runs", "pyvision")
    try:
        eventually(lambda: folder.last_step() >= 1, "the first step", 300)
        # Between two turns nobody misses a fork server: the next one starts another. So they are
        # killed until an episode does.
        eventually(
            lambda: killed(psutil.Process(run.pid)) and failures(folder),
            "an episode that lost its interpreter",
            60,
        )
        assert run.wait(200) == 0
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
    events: list[dict[str, Any]] = list(folder.events)
    assert [record["step"] for record in folder.metrics] == list(range(1, 7))
    counts = next(event["ledger"] for event in events if event["event"] == "finished")
    ledger_closes(counts)
    reported = (
        "the sandbox failed",
        "the environment actor was lost",
    )  # the latter by the first: three tasks failed on it
    assert all(any(why in event["why"] for why in reported) for event in failures(folder))
    assert any(reported[0] in event["why"] for event in failures(folder))
    for file in folder.rollouts.files().values():
        for line in file.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            assert record["end_reason"] != "environment_failure"
