"""What a real run shows of each step: completions on the terminal, and the gap of engine and
trainer in its records.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rayloop.run.records.jsonl import JsonLines
from tests.support.runs import finished, settings

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("kept", [1, pytest.param(0, marks=pytest.mark.slow_faults)])
def test_each_step_of_a_run_shows_completions_of_a_recorded_group(
    tmp_path: Path, digits_model: Path, kept: int
) -> None:
    made = finished(settings(tmp_path, digits_model, steps=3, keep_rollouts=kept))
    shown = 2 * kept
    steps = re.split(r"^step \d/3 .*\n", made.text, flags=re.MULTILINE)[1:]
    assert len(steps) == 3
    for step in steps:
        rows = re.findall(r"^  #\d +-?\d\.\d{3} +[-+]\d\.\d{3}  \S", step, re.MULTILINE)
        assert len(rows) == shown
        headings = re.findall(
            r"^  task \S+: .*\n  sample  reward advantage  completion$", step, re.MULTILINE
        )
        assert len(headings) == bool(shown)
    if not kept:
        assert not list((made.folder / "rollouts").glob("step_*.jsonl"))
        return
    records = [
        record
        for step in range(1, 4)
        for record in JsonLines(made.folder / "rollouts" / f"step_{step:06d}.jsonl")
    ]
    learned = [record for record in records if record["status"] == "kept" and record["advantage"]]
    assert learned
    for record in learned:
        assert len(record["gaps"]) == sum(turn["sampled"] for turn in record["turns"])
        assert all(0 <= mean <= largest < 1e-3 for mean, largest in record["gaps"]), (
            "both compute in float32"
        )
    assert all(record["gaps"] == [] for record in records if record["status"] != "kept")
