"""A trainer's checkpoint: sharded tensors with a JSON index (``index``), and a file of random
states per rank. No pickles. The number of ranks may differ between save and load:
torch.distributed.checkpoint plans which rank writes and reads which pieces, and this module writes
and reads them. A save beside training has a process group of its own, and writes a copy in host
memory (``copied``).
"""

import io
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from rayloop.core.failures import Damaged
from rayloop.core.files import Checksum, check_sum, kind_of, write_whole
from rayloop.engines.training import index
from rayloop.engines.training.index import Piece, TensorEntry

UNKNOWN: Mapping[str, Checksum] = {}
"""No checksums: files are not compared."""


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """``state`` (nested dicts of tensors) as it is now, in the host's memory; the originals may
    change.
    """
    # Without pinned or shared memory and without a thread, the copy is complete when this returns.
    copy: dict[str, Any] = DefaultStager(StagingOptions(False, False, False, False)).stage(state)
    return copy


def save(
    folder: str,
    state: dict[str, Any],
    rank: int,
    random: dict[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Checksum]:
    """Write ``state`` (nested dicts of tensors) and this rank's random state: ``random``, or that
    of now. Raises CheckpointError. Collective within ``group``; None: the default one. Returns name
    -> sum of the files that this rank has written.
    """
    writer = _Writer(Path(folder))
    try:
        dcp.save(state, storage_writer=writer, process_group=group)
        path = Path(folder) / f"random_{rank}.safetensors"
        text = save_safetensors(_flat(random or random_state()))
        # This also syncs the folder, after its last new name:
        # a file survives a power cut only with its entry there.
        write_whole(path, text)
        return {**writer.sums, path.name: Checksum().then(text)}
    except (OSError, RuntimeError, ValueError, CheckpointException) as error:
        raise kind_of(*_below(error), saving=True)(
            f"{folder}: the trainer's state cannot be written: {_words(error)}"
        ) from error


def load(
    folder: str, state: dict[str, Any], rank: int, sums: Mapping[str, Checksum] = UNKNOWN
) -> None:
    """Overwrite ``state``'s tensors in place, and the random state if this rank saved one.

    Collective. ``sums``: results of ``save`` of all ranks. Raises Damaged when a file is not as it
    was written; CheckpointError when a tensor is missing, of another shape, or unreadable, or when
    there is anything but tensors.
    """
    try:
        reader = _Reader(Path(folder), sums)  # here, since torch hides what reading an index raises
        dcp.load(state, storage_reader=reader)
        _load_random(Path(folder), rank, sums)
    except Damaged:
        raise
    except (OSError, RuntimeError, ValueError, KeyError, CheckpointException) as error:
        # torch wraps the errors of all ranks in one; a damaged file is the reason that helps.
        for found in _below(error):
            if isinstance(found, Damaged):
                raise found from error
        raise kind_of(*_below(error))(
            f"{folder}: the trainer's state cannot be read: {_words(error)}. Was it saved with the"
            " same model and optimizer?"
        ) from error


def _below(error: Exception) -> list[BaseException]:
    """What was raised, on whatever rank."""
    return (
        [one for one, _ in error.failures.values()]
        if isinstance(error, CheckpointException)
        else [error]
    )


def _words(error: Exception) -> str:
    """What was raised, each once: torch's own text is a trace per rank."""
    return "; ".join(dict.fromkeys(str(one) or type(one).__name__ for one in _below(error)))


class _AnyFolder:
    """Methods that torch wants of its reader and writer, and that do nothing here."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class _Writer(_AnyFolder, StorageWriter):
    """One file of pieces per rank, and the index on the rank that coordinates."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.sums = folder, dict[str, Checksum]()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._folder.mkdir(
            exist_ok=True
        )  # not its parents: where the storage is not mounted, this would be below its mount point
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=f"rank_{rank}.bin") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name, results, total = plan.storage_data, [], Checksum()
        with open(self._folder / name, "wb") as file:
            for item in plan.items:
                # torch would pickle anything else, and a
                # checkpoint must be read without running code.
                if item.type == WriteItemType.BYTE_IO:
                    raise ValueError(f"{item.index.fqn} is no tensor")
                data = _bytes_of(planner.resolve_data(item).detach())
                piece = Piece(
                    tuple(item.index.offset or ()),
                    (),
                    name,
                    total.size,
                    data.nbytes,
                    Checksum().then(data).crc32,
                )
                self._write(file, data)
                total = total.then(data)
                results.append(WriteResult(item.index, data.nbytes, piece))
            # With these sums the driver calls a checkpoint
            # complete, so the bytes must survive a power cut.
            file.flush()
            os.fsync(file.fileno())
        self.sums[name] = total
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write(self, file: Any, data: memoryview) -> None:
        file.write(data)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        found: dict[str, dict[tuple[int, ...], Piece]] = defaultdict(dict)
        for result in (one for rank in results for one in rank):
            found[result.index.fqn][result.storage_data.at] = result.storage_data
        entries = {}
        for name, tensor in metadata.state_dict_metadata.items():
            if not isinstance(tensor, TensorStorageMetadata):
                raise ValueError(f"{name} is no tensor")
            pieces = [
                replace(_at(found[name], tuple(c.offsets)), shape=tuple(c.sizes))
                for c in tensor.chunks
            ]
            entries[name] = TensorEntry(
                str(tensor.properties.dtype).removeprefix("torch."),
                tuple(tensor.size),
                tuple(pieces),
            )
        text = index.write(entries)
        # A piece that does not fit shows here, while the
        # state is still in memory, and not at the resume.
        index.read(text)
        write_whole(self._folder / index.FILE, text)
        self.sums[index.FILE] = Checksum().then(text)


def _at(pieces: Mapping[tuple[int, ...], Piece], at: tuple[int, ...]) -> Piece:
    """The piece that begins at ``at``; a whole tensor is written without an offset."""
    return replace(pieces[at] if at in pieces else pieces[()], at=at)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The values of a tensor on any device, row by row."""
    flat = tensor.to("cpu").contiguous().reshape(-1)
    # NumPy has no bfloat16, so the tensor is viewed as bytes first.
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


class _Reader(_AnyFolder, StorageReader):
    """Pieces of files by their index; each compared with its sum before it is used."""

    def __init__(self, folder: Path, sums: Mapping[str, Checksum]) -> None:
        """Raises OSError, ValueError and Damaged when the folder has no index that can be used."""
        self._folder, self._sums = folder, sums
        self._pieces: dict[MetadataIndex, tuple[Piece, torch.dtype]] = {}
        self._compared: set[str] = set()
        self._metadata = self._read_index()

    def read_metadata(
        self,
    ) -> Metadata:  # without keywords, for which torch would look for an index of each rank
        return self._metadata

    def _read_index(self) -> Metadata:
        """The index, as torch plans with it."""
        name = index.FILE if (self._folder / index.FILE).exists() else index.SCHEMA_2_FILE
        text = (self._folder / name).read_bytes()
        if name in self._sums:
            check_sum(name, io.BytesIO(text), self._sums[name])
        entries = index.read(text) if name == index.FILE else index.read_schema_2(io.BytesIO(text))
        described: dict[str, Any] = {}
        for fqn, entry in entries.items():
            dtype: torch.dtype = getattr(torch, entry.dtype)
            chunks = [
                ChunkStorageMetadata(torch.Size(p.at), torch.Size(p.shape)) for p in entry.pieces
            ]
            described[fqn] = TensorStorageMetadata(
                TensorProperties(dtype), torch.Size(entry.shape), chunks
            )
            self._pieces.update({MetadataIndex(fqn, p.at): (p, dtype) for p in entry.pieces})
        return Metadata(described)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            tensor = self._tensor(*self._pieces[item.storage_index])
            for dimension, (at, size) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                tensor = tensor.narrow(dimension, at, size)
            target = planner.resolve_tensor(item).detach()
            if target.size() != tensor.size():
                raise ValueError(
                    f"{item.storage_index.fqn} has the shape {tuple(tensor.size())}, not"
                    f" {tuple(target.size())}"
                )
            target.copy_(tensor)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _tensor(self, piece: Piece, dtype: torch.dtype) -> torch.Tensor:
        with open(self._folder / piece.file, "rb") as file:
            # Schema 2 has one sum for the whole file, which is read once for all of its pieces.
            if (
                piece.crc32 is None
                and piece.file not in self._compared
                and piece.file in self._sums
            ):
                check_sum(piece.file, file, self._sums[piece.file])
                self._compared.add(piece.file)
            file.seek(piece.offset)
            data = file.read(piece.bytes)
        if piece.crc32 is None:  # schema 2
            loaded: torch.Tensor = torch.load(
                io.BytesIO(data), map_location="cpu", weights_only=True
            )
            return loaded
        if (len(data), Checksum().then(data).crc32) != (piece.bytes, piece.crc32):
            raise Damaged(
                piece.file,
                f"the {piece.bytes:,} bytes at {piece.offset:,} are not those that were written",
            )
        # frombuffer refuses an empty buffer, and warns of one that cannot be written.
        flat = (
            torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
        )
        return flat.reshape(piece.shape)


def random_state() -> dict[str, Any]:
    """Of PyTorch's generators in this process."""
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        "cpu": state["cpu"],
        **{f"cuda.{number}": one for number, one in enumerate(state["cuda"])},
    }


def _load_random(folder: Path, rank: int, sums: Mapping[str, Checksum]) -> None:
    """Set the random state that this rank saved, if it did; in schema 2 it is a file of
    ``torch.save``.
    """
    new, old = folder / f"random_{rank}.safetensors", folder / f"random_{rank}.pt"
    path = new if new.exists() else old
    # A run with more ranks than were saved: the further ones keep the state they began with.
    if not path.exists():
        return
    data = path.read_bytes()
    if path.name in sums:
        check_sum(path.name, io.BytesIO(data), sums[path.name])
    try:
        found = (
            load_safetensors(data)
            if path == new
            else _flat(torch.load(io.BytesIO(data), weights_only=True))
        )
        torch.set_rng_state(found["cpu"])
        if torch.cuda.is_available() and (
            cuda := [found[name] for name in sorted(found, key=_number) if name != "cpu"]
        ):
            torch.cuda.set_rng_state_all(cuda)
    except Exception as error:  # a damaged file may raise almost anything
        raise ValueError(f"{path.name} holds no random state: {error!r}") from error


def _number(name: str) -> int:
    return int(name.rpartition(".")[2]) if name != "cpu" else -1
