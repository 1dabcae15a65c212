"""The interface of a weight transport (docs/bring_your_own/transport.md).

The driver calls ``deliver``; the ``sender`` runs in the policy's first rank, a ``receiver`` in
every rollout actor. The driver imports this module, so torch is imported in functions.
"""

from __future__ import annotations

import asyncio
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from rayloop.config.settings import Component
from rayloop.core.failures import ConfigError
from rayloop.core.protocols import GenerationEngine, Manifest
from rayloop.core.types import Version
from rayloop.transports.settings import TransportSettings

if TYPE_CHECKING:
    from torch import Tensor


Source = TypeVar("Source")
"""The data that receivers get with the manifest: bytes, a path, handles.

Only the transport reads it.
"""


@dataclass(frozen=True)
class WeightUpdate(Generic[Source]):
    """One version of the weights, ready to be loaded.

    In the driver ``source`` is an object reference, which Ray resolves; in the update for
    ``Rollouts.keep`` it may be a task that returns the whole update when it is awaited.
    """

    manifest: Manifest
    source: Source


class WeightExporter(Protocol):
    """The policy's part of ``deliver``."""

    async def export(self, version: Version) -> WeightUpdate[Any]:
        """Return the update of ``version``, for which all ranks gather the weights.

        The sender makes it by ``serialize``. After ``send`` of this version nothing is gathered
        again: the sender returns the copy that it has ``sent``. Raises PolicyLost.
        """

    async def send(self, version: Version, meeting: Any) -> None:
        """Let the sender ``send`` the weights while they are gathered.

        Raises PolicyLost, BroadcastFailed.
        """

    async def invite(self, engines: tuple[int, ...], failures: int, timeout: float) -> Any:
        """Let the sender ``invite`` these engines; returns the meeting for ``send``.

        Raises PolicyLost.
        """


class Rollouts(Protocol):
    """The part of ``deliver`` for the engines in service."""

    @property
    def members(self) -> tuple[int, ...]:
        """The serial numbers of the engines, which are never used twice."""

    @property
    def patience(self) -> float:
        """Seconds that the next ``load`` of a broadcast may take; such an update is never kept."""

    def keep(self, update: WeightUpdate[Any]) -> None:
        """Let engines that start after this call load this update.

        Call it before the first ``load`` of a version.
        """

    async def load(self, update: WeightUpdate[Any]) -> None:
        """Load the update into every engine.

        The deadline is a sixth of ``policy.step_timeout``, or less when the last loads of this kind
        were much faster. An engine that is lost or late is replaced. Raises the first failure
        (WeightSyncError, BroadcastFailed) after all loads have ended. If an engine is late for the
        update of ``keep``, AnswerLate is raised instead. It must not be caught: the caller exports
        the version again and calls ``deliver`` once more.
        """

    def fell_back(self, version: Version, error: Exception) -> None:
        """Emit an event: the transport failed for this version, and a slower way follows."""


class Sender(ABC, Generic[Source]):
    """The part of a transport in the policy's first rank."""

    @abstractmethod
    def serialize(self, version: Version, tensors: Mapping[str, Tensor]) -> WeightUpdate[Source]:
        """Return all weights as an update; ``tensors`` are whole, on any device.

        The driver owns the returned value. Raises WeightSyncError.
        """

    def invite(self, engines: tuple[int, ...], failures: int, timeout: float) -> Any:
        """Where the engines with these serial numbers get the weights of the next ``send``.

        ``failures``: the broadcasts that failed so far; ``timeout``: the most seconds of a wait in
        a group that has met.
        """
        raise NotImplementedError

    def send(self, version: Version, weights: Iterable[tuple[str, Tensor]], meeting: Any) -> None:
        """Send the weights for ``WeightExporter.send``.

        ``weights`` are gathered while they are iterated, which must reach their end in any case.
        Raises BroadcastFailed.
        """
        raise NotImplementedError

    def sent(self) -> WeightUpdate[Source]:
        """A copy of the weights that were sent last."""
        raise NotImplementedError


@asynccontextmanager
async def paused(engine: GenerationEngine) -> AsyncIterator[None]:
    """Pause the engine's decoding, and resume it afterwards in any case."""
    await engine.pause()
    try:
        yield
    finally:
        await engine.resume()


class Receiver(ABC, Generic[Source]):
    """The part of a transport in every rollout actor."""

    @abstractmethod
    def deserialize(self, manifest: Manifest, source: Source) -> Mapping[str, Tensor]:
        """Return the verified tensors, which are only read.

        It runs in a thread. Raises WeightSyncError.
        """

    async def take(self, engine: GenerationEngine, manifest: Manifest, source: Source) -> None:
        """Deserialize, pause the engine, load, and resume it in any case.

        Raises WeightSyncError. A transport that gives the weights to an engine's own processes
        overrides this, and deserializes nothing.
        """
        # Before the pause, so that the engine decodes during that time.
        tensors = await asyncio.to_thread(self.deserialize, manifest, source)
        async with paused(engine):
            await engine.load(manifest, tensors)


@dataclass
class WeightTransport(ABC, Generic[Source]):
    """A way of the weights from the policy to the engines.

    The driver, every rank and every rollout actor construct one, from the settings and a folder
    that all of them see.
    """

    settings: Any
    folder: str

    @abstractmethod
    def sender(self, host: str) -> Sender[Source]:
        """Return the rank's part; other nodes reach the rank at ``host``."""

    @abstractmethod
    def receiver(self) -> Receiver[Source]:
        """Return the rollout actor's part."""

    async def deliver(self, policy: WeightExporter, rollouts: Rollouts, version: Version) -> None:
        """Load the policy's weights into every engine in service, as ``version``.

        Raises PolicyLost when the weights could not be gathered, WeightSyncError when they did not
        arrive as sent.
        """
        update = await policy.export(version)
        # This comes before the load, or an engine that starts during it would get the last version.
        rollouts.keep(update)
        await rollouts.load(update)


def transport(settings: TransportSettings, folder: str | Path) -> WeightTransport[Any]:
    """Return the transport of ``settings``.

    It may write below ``folder`` (in the run folder), which every node should see. Raises
    ConfigError for a class that does not implement WeightTransport.
    """
    if not isinstance(settings, Component):
        implementation = pkgutil.resolve_name(settings.implementation)
        shipped: WeightTransport[Any] = implementation(settings, str(folder))
        return shipped
    custom = settings.resolve()(settings.options(), str(folder))
    if isinstance(custom, WeightTransport):
        return custom
    raise ConfigError(
        f"use: {settings.use!r} is a {type(custom).__name__}, not a"
        " rayloop.transports.seam.WeightTransport"
    )
