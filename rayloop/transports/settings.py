"""Settings of the weight transports, and the table of them. Imports neither torch nor ray."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

from pydantic import PrivateAttr, Tag

from rayloop.config.settings import OWN, Component, SettingsModel, by_kind


@dataclass(frozen=True, slots=True)
class Placed:
    """GPUs of a run: ``policy_gpus`` for each of ``ranks``, ``rollout_gpus`` for each of ``actors``."""

    ranks: int
    policy_gpus: float
    actors: int
    rollout_gpus: float

    def __str__(self) -> str:
        return f"policy.placement.num_gpus is {self.policy_gpus:g} and rollout.placement.num_gpus is {self.rollout_gpus:g}"


class TransportChoice(SettingsModel):
    """Base of the settings of the transports that are shipped."""

    implementation: ClassVar[str]
    """``module:Class``, imported where it is needed."""

    def problems(self, placed: Placed) -> Iterator[str]:
        """Yields why this transport cannot serve a run with this placement."""
        yield from ()


class ObjectStoreTransport(TransportChoice):
    """Weights travel through Ray's object store, owned by the driver. Works everywhere."""

    implementation = "rayloop.transports.plain:ObjectStore"
    kind: Literal["object_store"] = "object_store"


class FilesystemTransport(TransportChoice):
    """Weights travel as safetensors files below the run folder, which all nodes must see."""

    implementation = "rayloop.transports.plain:Filesystem"
    kind: Literal["filesystem"] = "filesystem"


class BroadcastTransport(TransportChoice):
    """Weights are broadcast in a process group of the policy's first rank and all rollout actors, for many nodes. The object store
    keeps a copy from which a replaced rollout actor catches up, and all of them when a broadcast fails."""

    implementation = "rayloop.transports.collective:Collective"
    backend: ClassVar[Literal["gloo", "nccl"]]
    bucket_bytes: ClassVar[int] = 2**30
    """Tensors travel together in buckets of this size, which sender and receivers hold once more; a larger tensor has one of its
    own. Smaller buckets cost a round trip each."""
    share: ClassVar[float] = 0.2
    """Of the time for a weight sync: how long a member waits for the others, to meet and for each bucket, before the broadcast
    fails and the object store's copy is loaded."""

    _timeout: float = PrivateAttr(120.0)

    @property
    def timeout(self) -> float:
        """Seconds of each such wait."""
        return self._timeout

    def within(self, seconds: float) -> Self:
        """The same whose waits are its ``share`` of so many seconds."""
        made = self.model_copy()
        made._timeout = self.share * seconds
        return made


class CollectiveTransport(BroadcastTransport):
    """Weights are broadcast over TCP (gloo) from the policy's first rank to all rollout actors, for many nodes. The object store
    keeps a copy for actors that are replaced, and for a broadcast that fails."""

    kind: Literal["collective"] = "collective"
    backend = "gloo"


class NcclTransport(BroadcastTransport):
    """As ``collective``, between GPUs: every rollout actor and the policy's first rank need one of their own. At both ends the
    weights pass through CPU memory all the same: choose it where the network between the nodes is slow without."""

    kind: Literal["nccl"] = "nccl"
    backend = "nccl"

    def problems(self, placed: Placed) -> Iterator[str]:
        """NCCL needs GPUs that are not shared."""
        if min(placed.policy_gpus, placed.rollout_gpus) < 1:
            yield (
                f"weight_sync.transport.kind: nccl sends between GPUs that are not shared, and {placed}. Give each one, "
                "or use kind: collective; on one shared GPU kind: cuda_ipc"
            )


class CudaIpcTransport(TransportChoice):
    """Weights are opened in the memory of the GPU, which the policy's only rank and the rollout actors share.

    The policy keeps a second copy of them there. Before that and after it they pass through CPU memory: it spares the object store,
    not the copies. Never exercised in a training (docs/engines.md).
    """

    implementation = "rayloop.transports.plain:CudaIpc"
    kind: Literal["cuda_ipc"] = "cuda_ipc"

    def problems(self, placed: Placed) -> Iterator[str]:
        """All must be on one GPU."""
        together = placed.ranks * placed.policy_gpus + placed.actors * placed.rollout_gpus
        if min(placed.policy_gpus, placed.rollout_gpus) <= 0 or together > 1 or placed.ranks > 1:
            yield (
                f"weight_sync.transport.kind: cuda_ipc needs the policy, with one rank, and all rollout actors on one GPU, and "
                f"{placed}, for {placed.ranks} ranks and {placed.actors} rollout actors. Give them fractions of one GPU, or use "
                "kind: object_store, filesystem or collective"
            )


TransportSettings = Annotated[
    Annotated[ObjectStoreTransport, Tag("object_store")]
    | Annotated[FilesystemTransport, Tag("filesystem")]
    | Annotated[CollectiveTransport, Tag("collective")]
    | Annotated[NcclTransport, Tag("nccl")]
    | Annotated[CudaIpcTransport, Tag("cuda_ipc")]
    | Annotated[Component, Tag(OWN)],
    by_kind("object_store"),
]
"""A transport of your own is named by where it is: ``{use: package.module:Class, with: {...}}``."""


def problems(settings: TransportSettings, placed: Placed) -> Iterator[str]:
    """Yields why the transport cannot serve a run with this placement; a transport of your own is not checked."""
    if isinstance(settings, TransportChoice):
        yield from settings.problems(placed)
