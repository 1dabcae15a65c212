"""Weights by broadcast, from the policy's first rank to all rollout actors at once; the object store is what it falls back to.

They meet in a process group of their own, apart from the trainer's. The manifest carries names, shapes and checksums; the group
carries bytes only, in buckets whose layout both sides derive from the manifest.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayloop.core.failures import BroadcastFailed
from rayloop.core.protocols import Manifest
from rayloop.core.types import Version
from rayloop.transports.buckets import buckets
from rayloop.transports.object_store import ArrayReceiver, Arrays, ArraySender
from rayloop.transports.seam import Policy, Receiver, Rollouts, Sender, Transport, WeightUpdate
from rayloop.transports.settings import CollectiveTransport

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class BroadcastGroup:
    """Where the ``size`` members of the weights' process group find each other: at the store of the sender, below ``name``."""

    host: str
    port: int
    name: str
    size: int


class Collective(Transport[Arrays | BroadcastGroup]):
    """The exported copy stays in the object store for engines that come later, and for all of them when a broadcast fails."""

    def __init__(self, settings: CollectiveTransport, folder: str) -> None:
        self._settings = settings
        self._failures = 0

    def sender(self, host: str) -> BroadcastSender:
        return BroadcastSender(self._settings, host)

    def receiver(self) -> BroadcastReceiver:
        return BroadcastReceiver(self._settings)

    async def deliver(self, policy: Policy, rollouts: Rollouts, version: Version) -> None:
        """Raises PolicyLost, and WeightSyncError when the weights did not arrive as sent."""
        update = await policy.export(version)
        rollouts.keep(update)
        try:
            await self._broadcast(update, policy, rollouts)
        except BroadcastFailed as error:
            self._failures += 1
            rollouts.fell_back(version, error)
            await rollouts.load(update)

    async def _broadcast(self, update: WeightUpdate[Arrays], policy: Policy, rollouts: Rollouts) -> None:
        """Meet with the engines in service, in a new process group if they have changed or the last one failed."""
        manifest, source = update.manifest, update.source
        meeting = await policy.ask(BroadcastSender.invite, rollouts.members, self._failures)
        sending = policy.ask(BroadcastSender.send, manifest, source, meeting)
        receiving = rollouts.load(WeightUpdate(manifest, meeting))
        for end in await asyncio.gather(sending, receiving, return_exceptions=True):
            if isinstance(end, BaseException):
                raise end


class BroadcastSender(Sender[Arrays | BroadcastGroup]):
    """Packs for the object store; ``send`` broadcasts the same arrays."""

    def __init__(self, settings: CollectiveTransport, host: str) -> None:
        from rayloop.transports.process_group import Membership

        self._settings, self._host = settings, host
        self._membership = Membership(settings.backend, settings.timeout)
        self._meeting: BroadcastGroup | None = None
        self._invited: tuple[tuple[int, ...], int] | None = None

    def pack(self, version: Version, tensors: Mapping[str, Tensor]) -> WeightUpdate[Arrays | BroadcastGroup]:
        """As the object store does it."""
        packed = ArraySender().pack(version, tensors)
        return WeightUpdate(packed.manifest, packed.source)

    def invite(self, members: tuple[int, ...], failures: int) -> BroadcastGroup:
        """Where this rank and the rollout actors with these serial numbers meet.

        It is the last meeting, whose group exists, as long as neither they nor the number of failed broadcasts have changed.
        """
        port = self._membership.serve(self._host)
        if self._meeting is None or self._invited != (members, failures):
            self._invited = (members, failures)
            self._meeting = BroadcastGroup(self._host, port, secrets.token_hex(8), 1 + len(members))
        return self._meeting

    def send(self, manifest: Manifest, source: Arrays, meeting: BroadcastGroup) -> None:
        """Broadcast what ``pack`` made to those who come to the meeting. Raises BroadcastFailed."""
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
    """Receives at a meeting, or reads the object store's arrays."""

    def __init__(self, settings: CollectiveTransport) -> None:
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
