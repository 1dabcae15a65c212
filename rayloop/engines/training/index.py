"""``index.json``: the type and shape of each of a trainer's tensors, and its pieces.

A piece is a rectangle of the tensor (``at``, ``shape``) and the bytes that hold it, row by row,
little-endian. Schema 2 had a pickle instead, read here without running code.
"""

import json
import math
import pickle
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import IO, Any

FILE = "index.json"
SCHEMA_2_FILE = ".metadata"
SIZES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of a value, by the type's name in torch."""
_FORM = "rayloop tensors 1"
_NAMES = re.compile(r"rank_\d+\.bin|__\d+_\d+\.distcp")
"""Of the files that hold pieces."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of a tensor: where it begins (``at``) and its ``shape``; where its bytes are.

    ``crc32`` is None in schema 2, where the bytes are a file of ``torch.save``.
    """

    at: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    bytes: int
    crc32: int | None


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Type, shape and pieces of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def write(entries: Mapping[str, TensorEntry]) -> bytes:
    """The text of ``index.json``."""
    return json.dumps(
        {"form": _FORM, "tensors": {name: asdict(entry) for name, entry in entries.items()}}
    ).encode()


def read(text: bytes) -> dict[str, TensorEntry]:
    """The entries of an ``index.json``.

    Raises ValueError when it is anything else, or a piece does not fit its tensor.
    """
    found = json.loads(text)
    if (
        not isinstance(found, dict)
        or found.get("form") != _FORM
        or not isinstance(found.get("tensors"), dict)
    ):
        raise ValueError(f"it is no index of the form {_FORM!r}")
    try:
        return {name: _checked(name, _entry(value)) for name, value in found["tensors"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its index is broken: {error!r}") from error


def _entry(value: Any) -> TensorEntry:
    def piece(one: Any) -> Piece:
        offset, length, crc32 = (_number(one[key]) for key in ("offset", "bytes", "crc32"))
        return Piece(
            _numbers(one["at"]), _numbers(one["shape"]), one["file"], offset, length, crc32
        )

    return TensorEntry(value["dtype"], _numbers(value["shape"]), tuple(map(piece, value["pieces"])))


def _number(value: Any) -> int:
    # A JSON ``true`` would pass isinstance: bool is a subclass of int.
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} is no number of the index")
    return value


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(_number(value) for value in values)


def _checked(name: str, entry: TensorEntry) -> TensorEntry:
    """Raises ValueError unless every value of the tensor is in one piece, and every piece in a file
    of the checkpoint.
    """
    if entry.dtype not in SIZES:
        raise ValueError(
            f"its index gives {name} the type {entry.dtype!r}, of which there are no tensors here"
        )
    for piece in entry.pieces:
        inside = len(piece.at) == len(piece.shape) == len(entry.shape) and all(
            at + size <= whole
            for at, size, whole in zip(piece.at, piece.shape, entry.shape, strict=True)
        )
        sized = piece.crc32 is None or piece.bytes == math.prod(piece.shape) * SIZES[entry.dtype]
        # The name is matched whole: an index must not lead to a file outside of the checkpoint.
        if not inside or not sized or not _NAMES.fullmatch(piece.file):
            raise ValueError(f"its index names a piece of {name} that does not fit: {piece}")
    covered = sum(math.prod(piece.shape) for piece in entry.pieces)
    if covered != math.prod(entry.shape) or len({piece.at for piece in entry.pieces}) != len(
        entry.pieces
    ):
        raise ValueError(
            f"its index has {covered} of the {math.prod(entry.shape)} values of {name}"
        )
    # Pieces that overlap leave as many values out, since their sizes add up to the tensor's.
    if shared := _overlap(entry):
        raise ValueError(
            f"its index has values of {name} twice, and others not at all: {shared[0]} overlaps"
            f" {shared[1]}"
        )
    return entry


def _overlap(entry: TensorEntry) -> tuple[Piece, Piece] | None:
    """Two pieces that share a value of the tensor, or None."""
    # Comparing each piece with every other one would take minutes for a thousand ranks. In the
    # order of the dimension in which the tensor is cut most often, a piece has only the few before
    # it to compare.
    axis = max(
        range(len(entry.shape)),
        key=lambda axis: len({piece.at[axis] for piece in entry.pieces}),
        default=0,
    )
    near: list[Piece] = []
    for piece in sorted(entry.pieces, key=lambda piece: piece.at[axis : axis + 1]):
        near = [other for other in near if other.at[axis] + other.shape[axis] > piece.at[axis]]
        for other in near:
            if all(_meet(other, piece, one) for one in range(len(entry.shape))):
                return other, piece
        near.append(piece)
    return None


def _meet(one: Piece, other: Piece, axis: int) -> bool:
    """Whether the two share an index of the dimension ``axis``.

    A piece without values shares none.
    """
    begin = max(one.at[axis], other.at[axis])
    end = min(one.at[axis] + one.shape[axis], other.at[axis] + other.shape[axis])
    return begin < end


def read_schema_2(file: IO[bytes]) -> dict[str, TensorEntry]:
    """The entries of a ``.metadata`` of torch.distributed.checkpoint.

    Nothing in it is looked up outside this module. Raises ValueError when it holds anything but
    tensors, or is broken.
    """
    try:
        found = _Reader(file).load()
        places = {
            (index.fqn, tuple(index.offset or ())): info
            for index, info in found.storage_data.items()
        }
        return {
            name: _checked(name, _old_entry(name, tensor, places))
            for name, tensor in found.state_dict_metadata.items()
        }
    except ValueError:
        raise
    except Exception as error:  # of a file that is empty, cut or noise, almost any
        raise ValueError(f"its index is broken: {error!r}") from error


def _old_entry(name: str, tensor: Any, places: Mapping[Any, Any]) -> TensorEntry:
    pieces = []
    for chunk in tensor.chunks:
        at = _numbers(chunk.offsets)
        # A tensor that was saved whole is stored without an offset.
        info = places[name, at] if (name, at) in places else places[name, ()]
        place = (info.relative_path, _number(info.offset), _number(info.length))
        pieces.append(Piece(at, _numbers(chunk.sizes), *place, crc32=None))
    return TensorEntry(tensor.properties.state[0], _numbers(tensor.size), tuple(pieces))


class _Record:
    """Stands for an object of torch: has what it was pickled with, as attributes or as ``state``."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)
        else:
            self.state = state


def _nothing(*_: Any) -> None:
    """Stands for a value that says nothing about tensors on disk: a memory format, a layout, a
    path.
    """


_TORCH = "torch.distributed.checkpoint.metadata"
_STAND_INS: Mapping[tuple[str, str], Any] = {
    **{
        (_TORCH, name): _Record
        for name in (
            "Metadata",
            "StorageMeta",
            "MetadataIndex",
            "TensorStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
        )
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Record,
    ("torch", "Size"): lambda values: tuple(values),
    **{("torch", name): name for name in SIZES},
    # How an enumeration is pickled differs between 3.11.0 and 3.13: as getattr(class, name), or as
    # class(value).
    (_TORCH, "_MEM_FORMAT_ENCODING"): _nothing,
    ("builtins", "getattr"): _nothing,
    ("torch.serialization", "_get_layout"): _nothing,
    **{
        (module, name): _nothing
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath")
    },
}
"""What an index of tensors is made of -> what it is read as.

Values that are no tensors would be pickles of their own.
"""


class _Reader(pickle.Unpickler):
    """Finds these stand-ins, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        # Unpickling calls what this returns, so that a
        # forged index could run any function of Python.
        if (module, name) not in _STAND_INS:
            raise ValueError(f"its index names {module}.{name}, which no index of tensors does")
        return _STAND_INS[module, name]
