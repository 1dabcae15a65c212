"""Publication of weights: what is sent, how it travels, and the check at the receiver (docs/algorithm.md, section 10).

The trainer ``pack``s its tensors into a manifest and a source, the source travels (through Ray's object store, as a file, or
as handles of GPU memory; broadcasts are in collective.py), and every receiver ``unpack``s it: names, byte counts and checksums
must be those of the manifest.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from isal import isal_zlib  # zlib's CRC-32, several times faster
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from rayloop.core.failures import PublicationError
from rayloop.core.protocols import Manifest, TensorRecord
from rayloop.core.types import Version
from rayloop.transports.settings import CollectiveTransport, CudaIpcTransport, FilesystemTransport, TransportSettings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Arrays from the object store are read-only, and are only ever read.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)


def raw(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """The tensor's bytes [nbytes], in C order; shares memory with a contiguous CPU tensor."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def record(tensor: Tensor) -> TensorRecord:
    """What a receiver must find."""
    return TensorRecord(tuple(tensor.shape), _dtype_name(tensor), tensor.nbytes, isal_zlib.crc32(raw(tensor)))


def manifest(version: Version, tensors: Mapping[str, Tensor]) -> Manifest:
    """Describe a publication. Raises PublicationError for a dtype that cannot be published."""
    if unknown := {name: str(tensor.dtype) for name, tensor in tensors.items() if _dtype_name(tensor) not in DTYPES}:
        raise PublicationError(f"version {version}: only {', '.join(DTYPES)} can be published, not {unknown}")
    return Manifest(version, {name: record(tensor) for name, tensor in tensors.items()})


def verify(manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """Raises PublicationError that names every missing, unknown, short, misshapen or corrupt tensor."""
    _complain(manifest.version, name_faults(manifest, tensors))
    faults: list[str] = []
    for name, expected in manifest.tensors.items():
        tensor = tensors[name]
        if tensor.nbytes != expected.nbytes:
            faults.append(f"{name}: {tensor.nbytes} of {expected.nbytes} bytes")
        elif (shape := tuple(tensor.shape), dtype := _dtype_name(tensor)) != (expected.shape, expected.dtype):
            faults.append(f"{name}: is {dtype} {list(shape)}, not {expected.dtype} {list(expected.shape)}")
        elif (checksum := isal_zlib.crc32(raw(tensor))) != expected.checksum:
            faults.append(f"{name}: corrupt, CRC-32 {checksum:08x} instead of {expected.checksum:08x}")
    _complain(manifest.version, faults)


class Transport(Protocol):
    """How weights travel from the trainer to an engine."""

    def pack(self, version: Version, tensors: Mapping[str, Tensor]) -> tuple[Manifest, Any]:
        """The manifest and a source that ``unpack`` understands on any node. ``tensors`` are whole, on any device."""
        ...

    def unpack(self, manifest: Manifest, source: Any) -> Mapping[str, Tensor]:
        """The verified CPU tensors, to be read only. Raises PublicationError."""
        ...


class ObjectStore:
    """The source is a dict of byte arrays [nbytes], which Ray's object store hands to every reader without a copy.

    On CPU the arrays share memory with ``tensors``: return them from the actor before the next update.
    """

    def pack(
        self, version: Version, tensors: Mapping[str, Tensor]
    ) -> tuple[Manifest, dict[str, npt.NDArray[np.uint8]]]:
        on_cpu = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        return manifest(version, on_cpu), {name: raw(tensor) for name, tensor in on_cpu.items()}

    def unpack(self, manifest: Manifest, source: Mapping[str, npt.NDArray[np.uint8]]) -> Mapping[str, Tensor]:
        faults = name_faults(manifest, source)
        for name, expected in manifest.tensors.items():
            if name in source and source[name].nbytes != expected.nbytes:
                faults.append(f"{name}: {source[name].nbytes} of {expected.nbytes} bytes")
        _complain(manifest.version, faults)
        tensors = {
            name: torch.from_numpy(source[name]).view(DTYPES[expected.dtype]).view(expected.shape)
            for name, expected in manifest.tensors.items()
        }
        verify(manifest, tensors)
        return tensors


class Filesystem:
    """The source is the path of a safetensors file below ``folder``, which every node must see.

    The file is written aside and renamed, so that a path that exists is complete. The newest ``keep`` versions stay:
    an engine may still read the one before.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2) -> None:
        self._folder = Path(folder)
        self._keep = keep

    def pack(self, version: Version, tensors: Mapping[str, Tensor]) -> tuple[Manifest, str]:
        on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"weights-{version}.safetensors"
        aside = path.with_suffix(".partial")
        save_file(on_cpu, aside)
        with open(aside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(aside, path)
        self._prune()
        return manifest(version, on_cpu), str(path)

    def unpack(self, manifest: Manifest, source: str) -> Mapping[str, Tensor]:
        try:
            tensors = load_file(source)
        except (OSError, SafetensorError) as error:
            raise PublicationError(
                f"version {manifest.version}: {source} cannot be read: {error}. Do all nodes see this folder?"
            ) from error
        verify(manifest, tensors)
        return tensors

    def _prune(self) -> None:
        files = sorted(self._folder.glob("weights-*.safetensors"), key=lambda path: _version(path))
        for path in files[: -self._keep]:
            path.unlink()


class CudaIpc:
    """The source holds handles of tensors in the memory of the GPU that sender and receivers share. Not yet run.

    The sender keeps the tensors until the next publication, so that a replaced engine can open them as well.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def pack(self, version: Version, tensors: Mapping[str, Tensor]) -> tuple[Manifest, tuple[str, dict[str, Any]]]:
        self._kept = {}  # give the memory back before the next copy is made
        self._kept = {name: tensor.detach().cuda().contiguous() for name, tensor in tensors.items()}
        handles = {name: reduce_tensor(tensor) for name, tensor in self._kept.items()}
        return manifest(version, tensors), (_gpu(), handles)

    def unpack(self, manifest: Manifest, source: tuple[str, Mapping[str, Any]]) -> Mapping[str, Tensor]:
        """The verified tensors, in the sender's GPU memory. Raises PublicationError."""
        gpu, handles = source
        if gpu != _gpu():
            raise PublicationError(
                f"version {manifest.version}: cuda_ipc: the weights are on GPU {gpu}, this engine is on {_gpu()}. Use the "
                "collective or object_store transport for separate GPUs"
            )
        tensors = {name: rebuild(*arguments) for name, (rebuild, arguments) in handles.items()}
        verify(manifest, tensors)
        return tensors


def transport(settings: TransportSettings, folder: str | Path) -> Transport:
    """The transport that ``settings`` names; ``folder`` (below the run folder) is used by the filesystem transport."""
    if isinstance(settings, CollectiveTransport):
        from rayloop.transports.collective import Collective

        return Collective(settings)
    if isinstance(settings, CudaIpcTransport):
        return CudaIpc()
    return Filesystem(folder) if isinstance(settings, FilesystemTransport) else ObjectStore()


def _gpu() -> str:
    """The identity of this process's GPU, which its number is not: every process sees its first one as 0."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _version(path: Path) -> Version:
    lineage, step = path.stem.removeprefix("weights-").split(".")
    return Version(int(lineage), int(step))


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def name_faults(manifest: Manifest, given: Mapping[str, Any]) -> list[str]:
    """One line per tensor that is missing, or that the manifest does not know."""
    missing = [f"{name}: missing" for name in manifest.tensors if name not in given]
    return missing + [f"{name}: unknown" for name in given if name not in manifest.tensors]


def _complain(version: Version, faults: list[str]) -> None:
    if faults:
        raise PublicationError(f"version {version}: {len(faults)} tensors did not arrive as sent: {'; '.join(faults)}")
