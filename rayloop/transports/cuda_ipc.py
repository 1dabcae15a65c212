"""Weights that stay in the memory of the GPU which sender and receivers share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from rayloop.core.failures import PublicationError
from rayloop.core.protocols import Manifest
from rayloop.core.types import Version
from rayloop.transports.manifest import manifest, verify


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


def _gpu() -> str:
    """The identity of this process's GPU, which its number is not: every process sees its first one as 0."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
