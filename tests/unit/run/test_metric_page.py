"""docs/bring_your_own/metric.md: a component is a metric by itself, and the patch of the page adds
another.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rayloop.core.groups import Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import Message, Task
from rayloop.run.records.metrics import prometheus, validate
from rayloop.run.records.step_metrics import Collected, step_metrics
from tests.support.pages import ROOT, write_snippets
from tests.unit.groups import make_group

PAGE = "bring_your_own/metric.md"
RECORDS = "rayloop/run/records"
ADDED = "rollout/turns/max"
STALE = "docs/bring_your_own/metric.md quotes these lines: adapt its patch"


def test_a_component_and_a_flag_are_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(write_snippets(PAGE, tmp_path)))
    score = importlib.import_module("words").score
    task = Task("t", (Message("user", ("?",)),), "yes")
    given = [score(task, ScoreContext(0, [text])) for text in ("oh yes", "")]
    group = make_group(0, [0.0, 0.0])
    group = group.map(
        {i: replace(group.members[i], outcome=outcome) for i, outcome in enumerate(given)}
    )
    assert given[0] == Scored(1.0, {"words": 2.0})
    found = step_metrics(Collected((group,), (group,)), 2)
    assert (found["reward/component/words/mean"], found["flag/silent"]) == (1.0, 0.5)
    assert validate([*found, "val/words/mean"]) == ()
    assert prometheus("reward/component/words/mean")[1] == {"name": "words", "source": ""}


def test_the_patch_of_the_page_adds_a_metric(tmp_path: Path) -> None:
    """Onto copies of the files: one line where it is computed, one row in the table."""
    assert validate([ADDED]) == (ADDED,), (
        f"{ADDED} exists by now, and the page adds it: give its patch another metric"
    )
    write_snippets(PAGE, tmp_path)
    (tmp_path / RECORDS).mkdir(parents=True)
    for name in ("step_metrics.py", "metrics.py", "metrics.yaml"):
        shutil.copy(ROOT / RECORDS / name, tmp_path / RECORDS / name)
    done = subprocess.run(
        ["git", "apply", "--unidiff-zero", "longest.patch"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, f"{STALE}\n{done.stderr}"
    program = (
        "import rayloop, rayloop.run.records; rayloop.run.records.__path__.insert(0,"
        " 'rayloop/run/records')\nfrom rayloop.run.records.step_metrics import Collected,"
        " step_metrics\nfrom rayloop.run.records.metrics import validate\nfrom tests.unit.groups"
        " import make_group\ngroup = make_group(0, [0.0, 1.0], turns=7)\nfound ="
        f" step_metrics(Collected((group,), (group,)), 2)\nassert found['{ADDED}'] == 7.0\nassert"
        " validate(found) == ()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{STALE}\n{done.stderr}"
