"""The driver's half of the algorithm starts fast and stays small: importing it loads neither torch
nor ray.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

LIGHT = [
    "rayloop.core.ledger",
    "rayloop.core.types",
    "rayloop.grpo.settings",
    "rayloop.grpo.advantage",
    "rayloop.grpo.selection",
    "rayloop.grpo.replay",
    "rayloop.grpo.staleness",
    "rayloop.grpo.balance",
]


@pytest.mark.parametrize(
    ("modules", "heavy"), [(LIGHT, False), (["rayloop.grpo.losses.policy"], True)]
)
def test_loads_torch_only_for_the_loss(modules: list[str], heavy: bool) -> None:
    code = f"import sys, {', '.join(modules)}; print('torch' in sys.modules, 'ray' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == [str(heavy), "False"]
