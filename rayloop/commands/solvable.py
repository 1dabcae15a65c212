"""``data prepare ... --solvable-by`` keeps the training rows that a policy solves at least once."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rayloop.core.failures import ConfigError, RayloopError
from rayloop.core.files import write_whole
from rayloop.measure.controls import solved_tasks
from rayloop.run.config import read
from rayloop.run.held_out import read_items
from rayloop.run.lifetime import right

ITEMS = "items.jsonl"
OPTION = """--solvable-by CHECKPOINT --config CONFIG [--attempts N] keeps the training rows that a policy solves at least once;
--solvable-by FOLDER asks an evaluation that is there"""


def solvable_options(options: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """``by`` (None: keep all rows), ``config``, ``attempts`` and ``out``; and the options that are the preparation's own."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--solvable-by", dest="by", type=Path)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--attempts", type=int, default=4)
    if not any(word.partition("=")[0] == "--solvable-by" for word in options):
        return argparse.Namespace(by=None), list(options)
    chosen, rest = parser.parse_known_args(options)
    where = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    where.add_argument("--out", type=Path, required=True)
    chosen.out = where.parse_known_args(rest)[0].out
    return chosen, rest


def keep_solvable(chosen: argparse.Namespace) -> None:
    """Rewrite ``out/train.jsonl``. Rows without a scored answer are kept. Raises ConfigError, RayloopError."""
    file = chosen.out / "train.jsonl"
    if not file.is_file():
        raise ConfigError(f"--solvable-by: {file} is not there; it keeps the solvable ones of the training rows")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    folder = chosen.by if (chosen.by / ITEMS).is_file() else _played(chosen, file)
    score, least = right(read(chosen.config, []).evaluation.solved if chosen.config else "success")
    items = read_items(folder / ITEMS)
    played, solved = {item.task for item in items}, solved_tasks(items, score, least)
    kept = [row for row in rows if row["id"] in solved or row["id"] not in played]
    if not kept:
        raise ConfigError(f"--solvable-by: {folder} solved none of the {len(rows)} rows of {file} ({score} >= {least:g})")
    write_whole(file, "".join(json.dumps(row) + "\n" for row in kept).encode())
    unknown = sum(row["id"] not in played for row in rows)
    print(f"{file}: {len(kept)} of {len(rows)} rows are solved at least once" + (f", {unknown} unknown" if unknown else ""))


def _played(chosen: argparse.Namespace, file: Path) -> Path:
    """The folder of an evaluation of the checkpoint: one greedy answer and ``attempts`` sampled ones a row. Raises RayloopError."""
    if chosen.config is None:
        raise ConfigError(f"--solvable-by: {chosen.by} has no {ITEMS}, so it is played: name the run's configuration with --config")
    out = chosen.out / "solvable"
    asked = [chosen.config, "--checkpoint", chosen.by, "--data", file, "--samples", chosen.attempts, "--out", out]
    command = [sys.executable, "-m", "rayloop", "eval", *map(str, asked)]
    code = subprocess.run(command).returncode
    if code not in (0, 1) or not (out / ITEMS).is_file():
        raise RayloopError(f"{' '.join(command[1:])} ended with {code}; its output is above")
    return out
