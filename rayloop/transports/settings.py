"""Settings of the ways that weights take from the policy to the engines. Light: neither torch nor ray."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rayloop.config.settings import SettingsModel


class ObjectStoreTransport(SettingsModel):
    """Weights travel through Ray's object store, owned by the driver. Works everywhere."""

    kind: Literal["object_store"] = "object_store"


class FilesystemTransport(SettingsModel):
    """Weights travel as safetensors files below the run folder, which all nodes must see."""

    kind: Literal["filesystem"] = "filesystem"


class CollectiveTransport(SettingsModel):
    """Weights are broadcast in a process group of the policy's first rank and all rollout actors, for many nodes.

    The object store keeps a copy from which a replaced rollout actor catches up, and all of them when a broadcast fails.
    """

    kind: Literal["collective"] = "collective"
    backend: Literal["gloo", "nccl"] = "gloo"
    """gloo: from CPU memory over TCP. nccl: from GPU to GPU; every rollout actor needs a GPU of its own, and so does the
    policy's first rank."""
    bucket_bytes: int = Field(2**30, ge=2**10)
    """Tensors travel together in buckets of this size; a larger tensor has one of its own."""
    timeout: float = Field(60.0, gt=0)
    """Seconds that a member waits for the others, to meet and for each bucket, before the broadcast fails. Must be less than
    ``publish.timeout``."""


class CudaIpcTransport(SettingsModel):
    """Weights stay on the GPU, which the policy's only rank and the rollout actors share, and are opened from there.

    The policy keeps a second copy of them in GPU memory. Written, and not yet run.
    """

    kind: Literal["cuda_ipc"] = "cuda_ipc"


TransportSettings = Annotated[
    ObjectStoreTransport | FilesystemTransport | CollectiveTransport | CudaIpcTransport, Field(discriminator="kind")
]
