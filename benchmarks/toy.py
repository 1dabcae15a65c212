"""Memory and step time of a whole run on CPU: tiny Qwen2.5-VL, all roles, 8 prompts x 8 samples, 32 tokens each.

    python -m benchmarks.toy [--steps 7]

Prints one JSON line: median seconds of a step after the first (and of its parts), and the largest sum of PSS
(proportional set size) over the run's process tree, sampled every half second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import yaml

from rayloop.core.jsonl import JsonLines
from rayloop.engines.tiny_vlm import write_tiny_vlm

ROWS = Path(__file__).parent.parent / "tests" / "data" / "grounding" / "train.jsonl"
SAMPLE_EVERY = 0.5


def config(folder: Path, steps: int) -> dict[str, object]:
    """The toy: every answer has 32 tokens, so that speed does not depend on what the random model says."""
    return {
        "name": "toy",
        "output": str(folder),
        "steps": steps,
        "model": {"path": str(folder / "model")},
        "data": {"train": str(ROWS), "reader": {"use": "recipes.arc_vision.data:GroundingRows"}},
        "rollout": {"engine": {"threads": 2}, "sampling": {"max_tokens": 32, "min_tokens": 32}},
        "reward": {"source": {"use": "benchmarks.toy:DigitShare"}},
        "reference": {"kind": "actor"},
        "policy": {"engine": {"threads": 2}, "optimizer": {"lr": 1e-4}, "loss": {"kl_coef": 0.01}},
        "algorithm": {"group_size": 8, "groups_per_step": 8, "filtering": {"filters": []}},
        "checkpoint": {"every": 1000},
    }


def tree_pss(root: psutil.Process) -> float:
    """GiB of PSS of a process and all its descendants; a process that has just ended counts as nothing."""
    total = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += next((int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")), 0)
    return total / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=7)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        texts = [json.loads(line)["instruction"] for line in ROWS.read_text().splitlines()]
        write_tiny_vlm(folder / "model", texts)
        (folder / "toy.yaml").write_text(yaml.safe_dump(config(folder, steps)))
        began = time.monotonic()
        run = subprocess.Popen([sys.executable, "-m", "cluster", "train", str(folder / "toy.yaml")], stdout=sys.stderr)
        peak = 0.0
        while run.poll() is None:
            peak = max(peak, tree_pss(psutil.Process(run.pid)))
            time.sleep(SAMPLE_EVERY)
        records = list(JsonLines(folder / "toy" / "metrics.jsonl"))[1:]
    if run.returncode:
        sys.exit(run.returncode)
    parts = ("step", "gen", "update_actor", "update_weights")
    seconds = {name: round(statistics.median(r[f"timing_s/{name}"] for r in records), 3) for name in parts}
    wall = round(time.monotonic() - began, 1)
    print(json.dumps({"seconds": seconds, "peak_pss_gib": round(peak, 2), "steps": steps, "wall_s": wall}))


class DigitShare:
    """A toy reward: the share of characters that are digits."""

    from rayloop.core.config import Settings

    def __init__(self, settings: object) -> None:
        del settings

    def score(self, trajectory: object, task: object, context: object) -> float:
        text = context.texts[-1]  # type: ignore[attr-defined]
        return sum(character.isdigit() for character in text) / max(1, len(text))


if __name__ == "__main__":
    main()
