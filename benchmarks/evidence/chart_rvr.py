"""Does GRPO on Chart-RVR's rewards raise what its warm start earns, and by looking? recipes/chart_rvr/quickstart.yaml, three seeds.

    python -m benchmarks.evidence.chart_rvr [--only SEED] [--note TEXT] [--out FILE] [key=value ...]

Each seed, or the one of ``--only``, is put into the file beside those that are there, with the hash of the configuration that it
ran, of the start weights, and ``--note``, what else the machine did. For each: wall and CPU seconds of the command; reward and
components on held-out charts (the split ``test``) before and after, sampled as in training and greedy; what was gained (paired by
chart); and what the right chart is worth over the best answer without one, and over another chart of the same type and of the
other type. All with 95 % bootstrap intervals. Needs the rows:
``python -m rayloop data prepare chart_rvr --small --out runs/data/chart_rvr``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarks.evidence.seeds import digest, trained
from benchmarks.measure import machine
from rayloop.config.settings import load
from rayloop.measure.controls import RIGHT, SAMPLED, WORDS, Item, gains, summarise
from rayloop.measure.intervals import Interval
from rayloop.run.config import RunConfig
from rayloop.run.folder import RunFolder
from rayloop.run.held_out import read_items

CONFIG = Path("recipes/chart_rvr/quickstart.yaml")
RUNS = Path("runs/evidence/chart_rvr")
HELD_OUT = ("data.eval=runs/data/chart_rvr/test.jsonl", "evaluation.samples=4")
"""The run's own evaluations, at its start and its end, are those that are quoted."""
SEEDS = (0, 1, 2)
PLACES = 4
"""Decimals that are kept."""


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO on small charts over the warm start, with controls.")
    parser.add_argument("--only", type=int, metavar="SEED", help="this seed alone")
    parser.add_argument("--note", default="", help="what else the machine did meanwhile")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="of the configuration")
    chosen = parser.parse_args()
    overrides = [*HELD_OUT, *chosen.overrides]
    config = load(CONFIG, overrides, RunConfig)
    weights = sha256((Path(config.model.path) / "model.safetensors").read_bytes()).hexdigest()[:16]
    found = json.loads(chosen.out.read_text(encoding="utf-8")) if chosen.out.exists() else {"seeds": {}}
    for seed in SEEDS if chosen.only is None else [chosen.only]:
        about = {"config": digest(config), "weights": weights, "overrides": chosen.overrides, "note": chosen.note}
        spent = trained(CONFIG, RUNS / f"seed-{seed}", seed, overrides)
        recorded = measured(RunFolder.at(RUNS / f"seed-{seed}"))
        found["seeds"][str(seed)] = about | {"machine": machine()} | spent | recorded
        chosen.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("\n".join(markdown(found)))


def measured(folder: RunFolder) -> dict[str, Any]:
    """What the first and the last evaluation of a run folder say, and how they differ."""
    files = list(folder.evaluations.files().values())
    before, after = (read_items(file) for file in (files[0], files[-1]))
    return {
        "steps": len(list(folder.metrics)),
        "training": [round(record["reward/mean"], PLACES) for record in folder.metrics],
        "before": said(before),
        "after": said(after),
        "gain": {arm: rounded(gains(only(after, arm), only(before, arm))) for arm in (SAMPLED, RIGHT)},
    }


def said(items: Sequence[Item]) -> dict[str, Any]:
    """Means by arm, and what the right chart is worth over each control."""
    summary = summarise(items, 0)
    return {
        "charts": summary["items"],
        "arms": {arm: rounded(scores) for arm, scores in summary["arms"].items()},
        "over": {arm: rounded(scores) for arm, scores in summary["differences"].items()},
        "looks": summary["looks"],
    }


def only(items: Sequence[Item], arm: str) -> list[Item]:
    return [item for item in items if item.arm == arm]


def rounded(scores: Mapping[str, Interval]) -> dict[str, list[float | None]]:
    return {name: [None if n is None else round(n, PLACES) for n in scores[name]] for name in sorted(scores)}


def markdown(found: Mapping[str, Any]) -> list[str]:
    """The tables of docs/results.md."""
    lines = ["| seed | s | CPU s | arm | reward | gain | accuracy | table |", "|---|---|---|---|---|---|---|---|"]
    for seed, run in sorted(found["seeds"].items()):
        for arm, gain in run["gain"].items():
            before, after = run["before"]["arms"][arm], run["after"]["arms"][arm]
            moved = [f"{before[name][0]:.3f} -> {after[name][0]:.3f}" for name in ("reward", "accuracy", "table")]
            name = "greedy" if arm == RIGHT else arm
            cells = [seed, run["wall_s"], run["cpu_s"], name, moved[0], spread(gain["reward"]), *moved[1:]]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "| seed | right chart, greedy, over | reward, before | after | accuracy, after |", "|---|---|---|---|---|"]
    for seed, run in sorted(found["seeds"].items()):
        for arm, after in run["after"]["over"].items():
            before = run["before"]["over"][arm]
            cells = [seed, WORDS[arm], spread(before["reward"]), spread(after["reward"]), spread(after["accuracy"])]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def spread(value: Sequence[float | None]) -> str:
    mean, low, high = value
    return f"{mean:+.3f}" if low is None else f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"


if __name__ == "__main__":
    main()
