"""Settings of the weight transports. This module imports neither torch nor ray."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

from pydantic import PrivateAttr, Tag

from rayloop.config.settings import CUSTOM, Component, SettingsModel, by_kind


@dataclass(frozen=True)
class Placed:
    """The GPUs of each policy rank and of each rollout actor."""

    policy_gpus: float
    rollout_gpus: float

    def __str__(self) -> str:
        return (
            f"policy.placement.num_gpus is {self.policy_gpus:g} and rollout.placement.num_gpus is"
            f" {self.rollout_gpus:g}"
        )


class TransportChoice(SettingsModel):
    """Base of the settings of the shipped transports."""

    implementation: ClassVar[str]
    """``module:Class``, imported where it is needed."""

    def problems(self, placed: Placed) -> Iterator[str]:
        """Yield why this transport cannot serve a run with this placement."""
        yield from ()


class ObjectStoreTransport(TransportChoice):
    """Weights travel through Ray's object store, owned by the driver. Works everywhere."""

    implementation = "rayloop.transports.plain:ObjectStore"
    kind: Literal["object_store"] = "object_store"


class BroadcastTransport(TransportChoice):
    """Weights are broadcast from the policy's first rank, while they are gathered.

    The process group has the processes of vLLM or SGLang (rollout actors with other engines). The
    object store gets a copy, which replaced engines load, and all engines if a broadcast fails.
    """

    implementation = "rayloop.transports.collective:Collective"
    backend: ClassVar[Literal["gloo", "nccl"]]
    bucket_bytes: ClassVar[int] = 2**30
    """The size of the buckets in which tensors travel together.

    Sender and receivers hold two; a larger tensor has a separate bucket. Smaller buckets cost round
    trips.
    """
    share: ClassVar[float] = 0.2
    """The share of the time for a weight sync that a member waits for the others, at most.

    It waits for the meeting and for each bucket; then the broadcast fails and the object store's
    copy is loaded. Waits are shorter when the last broadcasts were fast (``Rollouts.patience``).
    """

    _timeout: float = PrivateAttr(120.0)
    _workers: int = PrivateAttr(0)

    @property
    def timeout(self) -> float:
        """The most seconds of such a wait."""
        return self._timeout

    @property
    def workers(self) -> int:
        """Processes of each engine that join the group; 0: its rollout actor does."""
        return self._workers

    def within(self, seconds: float, workers: int = 0) -> Self:
        """A copy for engines with ``workers``, whose waits are the ``share`` of ``seconds``."""
        settings = self.model_copy()
        settings._timeout = self.share * seconds
        settings._workers = workers
        return settings


class CollectiveTransport(BroadcastTransport):
    """Weights are broadcast over TCP (gloo) from the policy's first rank to all engines.

    It is for many nodes. The object store keeps a copy for engines that are replaced, and for a
    broadcast that fails.
    """

    kind: Literal["collective"] = "collective"
    backend = "gloo"


class NcclTransport(BroadcastTransport):
    """Weights are broadcast as with ``collective``, but between GPUs.

    Every engine and the policy's first rank need separate GPUs. vLLM and SGLang load the weights
    from the GPU's memory, in which they arrive.
    """

    kind: Literal["nccl"] = "nccl"
    backend = "nccl"

    def problems(self, placed: Placed) -> Iterator[str]:
        """NCCL needs GPUs that are not shared."""
        # NCCL refuses a communicator with two ranks on one device.
        if min(placed.policy_gpus, placed.rollout_gpus) < 1:
            yield (
                "weight_sync.transport.kind: nccl sends between GPUs that are not shared, and"
                f" {placed}. Give each one, or use kind: collective"
            )


TransportSettings = Annotated[
    Annotated[ObjectStoreTransport, Tag("object_store")]
    | Annotated[CollectiveTransport, Tag("collective")]
    | Annotated[NcclTransport, Tag("nccl")]
    | Annotated[Component, Tag(CUSTOM)],
    by_kind("object_store"),
]
"""The settings of any transport; a custom one is ``{use: package.module:Class, with: {...}}``."""


def problems(settings: TransportSettings, placed: Placed) -> Iterator[str]:
    """Yield why the transport cannot serve a run with this placement.

    A custom transport is not checked.
    """
    if isinstance(settings, TransportChoice):
        yield from settings.problems(placed)
