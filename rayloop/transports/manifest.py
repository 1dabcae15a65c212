"""The manifest of a weight sync (docs/algorithm.md, section 10): names, byte counts, shapes and
checksums, which every receiver compares with the tensors that arrived.
"""

import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rayloop.core.failures import WeightSyncError
from rayloop.core.protocols import Manifest, TensorRecord
from rayloop.core.types import Version

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
COLUMNS = 1 << 16
"""Words of a row of a checksum: its factors and products stay in a core's cache."""
ROWS = 256
"""Rows that a GPU multiplies at once, through 128 MiB of its memory; a CPU takes one."""
ODD = -7046029254386353131
"""Multiplying with it loses nothing modulo 2**64."""

# Arrays from the object store are read-only, and are only ever read.
warnings.filterwarnings(
    "ignore", message="The given NumPy array is not writable", category=UserWarning
)


def raw(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """The tensor's bytes [nbytes], in C order; shares memory with a contiguous CPU tensor."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


@cache
def _factors(device: torch.device) -> Tensor:
    """[2, COLUMNS] odd numbers, int64, that differ like random ones: for the words of a row, and
    for the rows.
    """
    numbers = torch.arange(1, 2 * COLUMNS + 1, device=device) * ODD
    for shift in (29, 32):
        # Shift, xor and an odd product mix the words as in
        # splitmix64: numbers in a row then look random.
        numbers = (numbers ^ (numbers >> shift)) * ODD
    # An odd factor can be undone modulo 2**64, so that no changed word is lost.
    return (numbers | 1).view(2, COLUMNS)


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """[] int64, on the tensor's device: the sum modulo 2**64 of its 32-bit words (0 fills up the
    last one), each times the factors of its column and its row (multilinear hashing,
    arXiv:1202.4961). For tensors of up to 16 GiB.
    """
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    # A view as int32 needs whole words that begin at a multiple of four bytes.
    if flat.numel() % 4 or flat.storage_offset() % 4:
        flat = torch.cat([flat, flat.new_zeros(-flat.numel() % 4)])
    words, (of_column, of_row) = flat.view(torch.int32), _factors(flat.device)
    whole = len(words) // COLUMNS * COLUMNS
    rows = words[:whole].view(-1, COLUMNS).split(1 if flat.device.type == "cpu" else ROWS)
    last = (words[whole:] * of_column[: len(words) - whole]).sum(0, keepdim=True)
    sums = torch.cat([*((some * of_column).sum(1) for some in rows), last])
    # int64 wraps around, which is arithmetic modulo 2**64 in any order of the sums.
    return (sums * of_row[: len(sums)]).sum()


def has_nan(tensor: Tensor) -> Tensor:
    """[] int32, on the tensor's device: 1 where it holds NaN or an infinity.

    Takes a tenth of the time of ``checksum``.
    """
    # aminmax refuses an empty tensor.
    if not tensor.numel() or not tensor.is_floating_point():
        return torch.zeros((), dtype=torch.int32, device=tensor.device)
    extremes = torch.stack(tensor.detach().aminmax())  # NaN is kept by both
    return (~extremes.isfinite()).any().int()


def _checksums(tensors: Iterable[Tensor]) -> list[int]:
    """Begins all before it waits for the first."""
    return [int(found) for found in [checksum(tensor) for tensor in tensors]]


def manifest(version: Version, tensors: Mapping[str, Tensor]) -> Manifest:
    """Returns the manifest of one version.

    Raises WeightSyncError for a dtype that is not in ``DTYPES``.
    """
    if unknown := {
        name: str(tensor.dtype)
        for name, tensor in tensors.items()
        if _dtype_name(tensor) not in DTYPES
    }:
        raise WeightSyncError(
            f"version {version}: only {', '.join(DTYPES)} can be sent, not {unknown}"
        )
    return Manifest(
        version,
        {
            name: TensorRecord(tuple(tensor.shape), _dtype_name(tensor), tensor.nbytes, found)
            for (name, tensor), found in zip(
                tensors.items(), _checksums(tensors.values()), strict=True
            )
        },
    )


def verify(manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """Raises WeightSyncError, which names every missing, unknown, short, misshapen or corrupt
    tensor.
    """
    # Names come first: ``damage`` looks each of them up.
    complain(manifest.version, name_faults(manifest, tensors))
    complain(manifest.version, damage(manifest.tensors, tensors))


def damage(records: Mapping[str, TensorRecord], tensors: Mapping[str, Tensor]) -> list[str]:
    """Returns one line per tensor that is short, misshapen or corrupt; ``tensors`` has those of the
    records.
    """
    faults: list[str] = []
    for (name, expected), found in zip(
        records.items(), _checksums(tensors[name] for name in records), strict=True
    ):
        tensor = tensors[name]
        # The number of bytes comes first: shape and checksum of a short tensor explain nothing.
        if tensor.nbytes != expected.nbytes:
            faults.append(f"{name}: {tensor.nbytes} of {expected.nbytes} bytes")
        elif (shape := tuple(tensor.shape), dtype := _dtype_name(tensor)) != (
            expected.shape,
            expected.dtype,
        ):
            faults.append(
                f"{name}: is {dtype} {list(shape)}, not {expected.dtype} {list(expected.shape)}"
            )
        elif found != expected.checksum:
            faults.append(f"{name}: corrupt, checksum {found} instead of {expected.checksum}")
    return faults


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def name_faults(manifest: Manifest, given: Mapping[str, Any]) -> list[str]:
    """Returns one line per tensor that is missing or not in the manifest."""
    missing = [f"{name}: missing" for name in manifest.tensors if name not in given]
    return missing + [f"{name}: unknown" for name in given if name not in manifest.tensors]


def complain(version: Version, faults: list[str]) -> None:
    """Raises WeightSyncError when there are faults."""
    if faults:
        raise WeightSyncError(
            f"version {version}: {len(faults)} tensors did not arrive as sent: {'; '.join(faults)}"
        )
