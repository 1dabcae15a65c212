"""Weights by broadcast from the policy's first rank to all rollout actors; when a broadcast fails, through the object store. The
process group, apart from the trainer's, carries bytes in buckets whose layout both sides compute from the manifest."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayloop.core.failures import BroadcastFailed
from rayloop.core.protocols import Manifest
from rayloop.core.types import Version
from rayloop.transports.plain import ArrayReceiver, Arrays, ArraySender
from rayloop.transports.seam import Receiver, Rollouts, Sender, WeightExporter, WeightTransport, WeightUpdate
from rayloop.transports.settings import BroadcastTransport

if TYPE_CHECKING:
    from torch import Tensor


ALIGNMENT = 16
"""Bytes; tensors of any dtype start at a multiple of it within a bucket."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """``offsets`` [name]: where each tensor begins, in bytes, within ``size`` bytes."""

    size: int
    offsets: Mapping[str, int]


def buckets(manifest: Manifest, limit: int) -> Iterator[Bucket]:
    """Cut the manifest's tensors, in order, into buckets of at most ``limit`` bytes; a larger tensor is alone."""
    size, offsets = 0, dict[str, int]()
    for name, tensor in manifest.tensors.items():
        room = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if offsets and size + room > limit:
            yield Bucket(size, offsets)
            size, offsets = 0, {}
        offsets[name] = size
        size += room
    if offsets:
        yield Bucket(size, offsets)


@dataclass(frozen=True, slots=True)
class BroadcastGroup:
    """How ``size`` members of the process group find each other: the sender's TCP store at ``host:port``, keys below ``name``."""

    host: str
    port: int
    name: str
    size: int


class Collective(WeightTransport[Arrays | BroadcastGroup]):
    """The exported copy stays in the object store, for engines that start later and for all engines when a broadcast fails."""

    def __init__(self, settings: BroadcastTransport, folder: str) -> None:
        super().__init__(settings, folder)
        self._failures = 0

    def sender(self, host: str) -> BroadcastSender:
        """The rank's half; it opens the store at ``host``."""
        return BroadcastSender(self.settings, host)

    def receiver(self) -> BroadcastReceiver:
        """The rollout actor's half."""
        return BroadcastReceiver(self.settings)

    async def deliver(self, policy: WeightExporter, rollouts: Rollouts, version: Version) -> None:
        """Broadcasts; falls back to the object store. Raises PolicyLost, and WeightSyncError for weights that arrive damaged."""
        update = await policy.export(version)
        rollouts.keep(update)
        try:
            await self._broadcast(update, policy, rollouts)
        except BroadcastFailed as error:
            self._failures += 1
            rollouts.fell_back(version, error)
            await rollouts.load(update)

    async def _broadcast(self, update: WeightUpdate[Arrays], policy: WeightExporter, rollouts: Rollouts) -> None:
        """Sends to the engines in service, in a new process group if they have changed or the last broadcast failed."""
        manifest, source = update.manifest, update.source
        meeting = await policy.ask(BroadcastSender.invite, rollouts.members, self._failures)
        sending = policy.ask(BroadcastSender.send, manifest, source, meeting)
        receiving = rollouts.load(WeightUpdate(manifest, meeting))
        for end in await asyncio.gather(sending, receiving, return_exceptions=True):
            if isinstance(end, BaseException):
                raise end


class BroadcastSender(Sender[Arrays | BroadcastGroup]):
    """Packs for the object store; ``send`` broadcasts these arrays."""

    def __init__(self, settings: BroadcastTransport, host: str) -> None:
        from rayloop.transports.process_group import Membership

        self._settings, self._host = settings, host
        self._membership = Membership(settings.backend, settings.timeout)
        self._meeting: BroadcastGroup | None = None
        self._invited: tuple[tuple[int, ...], int] | None = None

    def pack(self, version: Version, tensors: Mapping[str, Tensor]) -> WeightUpdate[Arrays | BroadcastGroup]:
        """Same as ``ArraySender.pack``."""
        packed = ArraySender().pack(version, tensors)
        return WeightUpdate(packed.manifest, packed.source)

    def invite(self, members: tuple[int, ...], failures: int) -> BroadcastGroup:
        """Returns the group for this rank and the rollout actors with the serial numbers ``members``. It is the existing group
        unless the members or the number of failed broadcasts have changed."""
        port = self._membership.serve(self._host)
        if self._meeting is None or self._invited != (members, failures):
            self._invited = (members, failures)
            self._meeting = BroadcastGroup(self._host, port, secrets.token_hex(8), 1 + len(members))
        return self._meeting

    def send(self, manifest: Manifest, source: Arrays, meeting: BroadcastGroup) -> None:
        """Broadcast the arrays of ``pack`` to the group. Raises BroadcastFailed."""
        import torch

        membership = self._membership
        try:
            membership.join(meeting.host, meeting.port, meeting.name, meeting.size)
            for bucket in buckets(manifest, self._settings.bucket_bytes):
                buffer = torch.zeros(bucket.size, dtype=torch.uint8)
                for name, offset in bucket.offsets.items():
                    buffer[offset : offset + source[name].nbytes] = torch.from_numpy(source[name])
                membership.broadcast(buffer.to(membership.device))
        except RuntimeError as error:
            membership.leave()
            self._meeting = None
            raise BroadcastFailed(f"version {manifest.version}: could not send the broadcast: {error}") from error


class BroadcastReceiver(Receiver[Arrays | BroadcastGroup]):
    """Receives a broadcast, or reads the object store's arrays."""

    def __init__(self, settings: BroadcastTransport) -> None:
        from rayloop.transports.process_group import Membership

        self._settings = settings
        self._membership = Membership(settings.backend, settings.timeout)

    def unpack(self, manifest: Manifest, source: Arrays | BroadcastGroup) -> Mapping[str, Tensor]:
        """The verified CPU tensors. Raises WeightSyncError, BroadcastFailed."""
        from rayloop.transports.manifest import verify

        if not isinstance(source, BroadcastGroup):
            return ArrayReceiver().unpack(manifest, source)
        try:
            tensors = self._receive(manifest, source)
        except RuntimeError as error:
            self._membership.leave()
            raise BroadcastFailed(f"version {manifest.version}: could not receive the broadcast: {error}") from error
        verify(manifest, tensors)
        return tensors

    def _receive(self, manifest: Manifest, meeting: BroadcastGroup) -> dict[str, Tensor]:
        import torch

        from rayloop.transports.manifest import DTYPES

        tensors: dict[str, Tensor] = {}
        membership = self._membership
        membership.join(meeting.host, meeting.port, meeting.name, meeting.size)
        for bucket in buckets(manifest, self._settings.bucket_bytes):
            buffer = torch.empty(bucket.size, dtype=torch.uint8, device=membership.device)
            membership.broadcast(buffer)
            received = buffer.cpu()
            for name, offset in bucket.offsets.items():
                expected = manifest.tensors[name]
                piece = received[offset : offset + expected.nbytes]
                tensors[name] = piece.view(DTYPES[expected.dtype]).view(expected.shape)
        return tensors
