"""One run of a configuration with a seed, timed, for evidence with several seeds."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import BenchFailed
from benchmarks.processes import EVERY, Tree
from rayloop.run.config import RunConfig


def digest(config: RunConfig) -> str:
    """Of all values, so that figures of another configuration are recognised."""
    return hashlib.sha256(config.model_dump_json(exclude={"seed", "name", "output"}).encode()).hexdigest()[:16]


def trained(config: Path, folder: Path, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Train in ``folder`` from the command to its end, and return wall seconds and CPU seconds of all processes.

    A run that is there goes on. Raises BenchFailed when it fails.
    """
    own = [f"output={folder.parent}", f"name={folder.name}", f"seed={seed}"]
    command = [sys.executable, "-m", "rayloop", "train", str(config), *overrides, *own]
    print("+ " + " ".join(command), flush=True)
    began = time.monotonic()
    run = subprocess.Popen(command)
    tree = Tree(run.pid)
    while run.poll() is None:
        tree.look()
        time.sleep(EVERY)
    if run.returncode:
        raise BenchFailed(f"seed {seed} ended with {run.returncode}; what it said is above")
    return {"wall_s": round(time.monotonic() - began, 1), "cpu_s": round(tree.seconds)}
