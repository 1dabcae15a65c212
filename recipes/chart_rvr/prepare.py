"""Draws charts with exact tables, questions and steps: ``python -m rayloop data prepare chart_rvr --out DIR``.

``--small``: charts that the tiny model of quickstart.yaml can see; ``--warm N`` adds warm.jsonl, for the stage that made it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rayloop.core.failures import ConfigError
from rayloop.recipes import write_rows
from rayloop.recipes.chart_rvr import charts as large
from rayloop.recipes.chart_rvr import small
from rayloop.recipes.chart_rvr.charts import Chart

ROWS = {"train": 600, "val": 60, "test": 120, "warm": 0}
SMALL = {"train": 1000, "val": 64, "test": 192, "warm": 0}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write each split's rows and images. Returns exit code 0; raises ConfigError."""
    parser = argparse.ArgumentParser(prog="python -m rayloop data prepare chart_rvr", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument("--small", action="store_true", help="of 84 x 84 pixels with three colours, for the quickstart")
    for split, count in ROWS.items():
        what = f"rows of the split (default: {count}, small: {SMALL[split]})"
        parser.add_argument(f"--{split}", type=int, help=what)
    parser.add_argument("--kinds", help=f"kinds of chart, in turn (default: {','.join(large.KINDS)})")
    parser.add_argument("--seed", type=int, default=0, help="of all charts; equal seeds, equal rows")
    chosen = parser.parse_args(arguments)
    known, make, save = (small.KINDS, small.small, small.save) if chosen.small else (large.KINDS, large.chart, large.save)
    kinds = [kind.strip() for kind in chosen.kinds.split(",")] if chosen.kinds else known
    if unknown := sorted(set(kinds) - set(known)):
        raise ConfigError(f"--kinds: no such chart: {', '.join(unknown)}; there are {', '.join(known)}")
    seen: set[tuple[Any, ...]] = set()
    for split, count in (SMALL if chosen.small else ROWS).items():
        if count := count if getattr(chosen, split) is None else getattr(chosen, split):
            made = list(charts(count, kinds, chosen.seed, split, seen, make))
            write(chosen.out, split, made, save)
    return 0


def charts(
    count: int,
    kinds: Sequence[str],
    seed: int,
    split: str,
    seen: set[tuple[Any, ...]],
    make: Callable[[str, int, str, int], Chart] = large.chart,
) -> Iterator[Chart]:
    """``count`` charts, the kinds in turn; none whose table is in ``seen``, to which theirs are added: splits share no chart."""
    made = index = 0
    while made < count:
        found = make(kinds[made % len(kinds)], seed, split, index)
        index += 1
        key = (found.kind, found.columns, found.rows)
        if key not in seen:
            seen.add(key)
            made += 1
            yield found


def write(out: Path, split: str, made: Sequence[Chart], save: Callable[[Chart, Path], None] = large.save) -> Path:
    """Write ``SPLIT.jsonl``, and one image for each row below ``images/SPLIT``."""
    (out / "images" / split).mkdir(parents=True, exist_ok=True)
    images = [f"images/{split}/{i:06d}.png" for i in range(len(made))]
    for one, image in zip(made, images, strict=True):
        save(one, out / image)
    rows = [
        {
            "id": f"{split}-{i}", "image": image, "query": one.question, "label": one.answer, "table": one.table,
            "chart_type": one.kind, "reasoning": one.reasoning, "data_source": f"generated {one.kind}",
        }
        for i, (one, image) in enumerate(zip(made, images, strict=True))
    ]  # fmt: skip
    return write_rows(out, split, rows)
