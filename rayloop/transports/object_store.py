"""Weights through Ray's object store: works everywhere, and is what the other ways fall back to."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rayloop.core.protocols import Manifest
from rayloop.core.types import Version
from rayloop.transports.manifest import DTYPES, complain, manifest, name_faults, raw, verify


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
        complain(manifest.version, faults)
        tensors = {
            name: torch.from_numpy(source[name]).view(DTYPES[expected.dtype]).view(expected.shape)
            for name, expected in manifest.tensors.items()
        }
        verify(manifest, tensors)
        return tensors
