"""Every step of a real run with ``keep_rollouts: all`` is computed again bit by bit: single turns,
several turns with images on two ranks, and agents that begin a second context.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rayloop.cli import main
from tests.support import recorded_runs
from tests.support.runs import run

DEADLINE = 1500.0
"""Seconds of a run: its three steps have several updates, and machines of these lanes are busy."""
pytestmark = [pytest.mark.slow_faults, pytest.mark.timeout(1700)]


def replayed(config: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """What ``replay`` prints of each step of a run with this configuration."""
    with run(config) as made:
        made.ends(0, DEADLINE)
    assert main(["replay", str(made.folder), "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def equal_steps(found: list[dict[str, Any]]) -> list[int]:
    """The steps that equal their record, and have the rewards and tokens of whole groups."""
    return [
        step["step"]
        for step in found
        if step["equal"]
        and step["stages"]["rewards"]["total"] >= 8
        and step["stages"]["tokens"]["total"] > 40
    ]


def test_single_turns(
    tmp_path: Path, digits_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = replayed(recorded_runs.single_turns(tmp_path, digits_model), capsys)
    assert equal_steps(found) == [1, 2, 3], found


def test_several_turns_with_images_on_two_ranks(
    tmp_path: Path, picture_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = replayed(recorded_runs.several_turns(tmp_path, picture_model), capsys)
    assert equal_steps(found) == [1, 2, 3], found
    assert all(step["stages"]["micro-batches"]["total"] >= 8 for step in found), (
        "4 updates, 2 ranks"
    )


def test_agents(tmp_path: Path, grounding_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = replayed(recorded_runs.agents(tmp_path, grounding_model), capsys)
    assert equal_steps(found) == [1, 2, 3], found
    file = tmp_path / "run" / "rollouts" / "step_000001.json"
    assert '"restart": true' in file.read_text(encoding="utf-8"), "some began a second context"
