"""Renders UI grounding on MiniWoB++ pages with a real Chromium: ``python -m rayloop data prepare arc_vision --out DIR``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rayloop.core.failures import ConfigError
from rayloop.recipes.arc_vision import miniwob

SHOWN = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Render the splits into a folder and compare them with the shipped set. Returns exit code 0; raises RayloopError."""
    parser = argparse.ArgumentParser(prog="python -m rayloop data prepare arc_vision", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument(
        "--rows", action="append", default=[], metavar="SPLIT=N", help="another number of rows than shipped; may be repeated"
    )
    parser.add_argument("--browser", help="the Chromium to use (default: the system's)")
    parser.add_argument("--jobs", type=int, default=2, help="browsers at once")
    chosen = parser.parse_args(arguments)
    manifest = miniwob.prepare(chosen.out, {**miniwob.ROWS, **asked(chosen.rows)}, chosen.browser, chosen.jobs)
    print("made with " + ", ".join(f"{name} {version}" for name, version in manifest["made_with"].items()))
    for split, described in manifest["splits"].items():
        print(f"{chosen.out / split}.parquet: {described['rows']} rows, sha256 {described['sha256']}")
        print(f"  {compared(chosen.out, split)}")
    return 0


def asked(items: Sequence[str]) -> dict[str, int]:
    """Rows per split, from ``SPLIT=N``. Raises ConfigError."""
    rows = {}
    for item in items:
        split, _, count = item.partition("=")
        if not count.isdigit():
            raise ConfigError(f"--rows {item}: expected SPLIT=N, for example train=500")
        rows[split] = int(count)
    return rows


def compared(out: Path, split: str) -> str:
    """How a new split compares with the shipped one of that name."""
    shipped = miniwob.SHIPPED / f"{split}.parquet"
    if not shipped.is_file():
        return "no such split is shipped"
    ours, theirs = miniwob.read_parquet(out / f"{split}.parquet"), miniwob.read_parquet(shipped)
    different = list(miniwob.differences(ours, theirs))
    if not different:
        return f"equal to the {len(theirs)} shipped rows"
    more = f"\n  and {len(different) - SHOWN} more" if len(different) > SHOWN else ""
    return f"{len(different)} differences from the shipped rows:\n  " + "\n  ".join(different[:SHOWN]) + more
