"""Writes MiniWoB++ tasks: ``python -m rayloop data prepare arpo --out DIR`` makes train.jsonl and val.jsonl."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rayloop.envs.grammar.screens import INSTRUCTION, UI_TARS
from rayloop.recipes.arpo.pages import PAGES, ROWS, rows
from rayloop.recipes.splits import write_rows

PROMPTS = {"bare": INSTRUCTION, "ui-tars": UI_TARS}
"""UI-TARS's own for models that know it; explanations are of no use to a tiny one."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files. Returns exit code 0; raises RayloopError."""
    parser = argparse.ArgumentParser(prog="python -m rayloop data prepare arpo", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument("--prompt", choices=PROMPTS, default="bare", help="prompt of the rows (default: %(default)s)")
    parser.add_argument("--pages", nargs="+", default=list(PAGES), help="names of MiniWoB++ pages (default: the shipped ones)")
    for split, count in ROWS.items():
        parser.add_argument(f"--{split}", type=int, default=count, help=f"rows of {split} (default: {count})")
    chosen = parser.parse_args(arguments)
    for split in ROWS:
        write_rows(chosen.out, split, rows(split, getattr(chosen, split), PROMPTS[chosen.prompt], tuple(chosen.pages)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
