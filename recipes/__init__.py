"""One folder per recipe.

``prepare.main(arguments)`` makes its rows (``data prepare NAME``), ``score.SCORING`` scores
completions. ``datasets/`` has maps of published data sets for ``data prepare``, ``benchmarks/``
configurations for ``eval --benchmark``.
"""

import argparse
import json
import pkgutil
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rayloop.core.files import write_whole


def having(module: str) -> list[str]:
    """The recipes that have this module, sorted."""
    recipes = [info.name for info in pkgutil.iter_modules(__path__) if info.ispkg]
    return sorted(name for name in recipes if find_spec(f"{__name__}.{name}.{module}"))


PREPARED = {
    "osworld": "rayloop.recipes.arpo.osworld",
    "chart_chains": "rayloop.recipes.chart_rvr.chains",
}
"""Data sets whose rows no map of columns can make -> the module with their ``main(arguments)``."""


def datasets() -> dict[str, Path]:
    """The maps of published data sets (``rayloop.data.published``) by name, sorted."""
    return _files("datasets")


def benchmarks() -> dict[str, Path]:
    """The files that ``eval --benchmark`` lays over a run's configuration, by name, sorted.

    They have rows, reader, reward and splits.
    """
    return _files("benchmarks")


def _files(kind: str) -> dict[str, Path]:
    paths: list[Path] = []
    for folder in __path__:
        paths += Path(folder).glob(f"*/{kind}/*.yaml")
    paths.sort(key=lambda path: (path.stem, path))
    return {path.stem: path for path in paths}


def preparer(name: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of ``data prepare NAME``, with its option ``--out``."""
    parser = argparse.ArgumentParser(
        prog=f"python -m rayloop data prepare {name}", description=description
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    return parser


def write_rows(out: Path, split: str, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write ``out/SPLIT.jsonl`` and print how many rows it has. Returns the file."""
    file = out / f"{split}.jsonl"
    lines = [json.dumps(row) + "\n" for row in rows]
    out.mkdir(parents=True, exist_ok=True)
    write_whole(file, "".join(lines).encode())
    print(f"{file}: {len(lines)} rows")
    return file
