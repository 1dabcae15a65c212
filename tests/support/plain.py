"""What a checkpoint makes of a state, without a checkpoint: written to two files, and read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rayloop.rollout.plain import Plain, filled
from rayloop.run.records.plain_files import read, write


def saved_and_read(state: Plain, folder: Path) -> Any:
    """``state``, whose ``HeldValue`` references are the values themselves."""
    files = folder / "state.json", folder / "state.safetensors"
    write(*files, filled(state, lambda payload: payload))
    return read(*files)
