"""The manifest of a weight sync (docs/algorithm.md, section 10).

It has names, byte counts, shapes and checksums, which every receiver compares with the tensors that
arrived.
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
ROW_WORDS = 1 << 16
"""Words of a row of a checksum: its factors and products stay in a core's cache."""
_GPU_ROWS = 256
"""Rows that a GPU multiplies at once, through 128 MiB of its memory; a CPU takes one."""
_ODD_FACTOR = -7046029254386353131
"""An odd number: a product with it can be undone modulo 2**64."""

# Arrays from the object store are read-only, and are only ever read.
warnings.filterwarnings(
    "ignore", message="The given NumPy array is not writable", category=UserWarning
)


def raw(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """The tensor's bytes [nbytes], in C order; they share memory with a contiguous CPU tensor."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


@cache
def _factors(device: torch.device) -> Tensor:
    """[2, ROW_WORDS] odd int64 numbers that look random.

    The first row is for the words of a row, the second for the rows.
    """
    numbers = torch.arange(1, 2 * ROW_WORDS + 1, device=device) * _ODD_FACTOR
    for shift in (29, 32):
        # Shift, xor and an odd product mix the words like splitmix64: consecutive numbers then look
        # random.
        numbers = (numbers ^ (numbers >> shift)) * _ODD_FACTOR
    # An odd factor can be undone modulo 2**64, so that no changed word is lost.
    return (numbers | 1).view(2, ROW_WORDS)


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """[] int64, on the tensor's device: its checksum, for tensors of up to 16 GiB.

    It is the sum modulo 2**64 of the tensor's 32-bit words (0 fills up the last one), each times
    the factors of its column and its row (multilinear hashing, arXiv:1202.4961).
    """
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    # A view as int32 needs whole words that begin at a multiple of four bytes.
    if flat.numel() % 4 or flat.storage_offset() % 4:
        flat = torch.cat([flat, flat.new_zeros(-flat.numel() % 4)])
    words = flat.view(torch.int32)
    column_factors, row_factors = _factors(flat.device)
    complete = len(words) // ROW_WORDS * ROW_WORDS
    rows_at_once = 1 if flat.device.type == "cpu" else _GPU_ROWS
    blocks = words[:complete].view(-1, ROW_WORDS).split(rows_at_once)
    sums = [(block * column_factors).sum(1) for block in blocks]
    last_row = words[complete:]
    sums.append((last_row * column_factors[: len(last_row)]).sum(0, keepdim=True))
    row_sums = torch.cat(sums)
    # int64 wraps around, which is arithmetic modulo 2**64 in any order of the sums.
    return (row_sums * row_factors[: len(row_sums)]).sum()


def has_nan(tensor: Tensor) -> Tensor:
    """[] int32, on the tensor's device: 1 if it has NaN or an infinity.

    It takes a tenth of the time of ``checksum``.
    """
    # aminmax refuses an empty tensor.
    if not tensor.numel() or not tensor.is_floating_point():
        return torch.zeros((), dtype=torch.int32, device=tensor.device)
    # Both are NaN if any element is.
    extremes = torch.stack(tensor.detach().aminmax())
    return (~extremes.isfinite()).any().int()


def _checksums(tensors: Iterable[Tensor]) -> list[int]:
    # All are started before the first ``int``, which waits for the device.
    checksums = [checksum(tensor) for tensor in tensors]
    return [int(number) for number in checksums]


def manifest(version: Version, tensors: Mapping[str, Tensor]) -> Manifest:
    """Return the manifest of one version.

    Raises WeightSyncError for a dtype that is not in ``DTYPES``.
    """
    unknown = {
        name: str(tensor.dtype)
        for name, tensor in tensors.items()
        if _dtype_name(tensor) not in DTYPES
    }
    if unknown:
        raise WeightSyncError(
            f"version {version}: only {', '.join(DTYPES)} can be sent, not {unknown}"
        )
    records = {}
    checksums = _checksums(tensors.values())
    for (name, tensor), number in zip(tensors.items(), checksums, strict=True):
        shape = tuple(tensor.shape)
        records[name] = TensorRecord(shape, _dtype_name(tensor), tensor.nbytes, number)
    return Manifest(version, records)


def verify(manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """Compare tensors with their manifest.

    Raises WeightSyncError, which names every missing, unknown, short, misshapen or corrupt tensor.
    """
    # Names come first: ``damage`` looks each of them up.
    complain(manifest.version, name_faults(manifest, tensors))
    complain(manifest.version, damage(manifest.tensors, tensors))


def damage(records: Mapping[str, TensorRecord], tensors: Mapping[str, Tensor]) -> list[str]:
    """Return one line per tensor that is short, misshapen or corrupt.

    ``tensors`` has the tensors of all ``records``.
    """
    faults: list[str] = []
    checksums = _checksums(tensors[name] for name in records)
    for (name, expected), number in zip(records.items(), checksums, strict=True):
        tensor = tensors[name]
        shape = tuple(tensor.shape)
        dtype = _dtype_name(tensor)
        # The number of bytes comes first: shape and checksum of a short tensor explain nothing.
        if tensor.nbytes != expected.nbytes:
            faults.append(f"{name}: {tensor.nbytes} of {expected.nbytes} bytes")
        elif (shape, dtype) != (expected.shape, expected.dtype):
            faults.append(
                f"{name}: is {dtype} {list(shape)}, not {expected.dtype} {list(expected.shape)}"
            )
        elif number != expected.checksum:
            faults.append(f"{name}: corrupt, checksum {number} instead of {expected.checksum}")
    return faults


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def name_faults(manifest: Manifest, given: Mapping[str, Any]) -> list[str]:
    """Return one line per tensor that is missing or not in the manifest."""
    missing = [f"{name}: missing" for name in manifest.tensors if name not in given]
    return missing + [f"{name}: unknown" for name in given if name not in manifest.tensors]


def complain(version: Version, faults: list[str]) -> None:
    """Raise WeightSyncError when there are faults."""
    if faults:
        raise WeightSyncError(
            f"version {version}: {len(faults)} tensors did not arrive as sent: {'; '.join(faults)}"
        )
