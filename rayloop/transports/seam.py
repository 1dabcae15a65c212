"""The seam: how synced weights get from the policy to the engines. One object per transport, with a half in each process.

The driver calls ``deliver``. The ``sender`` lives in the policy's first rank, a ``receiver`` in every rollout actor. What is done
when the transport's way fails is its own affair. Light, as the driver is: torch is imported where tensors are.
docs/bring_your_own/transport.md has the shortest complete one.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from rayloop.core.protocols import GenerationEngine, Manifest
from rayloop.core.types import Version

if TYPE_CHECKING:
    from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")
Source = TypeVar("Source")
"""What a transport's receivers get besides the manifest: bytes, a path, handles. Nobody else looks into it."""


@dataclass(frozen=True, slots=True)
class WeightUpdate(Generic[Source]):
    """One version of the weights, ready to be taken over. In the driver ``source`` is a reference that is resolved on the way."""

    manifest: Manifest
    source: Source


class Policy(Protocol):
    """The policy as a transport sees it."""

    async def export(self, version: Version) -> WeightUpdate[Any]:
        """Gather the weights and ``pack`` them with the sender. Raises PolicyLost."""
        ...

    def ask(self, method: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]:
        """Call a method of the sender in the first rank: ``ask(MySender.method, ...)``. Raises what it raises, PolicyLost."""
        ...


class Rollouts(Protocol):
    """The engines in service as a transport sees them."""

    @property
    def members(self) -> tuple[int, ...]:
        """Their serial numbers, which are never used twice."""
        ...

    def keep(self, update: WeightUpdate[Any]) -> None:
        """What engines load that come from now on. To be said before the first ``load`` of a version."""
        ...

    async def load(self, update: WeightUpdate[Any]) -> None:
        """Let every engine in service ``take`` it within ``weight_sync.timeout``. One that is lost meanwhile is replaced.

        Raises the first failure (WeightSyncError, BroadcastFailed) when all have ended.
        """
        ...

    def fell_back(self, version: Version, error: Exception) -> None:
        """Make an event of it: the transport's own way failed, and this version takes a slower one."""
        ...


class Sender(ABC, Generic[Source]):
    """In the policy's first rank. The driver can ``ask`` for further methods of it."""

    @abstractmethod
    def pack(self, version: Version, tensors: Mapping[str, Tensor]) -> WeightUpdate[Source]:
        """``tensors`` are whole, on any device. What is returned is owned by the driver. Raises WeightSyncError."""


class Receiver(ABC, Generic[Source]):
    """In every rollout actor."""

    @abstractmethod
    def unpack(self, manifest: Manifest, source: Source) -> Mapping[str, Tensor]:
        """The verified tensors, to be read only. Runs in a thread. Raises WeightSyncError."""

    async def take(self, engine: GenerationEngine, manifest: Manifest, source: Source) -> None:
        """Bring the engine to this weight update: unpack, pause, load, resume whatever happened. Raises WeightSyncError.

        A transport that hands the weights to an engine's own processes replaces this, and unpacks nothing.
        """
        tensors = await asyncio.to_thread(self.unpack, manifest, source)
        await engine.pause()
        try:
            await engine.load(manifest, tensors)
        finally:
            await engine.resume()


class Transport(ABC, Generic[Source]):
    """Made in the driver, in every rank and in every rollout actor, from its settings and a folder that all of them see."""

    @abstractmethod
    def sender(self, host: str) -> Sender[Source]:
        """For the rank, whose node others reach at ``host``."""

    @abstractmethod
    def receiver(self) -> Receiver[Source]:
        """For a rollout actor."""

    async def deliver(self, policy: Policy, rollouts: Rollouts, version: Version) -> None:
        """Bring every engine in service to the policy's weights, as ``version``.

        Raises PolicyLost when they could not be gathered, WeightSyncError when they did not arrive as sent.
        """
        update = await policy.export(version)
        rollouts.keep(update)
        await rollouts.load(update)
