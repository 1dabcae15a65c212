"""Does the first run visibly learn? The quickstart as it is shipped, by the README's command, with three seeds.

    python -m benchmarks.evidence.quickstart --out FILE [--seeds 3] [key=value ...]

For each seed: wall seconds of the command and CPU seconds of all its processes, every evaluation with its intervals, controls
before and after, and what the held-out rows (val; the test split is not read) have gained, paired by task. ``learned`` says
whether each seed has what is promised: ``PROMISED`` of a gain at least, an interval that excludes 0, in ``LIMIT`` seconds.
Runs stay below runs/evidence/quickstart, which must hold none of these seeds yet. About four minutes a seed on two cores.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence.seeds import trained
from benchmarks.measure import machine
from rayloop.run.folder import RunFolder
from rayloop.view.reader import by_step

CONFIG = Path("recipes/arc_vision/quickstart.yaml")
RUNS = Path("runs/evidence/quickstart")
PROMISED = {"sampled": 0.10, "greedy": 0.05}
LIMIT = 240.0
"""Seconds that the command may take on two cores."""


def main() -> None:
    parser = argparse.ArgumentParser(description="The quickstart with several seeds: what it gains, and what it costs.")
    parser.add_argument("--seeds", type=int, default=3, help="how many; the first is 0")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="of the configuration")
    chosen = parser.parse_args()
    seeds = [measured(seed, chosen.overrides) for seed in range(chosen.seeds)]
    found = {"overrides": chosen.overrides, "machine": machine(), "learned": all(map(learned, seeds)), "seeds": seeds}
    chosen.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("\n".join(markdown(found)))


def measured(seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """One run from its command to its end. Raises BenchFailed when it fails."""
    folder = RUNS / f"seed-{seed}"
    spent = trained(CONFIG, folder, seed, [*overrides, "checkpoint.resume=never"])
    return {"seed": seed, **spent, **recorded(RunFolder.at(folder))}


def recorded(folder: RunFolder) -> dict[str, Any]:
    """What the run folder has of it."""
    events, metrics = list(folder.events), list(folder.metrics)
    seconds = sorted(float(step["timing_s/step"]) for step in metrics)
    return {
        "steps": len(metrics),
        "first_step_s": round(metrics[0]["time"] - events[0]["time"], 1),
        "median_step_s": round(seconds[len(seconds) // 2], 2),
        "evaluations": [
            {"step": step, **{name: value for name, value in event.items() if name.startswith("val") and "control/" not in name}}
            for step, event in by_step(events, "evaluated").items()
        ],
        "controls": {
            step: {name: event[name] for name in ("arms", "differences", "looks")}
            for step, event in by_step(events, "controls").items()
        },
        "gain": next(event["rewards"] for event in reversed(events) if event["event"] == "gain"),
    }


def learned(run: dict[str, Any]) -> bool:
    """Whether it keeps the promise."""
    rose = all(run["gain"][kind]["gain"][0] >= least for kind, least in PROMISED.items())
    return rose and run["gain"]["sampled"]["gain"][1] > 0 and run["wall_s"] <= LIMIT


def markdown(found: dict[str, Any]) -> list[str]:
    """A table of the seeds."""
    lines = [
        "| seed | s | CPU s | steps | held-out, sampled | gain | held-out, greedy | gain |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in found["seeds"]:
        cells = [run["seed"], run["wall_s"], run["cpu_s"], run["steps"]]
        for kind in PROMISED:
            pair = run["gain"][kind]
            mean, low, high = pair["gain"]
            cells += [f"{pair['before']:.3f} -> {pair['after']:.3f}", f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


if __name__ == "__main__":
    main()
