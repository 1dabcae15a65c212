"""Draws charts with exact tables, questions and steps: ``python -m cluster data prepare chart_rvr --out DIR``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rayloop.core.failures import ConfigError
from recipes.chart_rvr.charts import KINDS, Chart, chart, save

SPLITS = ("train", "val", "test")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write each split's rows and images. Returns exit code 0; raises ConfigError."""
    parser = argparse.ArgumentParser(prog="python -m cluster data prepare chart_rvr", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    for split, count in zip(SPLITS, (600, 60, 120), strict=True):
        parser.add_argument(f"--{split}", type=int, default=count, help=f"rows of the split (default: {count})")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of chart, in turn (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all charts; equal seeds, equal rows")
    chosen = parser.parse_args(arguments)
    kinds = [kind.strip() for kind in chosen.kinds.split(",")]
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise ConfigError(f"--kinds: no such chart: {', '.join(unknown)}; there are {', '.join(KINDS)}")
    seen: set[tuple[Any, ...]] = set()
    for split in SPLITS:
        path = write(chosen.out, split, list(charts(getattr(chosen, split), kinds, chosen.seed, split, seen)))
        print(f"{path}: {getattr(chosen, split)} rows")
    return 0


def charts(count: int, kinds: Sequence[str], seed: int, split: str, seen: set[tuple[Any, ...]]) -> Iterator[Chart]:
    """``count`` charts, the kinds in turn; none whose table is in ``seen``, to which theirs are added: splits share no chart."""
    made = index = 0
    while made < count:
        found = chart(kinds[made % len(kinds)], seed, split, index)
        index += 1
        key = (found.kind, found.columns, found.rows)
        if key not in seen:
            seen.add(key)
            made += 1
            yield found


def write(out: Path, split: str, made: Sequence[Chart]) -> Path:
    """``SPLIT.jsonl`` with one image for each row below ``images/SPLIT``."""
    (out / "images" / split).mkdir(parents=True, exist_ok=True)
    lines = []
    for i, one in enumerate(made):
        image = f"images/{split}/{i:06d}.png"
        save(one, out / image)
        row = {
            "id": f"{split}-{i}", "image": image, "query": one.question, "label": one.answer, "table": one.table,
            "chart_type": one.kind, "reasoning": one.reasoning, "data_source": f"generated {one.kind}",
        }  # fmt: skip
        lines.append(json.dumps(row) + "\n")
    path = out / f"{split}.jsonl"
    path.write_text("".join(lines), encoding="utf-8")
    return path


if __name__ == "__main__":
    sys.exit(main())
