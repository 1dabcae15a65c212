"""The transport without a process group: Ray's object store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rayloop.core.protocols import Manifest
from rayloop.core.types import Version
from rayloop.transports.seam import Receiver, Sender, WeightTransport, WeightUpdate

if TYPE_CHECKING:
    from torch import Tensor


Arrays = Mapping[str, npt.NDArray[np.uint8]]
"""The bytes [nbytes] of every tensor, which readers get from Ray's object store without a copy."""


class ArraySender(Sender[Arrays]):
    """A sender that serializes the tensors as byte arrays."""

    def serialize(self, version: Version, tensors: Mapping[str, Tensor]) -> WeightUpdate[Arrays]:
        """Serialize the tensors.

        On CPU the arrays share memory with ``tensors``: return them from the actor before the next
        update.
        """
        from rayloop.transports.manifest import manifest, raw

        # Tensors are copied once: checksum and bytes are both computed on the host.
        on_cpu = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        arrays = {name: raw(tensor) for name, tensor in on_cpu.items()}
        return WeightUpdate(manifest(version, on_cpu), arrays)


class ArrayReceiver(Receiver[Arrays]):
    """A receiver that views the byte arrays as tensors."""

    def deserialize(self, manifest: Manifest, source: Arrays) -> Mapping[str, Tensor]:
        """The verified CPU tensors, in the store's memory. Raises WeightSyncError."""
        import torch

        from rayloop.transports.manifest import DTYPES, complain, name_faults, verify

        faults = name_faults(manifest, source)
        for name, expected in manifest.tensors.items():
            if name in source and source[name].nbytes != expected.nbytes:
                faults.append(f"{name}: {source[name].nbytes} of {expected.nbytes} bytes")
        # A short array cannot be viewed in its shape, so lengths are compared first.
        complain(manifest.version, faults)
        tensors = {}
        for name, expected in manifest.tensors.items():
            array = torch.from_numpy(source[name])
            tensors[name] = array.view(DTYPES[expected.dtype]).view(expected.shape)
        verify(manifest, tensors)
        return tensors


class ObjectStore(WeightTransport[Arrays]):
    """A transport through the object store; the driver owns the arrays until the next sync."""

    def sender(self, host: str) -> ArraySender:
        """The rank's part."""
        return ArraySender()

    def receiver(self) -> ArrayReceiver:
        """The rollout actor's part."""
        return ArrayReceiver()
