"""Draws the scenes: ``python -m rayloop data prepare pyvision --out DIR`` makes train, val and test.jsonl, and images, in DIR."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rayloop.recipes.pyvision.scenes import KINDS, scene
from rayloop.recipes.splits import write_rows

ROWS = {"train": 1000, "val": 64, "test": 128}
FIRST = {"train": 0, "val": 100_000, "test": 200_000, "demos": 300_000}
"""The first seed of each split: no scene is in two of them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the splits. Returns exit code 0; raises RayloopError."""
    parser = argparse.ArgumentParser(prog="python -m rayloop data prepare pyvision", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    chosen = parser.parse_args(arguments)
    for split, count in ROWS.items():
        write_rows(chosen.out, split, drawn(chosen.out, split, count))
    return 0


def drawn(out: Path, split: str, count: int) -> Iterator[dict[str, Any]]:
    """Rows {id, image, question, answer, kind, box}; their images are written below ``out``."""
    (out / "images").mkdir(parents=True, exist_ok=True)
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        made = scene(kind, FIRST[split] + number)
        image = f"images/{split}-{number}.png"
        made.image.save(out / image, compress_level=1)
        yield {
            "id": f"{split}-{number}", "image": image, "question": made.question, "answer": made.answer,
            "kind": kind, "box": made.box,
        }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
