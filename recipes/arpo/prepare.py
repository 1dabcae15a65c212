"""Writes MiniWoB++ tasks: ``python -m rayloop data prepare arpo --out DIR`` makes train.jsonl and val.jsonl, as they are shipped.

With ``--demonstrations N`` also warm.parquet: N episodes of the hasty demonstrator in the live pages (demonstrations.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rayloop.core.failures import ConfigError
from rayloop.envs.grammar.screens import INSTRUCTION, UI_TARS
from rayloop.recipes.arpo.demonstrations import HASTE, record
from rayloop.recipes.arpo.pages import PAGES, ROWS, WARM_PAGES, rows

PROMPTS = {"bare": INSTRUCTION, "ui-tars": UI_TARS}
"""UI-TARS's own for models that know it; explanations are of no use to a tiny one."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files. Returns exit code 0; raises RayloopError."""
    parser = argparse.ArgumentParser(prog="python -m rayloop data prepare arpo", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument("--prompt", choices=PROMPTS, default="bare", help="what the model is told (default: %(default)s)")
    parser.add_argument("--pages", nargs="+", default=list(PAGES), help="names of MiniWoB++ pages (default: the shipped ones)")
    for split, count in ROWS.items():
        parser.add_argument(f"--{split}", type=int, default=count, help=f"rows of {split} (default: {count})")
    parser.add_argument("--demonstrations", type=int, default=0, help="episodes to record; needs the browser extra")
    parser.add_argument("--haste", type=float, default=HASTE, help="of the demonstrator (default: %(default)s)")
    chosen = parser.parse_args(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    for split in ROWS:
        made = list(rows(split, getattr(chosen, split), PROMPTS[chosen.prompt], tuple(chosen.pages)))
        file = chosen.out / f"{split}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
        print(f"{file}: {len(made)} rows")
    if chosen.demonstrations:
        pages = WARM_PAGES if chosen.pages == list(PAGES) else tuple(chosen.pages)
        if other := set(pages) - set(WARM_PAGES):
            raise ConfigError(f"--demonstrations: targets.js has no rule for {', '.join(sorted(other))}")
        file = chosen.out / "warm.parquet"
        wins, count = record(file, list(rows("warm", chosen.demonstrations, INSTRUCTION, pages)), chosen.haste)
        print(f"{file}: {count} turns of {chosen.demonstrations} episodes, {wins:.0%} of them solved")
    return 0


if __name__ == "__main__":
    sys.exit(main())
