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
_PIECE_FILE = re.compile(r"rank_\d+\.bin|__\d+_\d+\.distcp")
"""Names of the files that hold pieces."""


@dataclass(frozen=True)
class Piece:
    """A rectangle of a tensor, which begins at ``at`` and has the ``shape``, and its bytes' place.

    ``crc32`` is None in schema 2, where the bytes are a file of ``torch.save``.
    """

    at: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    bytes: int
    crc32: int | None


@dataclass(frozen=True)
class TensorEntry:
    """Type, shape and pieces of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def write(entries: Mapping[str, TensorEntry]) -> bytes:
    """Return the text of ``index.json``."""
    tensors = {name: asdict(entry) for name, entry in entries.items()}
    return json.dumps({"form": _FORM, "tensors": tensors}).encode()


def read(text: bytes) -> dict[str, TensorEntry]:
    """Return the entries of an ``index.json``.

    Raises ValueError when it is anything else, or a piece does not fit its tensor.
    """
    content = json.loads(text)
    has_form = isinstance(content, dict) and content.get("form") == _FORM
    if not has_form or not isinstance(content.get("tensors"), dict):
        raise ValueError(f"it is not an index of the form {_FORM!r}")
    try:
        return {name: _checked(name, _entry(value)) for name, value in content["tensors"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its index is broken: {error!r}") from error


def _entry(value: Any) -> TensorEntry:
    pieces = tuple(_piece(piece) for piece in value["pieces"])
    return TensorEntry(value["dtype"], _numbers(value["shape"]), pieces)


def _piece(value: Any) -> Piece:
    return Piece(
        at=_numbers(value["at"]),
        shape=_numbers(value["shape"]),
        file=value["file"],
        offset=_number(value["offset"]),
        bytes=_number(value["bytes"]),
        crc32=_number(value["crc32"]),
    )


def _number(value: Any) -> int:
    # A JSON ``true`` would pass isinstance: bool is a subclass of int.
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} is not a number of the index")
    return value


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(_number(value) for value in values)


def _checked(name: str, entry: TensorEntry) -> TensorEntry:
    """Return the entry.

    Raises ValueError unless every value of the tensor is in one piece, and every piece in a file of
    the checkpoint.
    """
    if entry.dtype not in SIZES:
        raise ValueError(f"its index gives {name} the unknown type {entry.dtype!r}")
    for piece in entry.pieces:
        size = math.prod(piece.shape) * SIZES[entry.dtype]
        has_size = piece.crc32 is None or piece.bytes == size
        # The name is matched whole: an index must not lead to a file outside of the checkpoint.
        has_file = _PIECE_FILE.fullmatch(piece.file) is not None
        if not (_is_inside(piece, entry.shape) and has_size and has_file):
            raise ValueError(f"its index names a piece of {name} that does not fit: {piece}")
    covered = sum(math.prod(piece.shape) for piece in entry.pieces)
    corners = {piece.at for piece in entry.pieces}
    if covered != math.prod(entry.shape) or len(corners) != len(entry.pieces):
        raise ValueError(
            f"its index has {covered} of the {math.prod(entry.shape)} values of {name}"
        )
    # Pieces that overlap leave as many values out, since their sizes add up to the tensor's.
    overlap = _overlap(entry)
    if overlap is not None:
        raise ValueError(
            f"its index has values of {name} twice, and others not at all: {overlap[0]} overlaps"
            f" {overlap[1]}"
        )
    return entry


def _is_inside(piece: Piece, shape: tuple[int, ...]) -> bool:
    """Whether the piece is part of a tensor of the ``shape``."""
    if not len(piece.at) == len(piece.shape) == len(shape):
        return False
    bounds = zip(piece.at, piece.shape, shape, strict=True)
    return all(at + size <= length for at, size, length in bounds)


def _overlap(entry: TensorEntry) -> tuple[Piece, Piece] | None:
    """Return two pieces that share a value of the tensor, or None."""
    # Comparing each piece with every other one would take minutes for a thousand ranks. In the
    # order of the dimension in which the tensor is cut most often, a piece has only the few before
    # it to compare.
    dimensions = range(len(entry.shape))

    def cuts(axis: int) -> int:
        return len({piece.at[axis] for piece in entry.pieces})

    axis = max(dimensions, key=cuts, default=0)
    near: list[Piece] = []
    for piece in sorted(entry.pieces, key=lambda piece: piece.at[axis : axis + 1]):
        near = [
            neighbour
            for neighbour in near
            if neighbour.at[axis] + neighbour.shape[axis] > piece.at[axis]
        ]
        for neighbour in near:
            if all(_meet(neighbour, piece, dimension) for dimension in dimensions):
                return neighbour, piece
        near.append(piece)
    return None


def _meet(a: Piece, b: Piece, axis: int) -> bool:
    """Whether the two pieces share an index of the dimension ``axis``.

    A piece without values shares none.
    """
    begin = max(a.at[axis], b.at[axis])
    end = min(a.at[axis] + a.shape[axis], b.at[axis] + b.shape[axis])
    return begin < end


def read_schema_2(file: IO[bytes]) -> dict[str, TensorEntry]:
    """Return the entries of a ``.metadata`` of torch.distributed.checkpoint.

    Nothing in it is looked up outside this module. Raises ValueError when it holds anything but
    tensors, or is broken.
    """
    try:
        metadata = _Reader(file).load()
        places = {
            (index.fqn, tuple(index.offset or ())): info
            for index, info in metadata.storage_data.items()
        }
        return {
            name: _checked(name, _old_entry(name, tensor, places))
            for name, tensor in metadata.state_dict_metadata.items()
        }
    except ValueError:
        raise
    except Exception as error:  # a file that is empty, cut or noise may raise almost any
        raise ValueError(f"its index is broken: {error!r}") from error


def _old_entry(name: str, tensor: Any, places: Mapping[Any, Any]) -> TensorEntry:
    pieces = []
    for chunk in tensor.chunks:
        at = _numbers(chunk.offsets)
        # A tensor that was saved whole is stored without an offset.
        info = places[name, at] if (name, at) in places else places[name, ()]
        pieces.append(
            Piece(
                at=at,
                shape=_numbers(chunk.sizes),
                file=info.relative_path,
                offset=_number(info.offset),
                bytes=_number(info.length),
                crc32=None,
            )
        )
    return TensorEntry(tensor.properties.state[0], _numbers(tensor.size), tuple(pieces))


class _Record:
    """Stands for an object of torch: has its pickled values, as attributes or as ``state``."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)
        else:
            self.state = state


def _nothing(*_: Any) -> None:
    """Stands for a value that says nothing about tensors on disk.

    Such values are memory formats, layouts and paths.
    """


_TORCH = "torch.distributed.checkpoint.metadata"
_STAND_INS: Mapping[tuple[str, str], Any] = {
    (_TORCH, "Metadata"): _Record,
    (_TORCH, "StorageMeta"): _Record,
    (_TORCH, "MetadataIndex"): _Record,
    (_TORCH, "TensorStorageMetadata"): _Record,
    (_TORCH, "TensorProperties"): _Record,
    (_TORCH, "ChunkStorageMetadata"): _Record,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Record,
    ("torch", "Size"): lambda values: tuple(values),
    **{("torch", name): name for name in SIZES},
    # How an enumeration is pickled differs between 3.11.0 and 3.13: as getattr(class, name), or as
    # class(value).
    (_TORCH, "_MEM_FORMAT_ENCODING"): _nothing,
    ("builtins", "getattr"): _nothing,
    ("torch.serialization", "_get_layout"): _nothing,
    ("pathlib", "Path"): _nothing,
    ("pathlib", "PosixPath"): _nothing,
    ("pathlib._local", "Path"): _nothing,
    ("pathlib._local", "PosixPath"): _nothing,
}
"""Pickled classes and functions of an index of tensors -> their stand-ins here.

Values that are not tensors would be separate pickles.
"""


class _Reader(pickle.Unpickler):
    """Unpickler that finds these stand-ins, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        # Unpickling calls what this returns, so that a
        # forged index could run any function of Python.
        if (module, name) not in _STAND_INS:
            raise ValueError(f"its index names {module}.{name}, which no index of tensors does")
        return _STAND_INS[module, name]
