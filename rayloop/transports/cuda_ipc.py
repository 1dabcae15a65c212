"""Weights in the memory of the GPU which sender and receivers share. Not yet run in a whole training.

They come from CPU memory, where an export ends, and vLLM's workers are handed them through it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rayloop.core.failures import WeightSyncError
from rayloop.core.protocols import Manifest
from rayloop.core.types import Version
from rayloop.transports.seam import Receiver, Sender, Transport, WeightUpdate
from rayloop.transports.settings import CudaIpcTransport

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Handles:
    """``tensors`` [name] in the memory of ``gpu``, each as torch's function that opens it and its arguments."""

    gpu: str
    tensors: Mapping[str, tuple[Any, tuple[Any, ...]]]


class CudaIpc(Transport[Handles]):
    """Export, load; the source are handles of tensors in the memory of the GPU that sender and receivers share."""

    def __init__(self, settings: CudaIpcTransport, folder: str) -> None:
        del settings, folder

    def sender(self, host: str) -> HandleSender:
        return HandleSender()

    def receiver(self) -> HandleReceiver:
        return HandleReceiver()


class HandleSender(Sender[Handles]):
    """Keeps the tensors until the next weight update, so that a replaced engine can open them as well."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def pack(self, version: Version, tensors: Mapping[str, Tensor]) -> WeightUpdate[Handles]:
        from torch.multiprocessing.reductions import reduce_tensor

        from rayloop.transports.manifest import manifest

        self._kept = {}  # give the memory back before the next copy is made
        self._kept = {name: tensor.detach().cuda().contiguous() for name, tensor in tensors.items()}
        handles = {name: reduce_tensor(tensor) for name, tensor in self._kept.items()}
        return WeightUpdate(manifest(version, tensors), Handles(_gpu(), handles))


class HandleReceiver(Receiver[Handles]):
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
    """The identity of this process's GPU, which its number is not: every process sees its first one as 0."""
    import torch

    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
