"""Does GRPO teach a policy that mostly guesses to look with code? The quickstart of recipes/pyvision, with three seeds.

    python -m benchmarks.evidence.pyvision [--only SEED]      writes a JSON file beside this one, and a picture

For each seed: wall seconds of the command and CPU seconds of all its processes, accuracy and executed calls on held-out rows
(val) at each evaluation, greedy and sampled, and in training at each step. With ``--only`` that seed alone is run, and the others
of the file stay where they were made with the same configuration (``config``: hashes of the file and of the start weights). Runs
stay below runs/evidence/pyvision, which must not hold the seed yet. Needs the rows:
``python -m rayloop data prepare pyvision --out runs/data/pyvision``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarks.evidence.seeds import trained
from benchmarks.measure import machine
from rayloop.run.folder import RunFolder
from rayloop.view.reader import by_step

CONFIG = Path("recipes/pyvision/quickstart.yaml")
WEIGHTS = Path("recipes/pyvision/tiny/model.safetensors")
RUNS = Path("runs/evidence/pyvision")
RESULT, PICTURE = Path(__file__).with_suffix(".json"), Path("docs") / "pyvision.png"
SEEDS = (0, 1, 2)
HELD_OUT = ("val", "val_sampled")
SHOWN = {"accuracy": "accuracy", "calls": "executed calls per episode"}


def main() -> None:
    parser = argparse.ArgumentParser(description="The quickstart of PyVision with three seeds: what it learns.")
    parser.add_argument("--only", type=int, choices=SEEDS, help="run this seed, and keep the others of the file")
    chosen = parser.parse_args()
    config = {file.name: sha256(file.read_bytes()).hexdigest()[:16] for file in (CONFIG, WEIGHTS)}
    known = kept(config) if chosen.only is not None else {}
    for seed in SEEDS if chosen.only is None else (chosen.only,):
        known[seed] = measured(seed)
    runs = [known[seed] for seed in sorted(known)]
    found = {"config": config, "machine": machine(), "seeds": runs}
    RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    draw(runs)
    print("\n".join(markdown(runs)))


def kept(config: Mapping[str, str]) -> dict[int, dict[str, Any]]:
    """The seeds of the file, when it was made with this configuration."""
    if not RESULT.exists():
        return {}
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    return {run["seed"]: run for run in found["seeds"]} if found["config"] == config else {}


def measured(seed: int) -> dict[str, Any]:
    """One run from its command to its end. Raises BenchFailed when it fails."""
    folder = RUNS / f"seed-{seed}"
    spent = trained(CONFIG, folder, seed, ["checkpoint.resume=never"])
    return {"seed": seed, **spent, **recorded(RunFolder.at(folder))}


def recorded(folder: RunFolder) -> dict[str, Any]:
    """What the run folder has of it: ``training`` a list by step, ``held_out`` by the step of the evaluation."""
    events, metrics = list(folder.events), list(folder.metrics)
    return {
        "steps": len(metrics),
        "training": {
            name: [round(step[f"reward/component/{name}/mean"], 4) for step in metrics] for name in SHOWN
        },
        "held_out": {
            step: {key: value for key, value in event.items() if key.startswith(HELD_OUT)}
            for step, event in by_step(events, "evaluated").items()
        },
        "gain": next((event["rewards"] for event in reversed(events) if event["event"] == "gain"), {}),
        "ledger": next(event["ledger"] for event in events if event["event"] == "finished"),
    }  # fmt: skip


def draw(runs: Sequence[Mapping[str, Any]]) -> None:
    """Accuracy and calls over the steps: training as lines, held-out rows, sampled, as points."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots(1, 2)
    for axis, (name, label) in zip(axes, SHOWN.items(), strict=True):
        for colour, run in enumerate(runs):
            values = run["training"][name]
            axis.plot(range(1, len(values) + 1), values, color=f"C{colour}", alpha=0.5, label=f"seed {run['seed']}")
            points = {int(step): by[f"val_sampled/{name}/mean"] for step, by in run["held_out"].items()}
            axis.plot([*points], [*points.values()], "o", color=f"C{colour}")
        axis.set(xlabel="step", ylabel=label, ylim=(0, None))
    axes[0].legend(title="line: training\npoint: held-out, sampled")
    figure.savefig(PICTURE, dpi=100, metadata={"Software": None})


def markdown(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table of docs/results.md."""
    lines = ["| seed | s | CPU s | accuracy, sampled | calls | accuracy, greedy | calls |", "|---|---|---|---|---|---|---|"]
    for run in runs:
        by = {int(step): values for step, values in run["held_out"].items()}
        first, last = by[min(by)], by[max(by)]
        cells = [run["seed"], run["wall_s"], run["cpu_s"]]
        for kind in reversed(HELD_OUT):
            cells += [f"{first[key]:.3f} -> {last[key]:.3f}" for key in (f"{kind}/{name}/mean" for name in SHOWN)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


if __name__ == "__main__":
    main()
