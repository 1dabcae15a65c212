"""The tensors of a checkpoint of the trainer, by name."""

from __future__ import annotations

from pathlib import Path

import torch

from rayloop.engines.training import index, state

NO_RANK = -1
"""Of which no random state is saved, so that reading leaves this process's own alone."""


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Whole tensors, by the dotted names of the index."""
    entries = index.read((folder / "index.json").read_bytes())
    found = {
        name: torch.full(entry.shape, 7, dtype=getattr(torch, entry.dtype.removeprefix("torch.")))
        for name, entry in entries.items()
    }
    state.load(str(folder), found, NO_RANK)
    return found
