"""The published systems' own files, where ``ORIGINALS`` names the folder of their checkouts."""

from __future__ import annotations

import os
import subprocess
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

COMMITS = {
    "jbarnes850/verl": "b2577e0",
    "agents-x-project/PyVision-RL": "62ca599",
    "Visual-Agent/DeepEyes": "6c5e796",
    "dvlab-research/ARPO": "7489ae3",
    "sanchit97/chartrl": "83c4406",
    "potate4/chartrl": "4948fe6",
}
"""The state of each repository that was read."""

needs_originals = pytest.mark.skipif(
    "ORIGINALS" not in os.environ,
    reason="ORIGINALS names no folder with checkouts (owner+name) of the published systems",
)


def source(repository: str, path: str) -> str:
    """The text of a file of ``repository`` (owner/name) at its commit.

    Raises FileNotFoundError, CalledProcessError.
    """
    folder = Path(os.environ["ORIGINALS"]) / repository.replace("/", "+")
    folder = folder / "repo" if (folder / "repo").is_dir() else folder
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: clone {repository} there")
    command = ["git", "-C", str(folder), "show", f"{COMMITS[repository]}:{path}"]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, encoding="utf-8"
    ).stdout


def module(
    repository: str,
    path: str,
    given: Mapping[str, Any] | None = None,
    cut: Mapping[str, str] | None = None,
) -> types.ModuleType:
    """A file of ``repository`` as a module.

    ``given``: names that it finds at its start. ``cut``: text -> what stands for it, for imports
    that are not installed here; a text that is not there is a ValueError.
    """
    text = source(repository, path)
    for old, new in (cut or {}).items():
        if old not in text:
            raise ValueError(f"{repository}:{path} does not contain {old!r}")
        text = text.replace(old, new)
    made = types.ModuleType(Path(path).stem)
    made.__dict__.update(given or {})
    exec(compile(text, f"{repository}:{path}", "exec"), made.__dict__)
    return made
