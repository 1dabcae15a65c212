"""Modules of a person's own that would be imported in place of ours: named before anything is imported. Standard library only."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OURS = ("rayloop", "judge", "recipes", "actors", "cluster", "serve_apps", "benchmarks")


def hiding() -> str:
    """What hides one of our packages, and what to do about it, as a sentence; empty when nothing does."""
    for name in OURS:
        spec = find_spec(name)
        if spec is None or spec.origin is None or not (ROOT / name).is_dir():
            continue  # a copy of the code may lack what it does not use (benchmarks): nothing is hidden then
        found = Path(spec.origin).resolve()
        if found.parent != ROOT / name:
            theirs = found.parent if found.name == "__init__.py" else found
            return (
                f"{theirs} is imported in place of rayloop's own package `{name}`, because Python looks there first. "
                f"Rename it (and `use: {name}...` where you name it), or run from another folder and name it by its package. Names "
                f"that are taken: {', '.join(OURS)}"
            )
    return ""
