"""Plain values in two files: their structure as JSON, arrays and bytes as safetensors.

Reading them runs no code. A mapping with the one key ``$array`` or ``$bytes`` stands for the tensor
of that name; equal bytes are written once.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, load_file, save_file

from rayloop.core.failures import CheckpointError, CheckpointStorageFailed

ARRAY = "$array"
BYTES = "$bytes"


def write(structure: Path, tensors: Path, value: Any) -> None:
    """Write ``value`` of plain types, bytes and arrays; tuples become lists.

    Raises CheckpointError for anything else.
    """
    plain, found = split(value)
    try:
        save_file(found, tensors)  # other threads continue during it, unlike with ``save``
    except SafetensorError as error:
        # safetensors has one class for all errors; only the text says that the storage refused.
        kind = CheckpointStorageFailed if "os error" in str(error) else CheckpointError
        raise kind(f"the arrays of the state cannot be saved: {error}") from error
    structure.write_text(json.dumps(plain), encoding="utf-8")


def split(value: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """``value`` as JSON can hold it, and its arrays by name. Raises CheckpointError."""
    found: dict[str, np.ndarray] = {}
    return _Writer(found).plain(value, "state"), found


def joined(structure: bytes, tensors: bytes) -> Any:
    """The value of the contents of the two files.

    Raises ValueError, KeyError, RecursionError or SafetensorError for others.
    """
    return _filled(json.loads(structure), load(tensors))


def read(structure: Path, tensors: Path) -> Any:
    """The value that was written. Raises CheckpointError when it cannot be read."""
    try:
        return _filled(json.loads(structure.read_text(encoding="utf-8")), load_file(tensors))
    except (OSError, ValueError, KeyError, RecursionError, SafetensorError) as error:
        raise CheckpointError(
            f"{structure} and {tensors.name} in its folder cannot be read: {error!r}"
        ) from error


class _Writer:
    """Collects the tensors in ``found``."""

    def __init__(self, found: dict[str, np.ndarray]) -> None:
        self.found = found
        self._bytes: dict[bytes, str] = {}

    def plain(self, value: Any, where: str) -> Any:
        """``value`` for JSON; ``where`` names it in an error."""
        match value:
            case None | bool() | int() | float() | str():
                return value
            case bytes():
                if value not in self._bytes:
                    self._bytes[value] = self._keep(np.frombuffer(value, np.uint8))
                return {BYTES: self._bytes[value]}
            case np.generic():
                return value.item()
            case np.ndarray():
                return {ARRAY: self._keep(np.ascontiguousarray(value))}
            case list() | tuple():
                return [self.plain(one, f"{where}[{i}]") for i, one in enumerate(value)]
            case Mapping():
                # A mapping with such a key would be read back as a tensor.
                if not all(isinstance(name, str) for name in value) or value.keys() in (
                    {ARRAY},
                    {BYTES},
                ):
                    raise CheckpointError(
                        f"{where} has keys that cannot be saved:"
                        f" {', '.join(map(repr, value))[:200]}"
                    )
                return {name: self.plain(one, f"{where}.{name}") for name, one in value.items()}
        raise CheckpointError(
            f"{where} is a {type(value).__name__}, which cannot be saved as plain data"
        )

    def _keep(self, array: np.ndarray) -> str:
        name = str(len(self.found))
        self.found[name] = array
        return name


def _filled(plain: Any, tensors: Mapping[str, np.ndarray]) -> Any:
    if isinstance(plain, list):
        return [_filled(one, tensors) for one in plain]
    if not isinstance(plain, dict):
        return plain
    match plain:
        case {"$array": str(name)} if len(plain) == 1:
            return tensors[name]
        case {"$bytes": str(name)} if len(plain) == 1:
            return tensors[name].tobytes()
    return {name: _filled(one, tensors) for name, one in plain.items()}
