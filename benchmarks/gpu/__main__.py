"""``python -m benchmarks.gpu PROBE --out FILE``: one probe, or ``all``, each in a process and
within its deadline.

The last line of its output is one JSON object: what it found, as it stands in FILE, too.
"""

from __future__ import annotations

import argparse
import json
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.children import completed
from benchmarks.gpu.result import Place, measured, record


@dataclass(frozen=True)
class Probe:
    """``run``: module and function; ``needs``: the packages beside torch and transformers;
    ``limit``: seconds within ``all``.
    """

    run: str
    needs: str = ""
    limit: float = 480.0


PROBES = {
    "extensions": Probe("benchmarks.gpu.engine:extensions", "vLLM"),
    "suite": Probe("benchmarks.gpu.suites:trainer_suite", "pytest"),
    "trainer": Probe("benchmarks.gpu.trainer:probe"),
    "start": Probe("benchmarks.gpu.engine:start", "vLLM", 1200.0),
    "contract": Probe("benchmarks.gpu.suites:contract", "vLLM, pytest", 900.0),
    "graphs": Probe("benchmarks.gpu.suites:graphs", "vLLM, pytest", 1800.0),
    "sampler": Probe("benchmarks.gpu.engine:sampler", "vLLM", 600.0),
    "weight_update": Probe("benchmarks.gpu.runs:weight_update", "vLLM, Ray", 1800.0),
    "whole": Probe("benchmarks.gpu.runs:whole", "vLLM, Ray", 900.0),
    "groups": Probe("benchmarks.gpu.groups:probe"),
    "rate": Probe("benchmarks.gpu.rate:probe"),
}
"""In the order in which they are worth running: a fault in an early one explains those after it."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=" ".join(__doc__.split())
    )
    parser.add_argument("probe", choices=[*PROBES, "all"])
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("gpu.json"),
        help="the JSON file to add to (default gpu.json)",
    )
    parser.add_argument(
        "--tiny", action="store_true", help="sizes for a CPU: to try the probe, not to measure"
    )
    parser.add_argument(
        "--models",
        type=Path,
        default=Path(tempfile.gettempdir()) / "rayloop-probes",
        metavar="DIR",
        help="for models with random weights that are made here, and kept: up to 30 GB",
    )
    chosen = parser.parse_args(arguments)
    if chosen.probe == "all":
        worst = _all(chosen)
    else:
        place = Place(chosen.models / ("tiny" if chosen.tiny else "full"), chosen.tiny)
        worst = int(
            not record(
                chosen.out, chosen.probe, pkgutil.resolve_name(PROBES[chosen.probe].run), place
            )
        )
    found = json.loads(chosen.out.read_text(encoding="utf-8"))
    names = PROBES if chosen.probe == "all" else [chosen.probe]
    print(
        json.dumps(
            found
            | {"probes": {name: found["probes"][name] for name in names if name in found["probes"]}}
        )
    )
    return worst


def _all(chosen: argparse.Namespace) -> int:
    """One after the other, but for those that the file has of this commit.

    Returns 1 when one failed or was too slow; the file says which.
    """
    worst, kept = 0, measured(chosen.out, chosen.tiny)
    given = [
        "--out",
        str(chosen.out),
        "--models",
        str(chosen.models),
        *(["--tiny"] if chosen.tiny else []),
    ]
    for name, probe in PROBES.items():
        if name in kept:
            print(f"{name}: measured before, in {chosen.out}", file=sys.stderr)
            continue
        command = [sys.executable, "-m", "benchmarks.gpu", name, *given]
        try:
            done = completed(command, probe.limit, stdout=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            print(
                f"{name}: ended after {probe.limit:g} s; what it had found is in {chosen.out}",
                file=sys.stderr,
            )
            worst = 1
        else:
            worst = max(worst, int(done.returncode != 0))
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
