"""``recipe NAME``: a checkpoint on the held-out rows of a recipe (its module ``benchmark``), through ``python -m rayloop eval``.

Writes ``<out>/benchmark.json``: for each set means with 95 % intervals by arm (``right`` is greedy, ``sampled``, controls)
and source, what the right image gains over each control, and the hashes of configuration, weights and data that they belong to.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rayloop import recipes
from rayloop.core.failures import ConfigError, RayloopError
from rayloop.measure.benchmark import Benchmark, HeldOut
from rayloop.measure.controls import RIGHT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    known = recipes.having("benchmark")
    parser.add_argument("recipe", metavar="RECIPE", choices=known, help=", ".join(known))
    parser.add_argument("--checkpoint", type=Path, required=True, help="run folder, checkpoint or model folder")
    parser.add_argument("--out", type=Path, required=True, help="folder of the answers; continued when it exists")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="of the recipe's configuration")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    chosen: Benchmark = import_module(f"rayloop.recipes.{arguments.recipe}.benchmark").BENCHMARK
    measured = measure(chosen, arguments.checkpoint, arguments.out, arguments.overrides)
    found = {"recipe": arguments.recipe, "checkpoint": str(arguments.checkpoint), "sets": measured}
    file = arguments.out / "benchmark.json"
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name, summary in measured.items():
        mean, low, high = summary["arms"][RIGHT][chosen.score]
        bounds = "too few items" if low is None else f"{low:.3f}, {high:.3f}"
        print(f"{name}: {chosen.score} {mean:.3f} [{bounds}] over {summary['items']} rows")
    print(f"wrote {file}")
    return 1 if any(summary["unscored"] for summary in measured.values()) else 0


def measure(benchmark: Benchmark, checkpoint: Path, out: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Set -> the summary of its evaluation. Raises ConfigError when rows are missing, RayloopError when an evaluation fails."""
    if absent := [held_out.path for held_out in benchmark.sets.values() if not Path(held_out.path).is_file()]:
        remedy = f". To make them: {benchmark.missing}" if benchmark.missing else ", beside the current directory"
        raise ConfigError(f"held-out rows are missing: {', '.join(absent)}{remedy}")
    return {
        name: _evaluate(benchmark.config, held_out, checkpoint, out / name, overrides) for name, held_out in benchmark.sets.items()
    }


def _evaluate(config: str, rows: HeldOut, checkpoint: Path, out: Path, overrides: Sequence[str]) -> dict[str, Any]:
    asked = ["--checkpoint", checkpoint, "--data", rows.path, "--samples", rows.samples, "--out", out]
    command = ["eval", config, *overrides, *asked, *(["--controls"] if rows.controls else [])]
    code = subprocess.run([sys.executable, "-m", "rayloop", *map(str, command)]).returncode
    if code not in (0, 1) or not (out / "summary.json").exists():  # 1: some answers have no score, and the summary says so
        raise RayloopError(f"python -m rayloop {' '.join(map(str, command))} ended with {code}; what it said is above")
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return summary
