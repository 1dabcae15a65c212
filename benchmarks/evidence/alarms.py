"""``python -m benchmarks.evidence.alarms RUN...``: how near runs came to the limits of the collapse alarms.

Of each run and alarm the worst mean of five steps, and the limit that warns by default. Runs that went well stay well off it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rayloop.grpo.collapse import Collapse, CollapseSettings
from rayloop.grpo.limits import Floor
from rayloop.view.reader import open_run


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evidence.alarms")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, <output>/<name>")
    for run in parser.parse_args().runs:
        print(json.dumps({"run": str(run), **worst(run)}))


def worst(run: Path) -> dict[str, dict[str, float | None]]:
    """Alarm -> ``worst`` and ``warn``, where five steps have its metric. Raises ConfigError for a folder without a run."""
    collapse, found = Collapse(CollapseSettings()), dict[str, dict[str, float | None]]()
    for record in open_run(run).metrics:
        numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
        for name, (value, limit, _) in collapse.step(numbers).items():
            least = min if isinstance(limit, Floor) else max
            before = found[name]["worst"] if name in found else None
            found[name] = {"worst": round(value if before is None else least(value, before), 3), "warn": limit.warn}
    return found


if __name__ == "__main__":
    main()
