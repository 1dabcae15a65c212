"""What tests may not look at (tests/support/hermetic.py) fails where it is looked at."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support import hermetic


def test_a_run_of_the_checkout_can_neither_be_read_nor_asked_for() -> None:
    metrics = hermetic.ROOT / "runs/quickstart/metrics.jsonl"
    for look in (
        metrics.read_text,
        metrics.exists,
        metrics.is_file,
        lambda: os.listdir(hermetic.ROOT / "runs"),
    ):
        with pytest.raises(hermetic.ReadsThisMachine, match="a fresh clone has no runs"):
            look()


def test_the_home_of_this_machines_user_is_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hermetic, "_HOME", "/somebody")
    with pytest.raises(hermetic.ReadsThisMachine, match="below the home"):
        Path("/somebody/.netrc").read_text(encoding="utf-8")
    assert Path.home() != Path("/somebody")


def test_a_program_of_another_lane_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hermetic, "_which", lambda name, *_: f"/usr/bin/{name}")
    assert shutil.which("scontrol") is None
    assert shutil.which("sh") == "/usr/bin/sh"
    hermetic.marks.add("slurm")
    assert shutil.which("scontrol") == "/usr/bin/scontrol"
