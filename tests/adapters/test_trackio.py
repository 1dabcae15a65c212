"""docs/bring_your_own/metric.md: the logger of the page in the published Trackio, in a Python of
its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.runs import ROOT

pytestmark = [pytest.mark.adapters, pytest.mark.timeout(120)]
PYTHON = ROOT / ".venv-trackio/bin/python"
PROGRAM = """
import json, sys
from trackio_logger import Trackio
from rayloop.config.settings import Component
component = Component.model_validate({"use": "trackio_logger:Trackio", "with": {"project": "mine"}})
for attempt in (1, 2):  # a run that is resumed opens its loggers again
    logger = Trackio(component.options(), "named", {"steps": 4}, None)
    for step in (2 * attempt - 1, 2 * attempt):
        logger.log(step, {"step": float(step), "reward/mean": 0.25 * step, "ledger/filtered[all_wrong]": 8.0})
    logger.close()
"""


def test_the_logger_of_the_page_keeps_each_step(tmp_path: Path) -> None:
    if not PYTHON.exists():
        pytest.skip("make test-adapters installs trackio")
    page = (ROOT / "docs/bring_your_own/metric.md").read_text(encoding="utf-8")
    [program] = re.findall(r"```python title=trackio_logger.py\n(.*?)```", page, re.DOTALL)
    (tmp_path / "trackio_logger.py").write_text(program, encoding="utf-8")
    kept = {**os.environ, "TRACKIO_DIR": str(tmp_path / "kept"), "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    subprocess.run([PYTHON, "-c", PROGRAM], env=kept, check=True, timeout=90)
    command = [
        PYTHON.with_name("trackio"),
        "get",
        "metric",
        "--project",
        "mine",
        "--run",
        "named",
        "--metric",
        "reward/mean",
        "--json",
    ]
    found = json.loads(
        subprocess.run(
            command, env=kept, check=True, capture_output=True, text=True, timeout=60
        ).stdout
    )
    assert [(point["step"], point["value"]) for point in found["values"]] == [
        (step, 0.25 * step) for step in (1, 2, 3, 4)
    ]
