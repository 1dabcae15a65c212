"""The manifest of a weight sync (docs/algorithm.md, section 10): names, byte counts, shapes and checksums, which every receiver
compares with the tensors that arrived."""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from isal import isal_zlib  # zlib's CRC-32, several times faster
from torch import Tensor

from rayloop.core.failures import WeightSyncError
from rayloop.core.protocols import Manifest, TensorRecord
from rayloop.core.types import Version

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Arrays from the object store are read-only, and are only ever read.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)


def raw(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """The tensor's bytes [nbytes], in C order; shares memory with a contiguous CPU tensor."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def record(tensor: Tensor) -> TensorRecord:
    """Returns shape, type, bytes and CRC-32 of a tensor."""
    return TensorRecord(tuple(tensor.shape), _dtype_name(tensor), tensor.nbytes, isal_zlib.crc32(raw(tensor)))


def manifest(version: Version, tensors: Mapping[str, Tensor]) -> Manifest:
    """Returns the manifest of one version. Raises WeightSyncError for a dtype that is not in ``DTYPES``."""
    if unknown := {name: str(tensor.dtype) for name, tensor in tensors.items() if _dtype_name(tensor) not in DTYPES}:
        raise WeightSyncError(f"version {version}: only {', '.join(DTYPES)} can be sent, not {unknown}")
    return Manifest(version, {name: record(tensor) for name, tensor in tensors.items()})


def verify(manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """Raises WeightSyncError, which names every missing, unknown, short, misshapen or corrupt tensor."""
    complain(manifest.version, name_faults(manifest, tensors))
    faults: list[str] = []
    for name, expected in manifest.tensors.items():
        tensor = tensors[name]
        if tensor.nbytes != expected.nbytes:
            faults.append(f"{name}: {tensor.nbytes} of {expected.nbytes} bytes")
        elif (shape := tuple(tensor.shape), dtype := _dtype_name(tensor)) != (expected.shape, expected.dtype):
            faults.append(f"{name}: is {dtype} {list(shape)}, not {expected.dtype} {list(expected.shape)}")
        elif (checksum := isal_zlib.crc32(raw(tensor))) != expected.checksum:
            faults.append(f"{name}: corrupt, CRC-32 {checksum:08x} instead of {expected.checksum:08x}")
    complain(manifest.version, faults)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def name_faults(manifest: Manifest, given: Mapping[str, Any]) -> list[str]:
    """Returns one line per tensor that is missing or not in the manifest."""
    missing = [f"{name}: missing" for name in manifest.tensors if name not in given]
    return missing + [f"{name}: unknown" for name in given if name not in manifest.tensors]


def complain(version: Version, faults: list[str]) -> None:
    """Raises WeightSyncError when there are faults."""
    if faults:
        raise WeightSyncError(f"version {version}: {len(faults)} tensors did not arrive as sent: {'; '.join(faults)}")
