"""The interface of a weight transport (docs/bring_your_own/transport.md): the driver calls
``deliver``, the ``sender`` lives in the policy's first rank, a ``receiver`` in every rollout actor.
The driver imports this module: torch is imported in functions.
"""

from __future__ import annotations

import asyncio
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from rayloop.config.settings import Component
from rayloop.core.failures import ConfigError
from rayloop.core.protocols import GenerationEngine, Manifest
from rayloop.core.types import Version
from rayloop.transports.settings import TransportSettings

if TYPE_CHECKING:
    from torch import Tensor


P = ParamSpec("P")
T = TypeVar("T")
Source = TypeVar("Source")
"""What receivers get besides the manifest: bytes, a path, handles. Only the transport reads it."""


@dataclass(frozen=True, slots=True)
class WeightUpdate(Generic[Source]):
    """One version of the weights, ready to be loaded.

    In the driver ``source`` is an object reference, which Ray resolves; what ``Rollouts.keep`` gets
    may have a task that returns the update as ``source``.
    """

    manifest: Manifest
    source: Source


class WeightExporter(Protocol):
    """The policy's part of ``deliver``."""

    async def export(self, version: Version) -> WeightUpdate[Any]:
        """Gather the weights and ``pack`` them with the sender; after ``send`` of this version,
        what it has ``sent``. Raises PolicyLost.
        """

    async def send(self, version: Version, meeting: Any) -> None:
        """Let the sender ``send`` the weights while they are gathered.

        Raises PolicyLost, BroadcastFailed.
        """

    def ask(
        self, method: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Awaitable[T]:
        """Call a method of the sender in the first rank: ``ask(MySender.method, ...)``.

        Raises what it raises, PolicyLost.
        """


class Rollouts(Protocol):
    """The part of ``deliver`` for the engines in service."""

    @property
    def members(self) -> tuple[int, ...]:
        """Their serial numbers, which are never used twice."""

    def keep(self, update: WeightUpdate[Any]) -> None:
        """Engines that start from now on load this.

        Call it before the first ``load`` of a version.
        """

    async def load(self, update: WeightUpdate[Any]) -> None:
        """Every engine in service loads it within a sixth of ``policy.step_timeout``.

        An engine that is lost meanwhile is replaced. Raises the first failure (WeightSyncError,
        BroadcastFailed) after all have ended. What ``keep`` got is bounded by the last loads; after
        AnswerLate, which must not be caught, ``deliver`` is called once more.
        """

    def fell_back(self, version: Version, error: Exception) -> None:
        """Emits an event: the transport failed for this version, and a slower way follows."""


class Sender(ABC, Generic[Source]):
    """Runs in the policy's first rank.

    The driver calls further methods of it through ``WeightExporter.ask``.
    """

    @abstractmethod
    def pack(self, version: Version, tensors: Mapping[str, Tensor]) -> WeightUpdate[Source]:
        """``tensors`` are whole, on any device.

        The driver owns the returned value. Raises WeightSyncError.
        """

    def send(self, version: Version, weights: Iterable[tuple[str, Tensor]], meeting: Any) -> None:
        """For ``WeightExporter.send``: ``weights`` are gathered while they are iterated, to their
        end in any case. Raises BroadcastFailed.
        """
        raise NotImplementedError

    def sent(self) -> WeightUpdate[Source]:
        """A copy of what was sent last."""
        raise NotImplementedError


@asynccontextmanager
async def paused(engine: GenerationEngine) -> AsyncIterator[None]:
    """The engine decodes nothing within, and goes on afterwards in any case."""
    await engine.pause()
    try:
        yield
    finally:
        await engine.resume()


class Receiver(ABC, Generic[Source]):
    """Runs in every rollout actor."""

    @abstractmethod
    def unpack(self, manifest: Manifest, source: Source) -> Mapping[str, Tensor]:
        """The verified tensors, to be read only. Runs in a thread. Raises WeightSyncError."""

    async def take(self, engine: GenerationEngine, manifest: Manifest, source: Source) -> None:
        """Unpack, pause the engine, load, and resume it in any case.

        Raises WeightSyncError. A transport that gives the weights to an engine's own processes
        overrides this, and unpacks nothing.
        """
        # It unpacks before the pause, so that the engine goes on decoding meanwhile.
        tensors = await asyncio.to_thread(self.unpack, manifest, source)
        async with paused(engine):
            await engine.load(manifest, tensors)


class WeightTransport(ABC, Generic[Source]):
    """Made in the driver, in every rank and in every rollout actor, from the settings and a folder
    that all of them see.
    """

    def __init__(self, settings: Any, folder: str) -> None:
        self.settings, self.folder = settings, folder

    @abstractmethod
    def sender(self, host: str) -> Sender[Source]:
        """Returns the rank's half; other nodes reach the rank at ``host``."""

    @abstractmethod
    def receiver(self) -> Receiver[Source]:
        """Returns the rollout actor's half."""

    async def deliver(self, policy: WeightExporter, rollouts: Rollouts, version: Version) -> None:
        """Load the policy's weights into every engine in service, as ``version``.

        Raises PolicyLost when the weights could not be gathered, WeightSyncError when they did not
        arrive as sent.
        """
        update = await policy.export(version)
        # It comes before the load, or an engine that starts during it would get the version before.
        rollouts.keep(update)
        await rollouts.load(update)


def transport(settings: TransportSettings, folder: str | Path) -> WeightTransport[Any]:
    """Returns the transport of ``settings``; it may write below ``folder`` (in the run folder),
    which every node should see. Raises ConfigError for a class that does not implement
    WeightTransport.
    """
    if not isinstance(settings, Component):
        shipped: WeightTransport[Any] = pkgutil.resolve_name(settings.implementation)(
            settings, str(folder)
        )
        return shipped
    own = settings.resolve()(settings.options(), str(folder))
    if isinstance(own, WeightTransport):
        return own
    raise ConfigError(
        f"use: {settings.use!r} is a {type(own).__name__}, not a"
        " rayloop.transports.seam.WeightTransport"
    )
