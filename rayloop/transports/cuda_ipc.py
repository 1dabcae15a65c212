"""Weights in the memory of a GPU that sender and receivers share. Never exercised in a training (docs/engines.md).

The export ends in CPU memory, and vLLM's workers read the weights from CPU memory: the transport saves the object store only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rayloop.core.failures import WeightSyncError
from rayloop.core.protocols import Manifest
from rayloop.core.types import Version
from rayloop.transports.seam import Receiver, Sender, WeightTransport, WeightUpdate
from rayloop.transports.settings import CudaIpcTransport

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Handles:
    """``tensors`` [name] in the memory of ``gpu``, each as torch's function that opens it and the function's arguments."""

    gpu: str
    tensors: Mapping[str, tuple[Any, tuple[Any, ...]]]


class CudaIpc(WeightTransport[Handles]):
    """``source`` holds handles of tensors in the GPU's memory."""

    def __init__(self, settings: CudaIpcTransport, folder: str) -> None:
        del settings, folder

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
