"""Does GRPO teach the shipped checkpoint to point better? Three seeds, two rivals, controls, pages nobody trained on.

    python -m rayloop.benchmarks.evidence.arc_vision [--out benchmarks/evidence/arc_vision.json]

Arms, each from recipes/arc_vision/tiny: GRPO (learn.yaml); the same with rewards permuted within each group, which must
teach nothing; once, supervised steps on the same rows for the wall time that GRPO took (continue.yaml). Every choice was made on
val; the test split is read here, after the last training step. Runs and evaluations are kept below runs/evidence and
continued when the script is started again. Takes about 40 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rayloop.config.settings import load
from rayloop.measure.controls import RIGHT, SAMPLED, Item, gains
from rayloop.measure.intervals import Interval
from rayloop.run.config import RunConfig
from rayloop.run.folder import RunFolder
from rayloop.run.held_out import read_items

ROOT = Path("runs/evidence")
RECIPE, START = Path("recipes/arc_vision"), Path("recipes/arc_vision/tiny")
TEST, OOD = RECIPE / "pages/test.parquet", RECIPE / "pages/ood.parquet"
SEEDS = (0, 1, 2)
SAMPLES = 4
STEPS = load(RECIPE / "learn.yaml", [], RunConfig).steps
RUNS = [(arm, seed) for seed in SEEDS for arm in ("grpo", "permuted")] + [("supervised", 0)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Three seeds of GRPO on MiniWoB++ pages, with rivals and controls.")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/evidence/arc_vision.json"))
    out = parser.parse_args().out
    checkpoints = {(arm, seed): trained(arm, seed) for arm, seed in RUNS}
    start = evaluated("start", START)
    found = {
        "start": start,
        "runs": [
            {"arm": arm, "seed": seed, "seconds": seconds(arm, seed)} | compared(f"{arm}-{seed}", checkpoints[arm, seed])
            for arm, seed in checkpoints
        ],
    }
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("\n".join(markdown(found)))


def trained(arm: str, seed: int) -> Path:
    """Train one arm, or go on with it, and return its run or model folder."""
    name = f"{arm}-{seed}"
    folder = ROOT / name
    if arm != "supervised" and RunFolder(ROOT, name).last_step() == STEPS:
        return folder
    if arm == "supervised":
        if not (folder / "config.json").exists():
            cluster("sft", RECIPE / "continue.yaml", f"output={folder}", f"seed={seed}", f"seconds={seconds('grpo', seed)}")
        return folder
    control = ["algorithm.advantage.kind=permuted"] if arm == "permuted" else []
    cluster("train", RECIPE / "learn.yaml", f"output={ROOT}", f"name={name}", f"seed={seed}", *control)
    return folder


def seconds(arm: str, seed: int) -> float:
    """Wall time of the training steps; a supervised arm gets what GRPO took."""
    run = RunFolder(ROOT, f"{'grpo' if arm == 'supervised' else arm}-{seed}")
    return round(sum(float(record["timing_s/step"]) for record in run.metrics), 1)


def evaluated(name: str, checkpoint: Path) -> dict[str, Any]:
    """Summaries of a checkpoint on test, with controls and samples, and on the page types that no training had."""
    folder = ROOT / "test" / name
    options = ["--checkpoint", checkpoint, "--samples", SAMPLES]
    cluster("eval", RECIPE / "learn.yaml", *options, "--data", TEST, "--controls", "--out", folder)
    cluster("eval", RECIPE / "learn.yaml", "--checkpoint", checkpoint, "--data", OOD, "--out", folder / "ood")
    return {
        split: json.loads((path / "summary.json").read_text(encoding="utf-8"))
        for split, path in (("test", folder), ("ood", folder / "ood"))
    }


def compared(name: str, checkpoint: Path) -> dict[str, Any]:
    """The same, and how it differs from the start on the same pages, paired."""
    summaries = evaluated(name, checkpoint)
    after, before = (read_items(ROOT / "test" / arm / "items.jsonl") for arm in (name, "start"))
    return summaries | {"gain": {arm: gains(only(after, arm), only(before, arm)) for arm in (RIGHT, SAMPLED)}}


def only(items: Iterable[Item], arm: str) -> list[Item]:
    return [item for item in items if item.arm == arm]


def cluster(*arguments: object) -> None:
    """Run ``python -m rayloop``. Raises CalledProcessError when it fails."""
    print("+ python -m rayloop", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "rayloop", *map(str, arguments)], check=True)


def markdown(found: dict[str, Any]) -> list[str]:
    """The table of docs/results.md."""
    lines = [
        "| variant | seed | s | IoU greedy | gain | IoU sampled | gain | click greedy | gain | ood IoU |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for run in [{"arm": "start", "seed": "", "seconds": "", "gain": None, **found["start"]}, *found["runs"]]:
        arms, gain = run["test"]["arms"], run["gain"]
        cells = [run["arm"], run["seed"], run["seconds"]]
        for arm, score in ((RIGHT, "iou"), (SAMPLED, "iou"), (RIGHT, "click")):
            cells += [f"{arms[arm][score][0]:.3f}", spread(gain[arm][score]) if gain else ""]
        cells.append(f"{run['ood']['arms'][RIGHT]['iou'][0]:.3f}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "| variant | seed | blind | same source | other source |", "|---|---|---|---|---|"]
    for run in [{"arm": "start", "seed": "", **found["start"]}, *found["runs"]]:
        differences = run["test"]["differences"]
        cells = [run["arm"], run["seed"], *(spread(differences[c]["iou"]) for c in ("blind", "same source", "other source"))]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def spread(value: Interval) -> str:
    mean, low, high = value
    return f"{mean:+.3f} [too few items]" if low is None else f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"


if __name__ == "__main__":
    main()
