"""A trainer's checkpoint: sharded tensors through torch.distributed.checkpoint, random states in a file per rank.

Tensors may be loaded by another number of ranks than saved them. Torch keeps the index of the tensors as a pickle, which it loads
without a question; it is therefore looked through first, so that nobody's code runs.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from rayloop.core.failures import CheckpointError


def save(folder: str, state: dict[str, Any], rank: int) -> None:
    """Write ``state`` (nested dicts of tensors) and this rank's random state. Collective. Raises CheckpointError."""
    try:
        dcp.save(state, checkpoint_id=folder)
        torch.save(_random_state(), _random_file(folder, rank))
    except (OSError, RuntimeError, CheckpointException) as error:
        raise CheckpointError(f"{folder}: the trainer's state cannot be written: {error}") from error


def load(folder: str, state: dict[str, Any], rank: int) -> None:
    """Overwrite ``state``'s tensors in place, and the random state if this rank saved one. Collective.

    Raises CheckpointError when a tensor is missing, of another shape, or unreadable, or when there is anything but tensors.
    """
    try:
        _look_through(Path(folder) / ".metadata")
        dcp.load(state, checkpoint_id=folder)
        if _random_file(folder, rank).exists():
            _set_random_state(torch.load(_random_file(folder, rank), weights_only=True))
    except (OSError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError, CheckpointException) as error:
        raise CheckpointError(
            f"{folder}: the trainer's state cannot be read: {error}. Was it saved with the same model and optimizer?"
        ) from error


_INDEX = "torch.distributed.checkpoint.metadata"
_NAMES = {
    _INDEX: {
        "Metadata", "StorageMeta", "MetadataIndex", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"},
    "pathlib": {"Path", "PosixPath"},
    "pathlib._local": {"Path", "PosixPath"},
}  # fmt: skip
"""What an index of tensors is made of, by module. Values that are no tensors would be pickles of their own."""


class _Index(pickle.Unpickler):
    """Finds these names, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"its index names {module}.{name}, which no index of tensors does")
        return super().find_class(module, name)


def _look_through(index: Path) -> None:
    """Raises pickle.UnpicklingError for an index of something else than tensors."""
    with open(index, "rb") as file:
        try:
            _Index(file).load()
        except pickle.UnpicklingError:
            raise
        except Exception as error:  # of a file that is empty, cut or noise, almost any
            raise pickle.UnpicklingError(f"its index is broken: {error!r}") from error


def _random_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"random_{rank}.pt"


def _random_state() -> dict[str, Any]:
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
