"""The transports without a process group: Ray's object store, files that all nodes see, and the memory of one GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rayloop.core.failures import WeightSyncError
from rayloop.core.files import sync
from rayloop.core.protocols import Manifest
from rayloop.core.types import Version
from rayloop.transports.seam import Receiver, Sender, WeightTransport, WeightUpdate

if TYPE_CHECKING:
    from torch import Tensor


Arrays = Mapping[str, npt.NDArray[np.uint8]]
"""The bytes [nbytes] of every tensor, which Ray's object store gives to every reader without a copy."""


class ArraySender(Sender[Arrays]):
    """Packs the tensors as byte arrays."""

    def pack(self, version: Version, tensors: Mapping[str, Tensor]) -> WeightUpdate[Arrays]:
        """On CPU the arrays share memory with ``tensors``: return them from the actor before the next update."""
        from rayloop.transports.manifest import manifest, raw

        on_cpu = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        return WeightUpdate(manifest(version, on_cpu), {name: raw(tensor) for name, tensor in on_cpu.items()})


class ArrayReceiver(Receiver[Arrays]):
    """Views the byte arrays as tensors."""

    def unpack(self, manifest: Manifest, source: Arrays) -> Mapping[str, Tensor]:
        """The verified CPU tensors, in the store's memory. Raises WeightSyncError."""
        import torch

        from rayloop.transports.manifest import DTYPES, complain, name_faults, verify

        faults = name_faults(manifest, source)
        for name, expected in manifest.tensors.items():
            if name in source and source[name].nbytes != expected.nbytes:
                faults.append(f"{name}: {source[name].nbytes} of {expected.nbytes} bytes")
        complain(manifest.version, faults)
        tensors = {
            name: torch.from_numpy(source[name]).view(DTYPES[expected.dtype]).view(expected.shape)
            for name, expected in manifest.tensors.items()
        }
        verify(manifest, tensors)
        return tensors


class ObjectStore(WeightTransport[Arrays]):
    """The driver owns the arrays until the next weight sync."""

    def sender(self, host: str) -> ArraySender:
        """The rank's half."""
        return ArraySender()

    def receiver(self) -> ArrayReceiver:
        """The rollout actor's half."""
        return ArrayReceiver()


class Filesystem(WeightTransport[str]):
    """``source`` is the path of a file, which every node must see."""

    def sender(self, host: str) -> FileSender:
        """The rank's half."""
        return FileSender(self.folder)

    def receiver(self) -> FileReceiver:
        """The rollout actor's half."""
        return FileReceiver()


KEPT = 2
"""Versions whose files stay: an engine may still read the previous one."""


class FileSender(Sender[str]):
    """Writes to a temporary name and renames, so that a path that exists is complete."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    def pack(self, version: Version, tensors: Mapping[str, Tensor]) -> WeightUpdate[str]:
        """Writes the file and removes old ones."""
        from safetensors.torch import save_file

        from rayloop.transports.manifest import manifest

        on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"weights-{version}.safetensors"
        aside = path.with_suffix(".partial")
        save_file(on_cpu, aside)
        sync(aside)
        os.replace(aside, path)
        for old in sorted(self._folder.glob("weights-*.safetensors"), key=_version)[:-KEPT]:
            old.unlink()
        return WeightUpdate(manifest(version, on_cpu), str(path))


class FileReceiver(Receiver[str]):
    """Reads the file."""

    def unpack(self, manifest: Manifest, source: str) -> Mapping[str, Tensor]:
        """The verified CPU tensors of the file. Raises WeightSyncError."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        from rayloop.transports.manifest import verify

        try:
            tensors = load_file(source)
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(
                f"version {manifest.version}: {source} cannot be read: {error}. Do all nodes see this folder?"
            ) from error
        verify(manifest, tensors)
        return tensors


def _version(path: Path) -> Version:
    lineage, step = path.stem.removeprefix("weights-").split(".")
    return Version(int(lineage), int(step))


@dataclass(frozen=True, slots=True)
class Handles:
    """``tensors`` [name] in the memory of ``gpu``, each as torch's function that opens it and the function's arguments."""

    gpu: str
    tensors: Mapping[str, tuple[Any, tuple[Any, ...]]]


class CudaIpc(WeightTransport[Handles]):
    """``source`` holds handles of tensors in the GPU's memory."""

    def sender(self, host: str) -> HandleSender:
        """The rank's half."""
        return HandleSender()

    def receiver(self) -> HandleReceiver:
        """The rollout actor's half."""
        return HandleReceiver()


class HandleSender(Sender[Handles]):
    """Keeps the tensors until the next weight sync, so that a replaced engine can open them as well."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def pack(self, version: Version, tensors: Mapping[str, Tensor]) -> WeightUpdate[Handles]:
        """Copies the tensors to the GPU."""
        from torch.multiprocessing.reductions import reduce_tensor

        from rayloop.transports.manifest import manifest

        self._kept = {}  # give the memory back before the next copy is made
        self._kept = {name: tensor.detach().cuda().contiguous() for name, tensor in tensors.items()}
        handles = {name: reduce_tensor(tensor) for name, tensor in self._kept.items()}
        return WeightUpdate(manifest(version, tensors), Handles(_gpu(), handles))


class HandleReceiver(Receiver[Handles]):
    """Opens the handles."""

    def unpack(self, manifest: Manifest, source: Handles) -> Mapping[str, Tensor]:
        """The verified tensors, in the sender's GPU memory. Raises WeightSyncError."""
        from rayloop.transports.manifest import verify

        if source.gpu != _gpu():
            raise WeightSyncError(
                f"version {manifest.version}: cuda_ipc: the weights are on GPU {source.gpu}, this engine is on {_gpu()}. "
                "Use the collective or object_store transport for separate GPUs"
            )
        tensors = {name: rebuild(*arguments) for name, (rebuild, arguments) in source.tensors.items()}
        verify(manifest, tensors)
        return tensors


def _gpu() -> str:
    """Returns the UUID of this process's GPU; its number is 0 in every process that sees one GPU."""
    import torch

    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
