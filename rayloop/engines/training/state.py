"""A trainer's checkpoint: sharded tensors with a JSON index (``index``), and random states.

Each rank has a file of random states. No file is a pickle. The number of ranks may differ between
save and load: torch.distributed.checkpoint plans which rank writes and reads which pieces, and this
module writes and reads them. A save during training has a separate process group, and writes a copy
in host memory (``copied``).
"""

import io
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import IO, Any

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
    """Return a copy of ``state`` (nested dicts of tensors) in the host's memory.

    The originals may change.
    """
    # Without pinned or shared memory and without a thread, the copy is complete when this returns.
    options = StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=False,
        use_async_staging=False,
        use_non_blocking_copy=False,
    )
    copy: dict[str, Any] = DefaultStager(options).stage(state)
    return copy


def save(
    folder: str,
    state: dict[str, Any],
    rank: int,
    random: dict[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Checksum]:
    """Write ``state`` (nested dicts of tensors) and this rank's random state.

    The latter is ``random``, or the current one. Raises CheckpointError. Collective within
    ``group``; None: the default one. Returns name -> sum of the files that this rank has written.
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
        failure = kind_of(*_causes(error), saving=True)
        raise failure(
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
        # The index is read here, since torch hides what reading it raises.
        reader = _Reader(Path(folder), sums)
        dcp.load(state, storage_reader=reader)
        _load_random(Path(folder), rank, sums)
    except Damaged:
        raise
    except (OSError, RuntimeError, ValueError, KeyError, CheckpointException) as error:
        # torch wraps the errors of all ranks in one; a damaged file is the reason that helps.
        for cause in _causes(error):
            if isinstance(cause, Damaged):
                raise cause from error
        failure = kind_of(*_causes(error))
        raise failure(
            f"{folder}: the trainer's state cannot be read: {_words(error)}. Was it saved with the"
            " same model and optimizer?"
        ) from error


def _causes(error: Exception) -> list[BaseException]:
    """Return the errors that were raised, on any rank."""
    if isinstance(error, CheckpointException):
        return [cause for cause, _ in error.failures.values()]
    return [error]


def _words(error: Exception) -> str:
    """Return the text of each error once: torch's own text is a trace per rank."""
    texts = [str(cause) or type(cause).__name__ for cause in _causes(error)]
    return "; ".join(dict.fromkeys(texts))


class _AnyFolder:
    """Methods that torch calls on its reader and writer, and that do nothing here."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class _Writer(_AnyFolder, StorageWriter):
    """One file of pieces per rank, and the index on the rank that coordinates."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.sums: dict[str, Checksum] = {}

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        # Its parents are not made: where the storage is not mounted,
        # the folder would be written below the mount point.
        self._folder.mkdir(exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=f"rank_{rank}.bin") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = plan.storage_data
        results: list[WriteResult] = []
        total = Checksum()
        with open(self._folder / name, "wb") as file:
            for item in plan.items:
                # torch would pickle anything else, and a
                # checkpoint must be read without running code.
                if item.type == WriteItemType.BYTE_IO:
                    raise ValueError(f"{item.index.fqn} is not a tensor")
                data = _bytes_of(planner.resolve_data(item).detach())
                piece = Piece(
                    at=tuple(item.index.offset or ()),
                    shape=(),  # ``finish`` knows it
                    file=name,
                    offset=total.size,
                    bytes=data.nbytes,
                    crc32=Checksum().then(data).crc32,
                )
                self._write(file, data)
                total = total.then(data)
                results.append(WriteResult(item.index, data.nbytes, piece))
            # With these sums the driver calls a checkpoint
            # complete, so the bytes must survive a power cut.
            file.flush()
            os.fsync(file.fileno())
        self.sums[name] = total
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write(self, file: Any, data: memoryview) -> None:
        file.write(data)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pieces_of: dict[str, dict[tuple[int, ...], Piece]] = defaultdict(dict)
        for result in chain.from_iterable(results):
            piece: Piece = result.storage_data
            pieces_of[result.index.fqn][piece.at] = piece
        entries = {}
        for name, tensor in metadata.state_dict_metadata.items():
            if not isinstance(tensor, TensorStorageMetadata):
                raise ValueError(f"{name} is not a tensor")
            pieces = [_piece_of(chunk, pieces_of[name]) for chunk in tensor.chunks]
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            entries[name] = TensorEntry(dtype, tuple(tensor.size), tuple(pieces))
        text = index.write(entries)
        # A piece that does not fit shows here, while the
        # state is still in memory, and not at the resume.
        index.read(text)
        write_whole(self._folder / index.FILE, text)
        self.sums[index.FILE] = Checksum().then(text)


def _piece_of(chunk: ChunkStorageMetadata, pieces: Mapping[tuple[int, ...], Piece]) -> Piece:
    """Return the piece of the chunk, with the chunk's place and shape."""
    at = tuple(chunk.offsets)
    # A whole tensor is written without an offset.
    piece = pieces[at] if at in pieces else pieces[()]
    return replace(piece, at=at, shape=tuple(chunk.sizes))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the values of a tensor on any device, row by row."""
    flat = tensor.to("cpu").contiguous().reshape(-1)
    if not flat.numel():
        return memoryview(b"")
    # NumPy has no bfloat16, so the tensor is viewed as bytes first.
    return memoryview(flat.view(torch.uint8).numpy())


class _Reader(_AnyFolder, StorageReader):
    """Reads pieces of files by their index, and compares each with its sum before it is used."""

    def __init__(self, folder: Path, sums: Mapping[str, Checksum]) -> None:
        """Raises OSError, ValueError and Damaged when the folder has no index that can be used."""
        self._folder = folder
        self._sums = sums
        self._pieces: dict[MetadataIndex, tuple[Piece, torch.dtype]] = {}
        self._compared: set[str] = set()
        self._metadata = self._read_index()

    # It takes no keywords: with them torch would look for an index of each rank.
    def read_metadata(self) -> Metadata:
        return self._metadata

    def _read_index(self) -> Metadata:
        """Return the index in the form with which torch plans."""
        has_schema_2 = not (self._folder / index.FILE).exists()
        name = index.SCHEMA_2_FILE if has_schema_2 else index.FILE
        text = (self._folder / name).read_bytes()
        if name in self._sums:
            check_sum(name, io.BytesIO(text), self._sums[name])
        entries = index.read_schema_2(io.BytesIO(text)) if has_schema_2 else index.read(text)
        described: dict[str, Any] = {}
        for fqn, entry in entries.items():
            dtype: torch.dtype = getattr(torch, entry.dtype)
            chunks = []
            for piece in entry.pieces:
                chunks.append(ChunkStorageMetadata(torch.Size(piece.at), torch.Size(piece.shape)))
                self._pieces[MetadataIndex(fqn, piece.at)] = (piece, dtype)
            described[fqn] = TensorStorageMetadata(
                TensorProperties(dtype), torch.Size(entry.shape), chunks
            )
        return Metadata(described)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            tensor = self._tensor(*self._pieces[item.storage_index])
            bounds = zip(item.storage_offsets, item.lengths, strict=True)
            for dimension, (at, size) in enumerate(bounds):
                tensor = tensor.narrow(dimension, at, size)
            target = planner.resolve_tensor(item).detach()
            if target.size() != tensor.size():
                raise ValueError(
                    f"{item.storage_index.fqn} has the shape {tuple(tensor.size())}, not"
                    f" {tuple(target.size())}"
                )
            target.copy_(tensor)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _tensor(self, piece: Piece, dtype: torch.dtype) -> torch.Tensor:
        with open(self._folder / piece.file, "rb") as file:
            if piece.crc32 is None:
                self._compare_file(piece.file, file)
            file.seek(piece.offset)
            data = file.read(piece.bytes)
        # In schema 2 the piece is a file of ``torch.save``.
        if piece.crc32 is None:
            tensor: torch.Tensor = torch.load(
                io.BytesIO(data), map_location="cpu", weights_only=True
            )
            return tensor
        if (len(data), Checksum().then(data).crc32) != (piece.bytes, piece.crc32):
            raise Damaged(
                piece.file,
                f"the {piece.bytes:,} bytes at {piece.offset:,} differ from what was written",
            )
        # frombuffer refuses an empty buffer, and warns of one that cannot be written.
        if not data:
            return torch.empty(0, dtype=dtype).reshape(piece.shape)
        return torch.frombuffer(bytearray(data), dtype=dtype).reshape(piece.shape)

    def _compare_file(self, name: str, file: IO[bytes]) -> None:
        """Compare a whole file with its sum, once: schema 2 has no sums of pieces."""
        if name in self._sums and name not in self._compared:
            check_sum(name, file, self._sums[name])
            self._compared.add(name)


def random_state() -> dict[str, Any]:
    """Return the states of PyTorch's generators in this process."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def _flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    flat = {"cpu": state["cpu"]}
    for number, cuda_state in enumerate(state["cuda"]):
        flat[f"cuda.{number}"] = cuda_state
    return flat


def _load_random(folder: Path, rank: int, sums: Mapping[str, Checksum]) -> None:
    """Set the random state that this rank saved, if it did.

    In schema 2 it is a file of ``torch.save``.
    """
    path = folder / f"random_{rank}.safetensors"
    has_schema_2 = not path.exists()
    if has_schema_2:
        path = folder / f"random_{rank}.pt"
    # In a run with more ranks than were saved, the further ones keep their initial state.
    if not path.exists():
        return
    data = path.read_bytes()
    if path.name in sums:
        check_sum(path.name, io.BytesIO(data), sums[path.name])
    try:
        if has_schema_2:
            states = _flat(torch.load(io.BytesIO(data), weights_only=True))
        else:
            states = load_safetensors(data)
        torch.set_rng_state(states.pop("cpu"))
        if torch.cuda.is_available() and states:
            torch.cuda.set_rng_state_all([states[name] for name in sorted(states, key=_number)])
    except Exception as error:  # a damaged file may raise almost anything
        raise ValueError(f"{path.name} holds no random state: {error!r}") from error


def _number(name: str) -> int:
    """Return the number of the GPU in a name of ``_flat``."""
    return int(name.rpartition(".")[2])
