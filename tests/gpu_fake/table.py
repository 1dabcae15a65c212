"""``python -m tests.gpu_fake.table``: measures an update of every configuration with GPUs, and
writes ``peaks.json``: GiB.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.gpu_fake.models import configurations, same
from tests.support.runs import ROOT

PEAKS = Path(__file__).with_name("peaks.json")
PROCESSES = 2
DEADLINE = 900.0


def measured(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """What ``measure`` finds, by path.

    Raises RuntimeError, and TimeoutExpired after ``DEADLINE`` seconds.
    """
    equal = defaultdict[str, list[Path]](list)
    for path in paths:
        equal[same(path)].append(path)
    first = [str(group[0]) for group in equal.values()]
    with ThreadPoolExecutor(PROCESSES) as pool:
        found = {
            k: v
            for part in pool.map(_run, (first[i::PROCESSES] for i in range(PROCESSES)))
            for k, v in part.items()
        }
    return {str(path): found[str(group[0])] for group in equal.values() for path in group}


def _run(paths: Sequence[str]) -> dict[str, dict[str, Any]]:
    if not paths:
        return {}
    command = [sys.executable, "-m", "tests.gpu_fake.measure", *paths]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["config"]: line for line in lines}


if __name__ == "__main__":
    peaks = {path: one["peak_gib"] for path, one in sorted(measured(configurations()).items())}
    PEAKS.write_text(json.dumps(peaks, indent=2) + "\n", encoding="utf-8")
