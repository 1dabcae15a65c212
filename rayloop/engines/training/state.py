"""A trainer's checkpoint: sharded tensors through torch.distributed.checkpoint, random states in a file per rank.

Tensors may be loaded by another number of ranks than saved them. Torch keeps the index of the tensors as a pickle, which it loads
without a question; it is therefore looked through first, so that nobody's code runs. What a rank writes is summed on its way to the
disk, and whoever reads a file compares it first.

What is saved beside training is copied to the host's memory first (``copied``): the ranks go on with the originals, while a thread
writes the copies. The ranks talk about what they write in a process group that nothing else uses.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from rayloop.core.failures import Damaged
from rayloop.core.files import Sum, check_sum, kind_of, write_whole

UNKNOWN: Mapping[str, Sum] = {}
"""Of files whose sums nobody has: they are not compared."""


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """``state`` (nested dicts of tensors) as it is now, in the host's memory; the originals may change."""
    copy: dict[str, Any] = DefaultStager(StagingOptions(False, False, False, False)).stage(state)
    return copy


def save(
    folder: str, state: dict[str, Any], rank: int,
    random: dict[str, Any] | None = None, group: dist.ProcessGroup | None = None,
) -> dict[str, Sum]:  # fmt: skip
    """Write ``state`` (nested dicts of tensors) and this rank's random state: ``random``, or that of now. Raises CheckpointError.

    Collective within ``group``; None: the default one. Returns name -> sum of the files that this rank has written.
    """
    disk = _Summing()
    try:
        writer = FileSystemWriter(folder)
        writer.fs = disk
        dcp.save(state, storage_writer=writer, process_group=group)
        held = io.BytesIO()
        torch.save(random or random_state(), held)
        path = _random_file(folder, rank)
        write_whole(path, held.getvalue())
        return {**disk.sums, path.name: Sum().then(held.getvalue())}
    except (OSError, RuntimeError, CheckpointException) as error:
        raise kind_of(*_below(error))(f"{folder}: the trainer's state cannot be written: {_words(error)}") from error


def load(folder: str, state: dict[str, Any], rank: int, sums: Mapping[str, Sum] = UNKNOWN) -> None:
    """Overwrite ``state``'s tensors in place, and the random state if this rank saved one. Collective.

    ``sums``: what ``save`` returned, of all ranks. Raises Damaged when a file that this rank reads, or of the tensors another one,
    is not as it was written; CheckpointError when a tensor is missing, of another shape, or unreadable, or when there is anything
    but tensors.
    """
    disk, random = _Comparing(sums), _random_file(folder, rank)
    try:
        with disk.create_stream(Path(folder) / ".metadata", "rb") as index:
            _look_through(index)
        reader = FileSystemReader(folder)
        reader.fs = disk
        dcp.load(state, storage_reader=reader)
        if random.exists():
            with disk.create_stream(random, "rb") as file:
                _set_random_state(torch.load(file, weights_only=True))
    except Damaged:
        raise
    except (OSError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError, CheckpointException) as error:
        for found in _below(error):
            if isinstance(found, Damaged):
                raise found from error
        raise kind_of(*_below(error))(
            f"{folder}: the trainer's state cannot be read: {_words(error)}. Was it saved with the same model and optimizer?"
        ) from error


def _below(error: Exception) -> list[BaseException]:
    """What was raised, on whatever rank."""
    return [one for one, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]


def _words(error: Exception) -> str:
    """What was raised, each once: torch's own text is a trace per rank."""
    return "; ".join(dict.fromkeys(str(one) or type(one).__name__ for one in _below(error)))


class _Summing(FileSystem):
    """Sums what torch writes through it, by the names of the files."""

    def __init__(self) -> None:
        self.sums: dict[str, Sum] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            counted = _Counted(stream)
            yield counted
        self.sums[Path(path).name] = counted.sum

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class _Counted:
    """A file that is written from its beginning to its end."""

    def __init__(self, file: Any) -> None:
        self._file, self.sum = file, Sum()

    def write(self, data: bytes | memoryview) -> int:
        self.sum = self.sum.then(data)
        return int(self._file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _Comparing(FileSystem):
    """Gives torch a file when it has been compared with its sum."""

    def __init__(self, sums: Mapping[str, Sum]) -> None:
        self._sums = sums

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            if (expected := self._sums.get(name := Path(path).name)) is not None:
                check_sum(name, stream, expected)
            yield stream


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


def _look_through(index: IO[bytes]) -> None:
    """Raises pickle.UnpicklingError for an index of something else than tensors."""
    try:
        _Index(index).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # of a file that is empty, cut or noise, almost any
        raise pickle.UnpicklingError(f"its index is broken: {error!r}") from error


def _random_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"random_{rank}.pt"


def random_state() -> dict[str, Any]:
    """Of PyTorch's generators in this process."""
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
